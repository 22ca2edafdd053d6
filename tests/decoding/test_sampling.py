"""Choices and probabilities read from logits, and the noise that choices are drawn with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.decoding.sampling import gumbel_noise, read_logits

BATCH, WIDTH, VOCAB = 3, 4, 7
NOTHING = np.full((BATCH, 2), VOCAB)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def logits(rng):
    return rng.normal(scale=3, size=(BATCH, WIDTH, VOCAB)).astype(np.float32)


@pytest.fixture
def tokens(rng):
    return rng.integers(VOCAB, size=(BATCH, WIDTH))


def softmax(logits):
    exp = np.exp(np.asarray(logits, np.float64) - logits.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def at(probability, tokens):
    return np.take_along_axis(probability, np.asarray(tokens)[..., None], axis=-1)[..., 0]


def keys_of(*seeds):
    return jnp.stack([jax.random.key_data(jax.random.key(seed)) for seed in seeds])


def check_probabilities(reading, logits, tokens):
    np.testing.assert_allclose(reading.choice_probability, at(softmax(logits), reading.choice), rtol=1e-5)
    np.testing.assert_allclose(reading.token_probability, at(softmax(logits), tokens), rtol=1e-5)


@pytest.mark.parametrize("noise", [None, np.zeros((BATCH, WIDTH, VOCAB), np.float32)], ids=["none", "zeros"])
def test_greedy(logits, tokens, noise):
    reading = read_logits(logits, tokens, noise, NOTHING)
    np.testing.assert_array_equal(reading.choice, logits.argmax(axis=-1))
    assert reading.choice.dtype == np.int32
    check_probabilities(reading, logits, tokens)


def test_equal_logits_give_the_lowest_token(tokens):
    reading = read_logits(np.zeros((BATCH, WIDTH, VOCAB), np.float32), tokens, None, NOTHING)
    assert not reading.choice.any()


def test_large_logits_saturate_without_overflow(tokens):
    logits = np.zeros((BATCH, WIDTH, VOCAB), np.float32)
    logits[..., 5] = 1e4
    reading = read_logits(logits, np.full_like(tokens, 2), None, NOTHING)
    assert (reading.choice_probability == 1).all() and (reading.token_probability == 0).all()


def test_noise_changes_the_choice_only(rng, logits, tokens):
    noise = rng.gumbel(scale=4, size=logits.shape).astype(np.float32)
    reading = read_logits(logits, tokens, noise, NOTHING)
    np.testing.assert_array_equal(reading.choice, (logits + noise).argmax(axis=-1))
    assert (reading.choice != logits.argmax(axis=-1)).any()
    check_probabilities(reading, logits, tokens)


@pytest.mark.parametrize("noisy", [False, True])
def test_suppression_changes_the_choice_only(rng, logits, tokens, noisy):
    """Each row has its own list; an ID beyond the vocabulary stands for none."""
    noise = rng.gumbel(size=logits.shape).astype(np.float32) if noisy else np.zeros_like(logits)
    best = (logits + noise).argmax(axis=-1)
    suppressed = np.array([[best[0, 0], best[0, 1]], [VOCAB, VOCAB], [best[2, 3], VOCAB]])
    reading = read_logits(logits, tokens, noise if noisy else None, suppressed)
    allowed = logits + noise
    allowed[0, :, suppressed[0]] = -np.inf
    allowed[2, :, suppressed[2, 0]] = -np.inf
    np.testing.assert_array_equal(reading.choice, allowed.argmax(axis=-1))
    check_probabilities(reading, logits, tokens)


def test_noise_depends_on_key_draw_and_position_only():
    """Whatever else is in the batch, and wherever in it a row or position stands."""
    positions = np.array([[3, 9, 4], [9, 3, 3]])
    both = gumbel_noise(keys_of(1, 2), np.array([5, 0]), positions, VOCAB)
    assert both.shape == (2, 3, VOCAB) and both.dtype == np.float32
    alone = gumbel_noise(keys_of(2), np.array([0]), np.array([[3, 9]]), VOCAB)
    np.testing.assert_array_equal(alone[0], both[1, [1, 0]])
    np.testing.assert_array_equal(both[1, 1], both[1, 2])

    redrawn = gumbel_noise(keys_of(1), np.array([6]), positions[:1], VOCAB)
    different = [both[0, 0], both[0, 1], both[1, 0], both[1, 1], redrawn[0, 0]]
    for i, noise in enumerate(different):
        for other in different[:i]:
            assert (noise != other).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_choices_follow_the_softmax(temperature):
    """Frequencies of 20,000 positions' choices, within five standard deviations."""
    count, vocab = 20_000, 6
    logits = np.array([1.0, -2.0, 0.3, 2.0, 0.0, -0.5], np.float32)
    noise = gumbel_noise(keys_of(0), np.array([0]), np.arange(count)[None], vocab)
    everywhere = np.broadcast_to(logits, (1, count, vocab))
    reading = read_logits(everywhere, np.zeros((1, count), np.int32), temperature * noise, np.full((1, 1), vocab))
    frequency = np.bincount(np.asarray(reading.choice)[0], minlength=vocab) / count
    expected = softmax(logits / temperature)
    deviation = np.sqrt(expected * (1 - expected) / count)
    assert (np.abs(frequency - expected) < 5 * deviation + 1e-9).all()


def test_draws_are_independent():
    """The same positions drawn anew: agreement no more frequent than chance has it."""
    count, vocab = 5_000, 4
    noise = gumbel_noise(keys_of(0, 0), np.array([0, 1]), np.tile(np.arange(count), (2, 1)), vocab)
    first, second = np.asarray(noise).argmax(axis=-1)
    assert abs((first == second).mean() - 1 / vocab) < 5 * np.sqrt(3 / 16 / count)
