"""Choices and probabilities read from logits, what they are filtered by, and the noise that they are drawn with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.decoding.rules import probability
from refusion_jax.decoding.sampling import filter_logits, gumbel_noise, read_logits, suppress

COUNT, VOCAB = 12, 7

filter_compiled = jax.jit(filter_logits)
noise_compiled = jax.jit(gumbel_noise, static_argnums=3)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def logits(rng):
    return rng.normal(scale=3, size=(COUNT, VOCAB)).astype(np.float32)


@pytest.fixture
def tokens(rng):
    return rng.integers(VOCAB, size=COUNT)


def softmax(logits):
    exp = np.exp(np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def at(probabilities, tokens):
    return np.take_along_axis(probabilities, np.asarray(tokens)[:, None], axis=-1)[:, 0]


def keys_of(*seeds):
    return jnp.stack([jax.random.key_data(jax.random.key(seed)) for seed in seeds])


# ---- reading -------------------------------------------------------------------------------------------------------


def check_probabilities(reading, logits, tokens):
    np.testing.assert_allclose(reading.choice_probability, at(softmax(logits), reading.choice), rtol=1e-5)
    np.testing.assert_allclose(reading.token_probability, at(softmax(logits), tokens), rtol=1e-5)


def test_greedy(logits, tokens):
    reading = read_logits(logits, logits, tokens, probability)
    np.testing.assert_array_equal(reading.choice, logits.argmax(axis=-1))
    assert reading.choice.dtype == np.int32
    check_probabilities(reading, logits, tokens)
    np.testing.assert_array_equal(reading.confidence, reading.choice_probability)


def test_equal_logits_give_the_lowest_token(tokens):
    flat = np.zeros((COUNT, VOCAB), np.float32)
    assert not read_logits(flat, flat, tokens, probability).choice.any()


def test_large_logits_saturate_without_overflow(tokens):
    logits = np.zeros((COUNT, VOCAB), np.float32)
    logits[..., 5] = 1e4
    reading = read_logits(logits, logits, np.full_like(tokens, 2), probability)
    assert (reading.choice_probability == 1).all() and (reading.token_probability == 0).all()


def test_scores_decide_the_choice_only(rng, logits, tokens):
    scores = (logits + rng.gumbel(scale=4, size=logits.shape)).astype(np.float32)
    scores[:, 2] = -np.inf
    reading = read_logits(logits, scores, tokens, probability)
    np.testing.assert_array_equal(reading.choice, scores.argmax(axis=-1))
    assert (reading.choice != logits.argmax(axis=-1)).any()
    check_probabilities(reading, logits, tokens)


def test_the_confidence_rule_sees_plain_logits_and_the_choices_probability(logits, tokens):
    scores = np.roll(logits, 1, axis=-1)
    reading = read_logits(logits, scores, tokens, lambda logits, sure: jnp.max(logits, axis=-1) - sure)
    np.testing.assert_allclose(reading.confidence, logits.max(axis=-1) - reading.choice_probability, rtol=1e-5)
    assert (reading.choice != logits.argmax(axis=-1)).all()


def test_suppress(logits):
    """Each token has its own list; an ID beyond the vocabulary stands for none."""
    best = logits.argmax(axis=-1)
    suppressed = np.stack([best, np.where(np.arange(COUNT) % 2, VOCAB, (best + 1) % VOCAB)], axis=1)
    suppressed[3] = VOCAB
    expected = logits.copy()
    for row, ids in zip(expected, suppressed, strict=True):
        row[ids[ids < VOCAB]] = -np.inf
    got = suppress(jnp.asarray(logits), suppressed)
    np.testing.assert_array_equal(got, expected)
    changed = np.asarray(got).argmax(axis=-1) != best
    assert changed.tolist() == [index != 3 for index in range(COUNT)]


# ---- filters -------------------------------------------------------------------------------------------------------


def kept_by_sorting(logits, temperature, top_k, top_p):
    """Which tokens of one distribution are kept, by its definition on a sorted list; ties with the last one are."""
    if temperature == 0:
        return np.ones(len(logits), bool)
    probabilities = softmax(logits / temperature)
    descending = np.sort(probabilities)[::-1]
    among = probabilities >= descending[min(top_k, len(logits)) - 1]
    if top_p >= 1:
        return among
    mass = np.sort(probabilities[among])[::-1]
    last = np.searchsorted(np.cumsum(mass), top_p * mass.sum())
    return among & (probabilities >= mass[last])


def check_filter(logits, temperatures, top_ks, top_ps):
    logits = np.asarray(logits, np.float32)
    columns = [np.asarray(temperatures, np.float32), np.asarray(top_ks, np.int32), np.asarray(top_ps, np.float32)]
    got = np.asarray(filter_compiled(logits, *columns))
    rows = zip(logits, *columns, strict=True)
    expected = np.array([kept_by_sorting(*row) for row in rows])
    np.testing.assert_array_equal(got, np.where(expected, logits, -np.inf))
    assert expected.any(axis=-1).all()
    return expected.sum(axis=-1)


ROWS, WORDS = 64, 50  # one compiled shape

# (temperature, top-k, top-p)
FILTERS = {
    "nothing": (1.0, WORDS, 1.0),
    "k=1": (1.0, 1, 1.0),
    "k=5": (1.0, 5, 1.0),
    "k beyond the vocabulary": (1.0, WORDS + 9, 1.0),
    "p tiny": (1.0, WORDS, 1e-6),
    "p=0.5": (1.0, WORDS, 0.5),
    "p=0.95, hot": (2.5, WORDS, 0.95),
    "both": (0.7, 8, 0.8),
    "k after p would keep more": (3.0, 4, 0.9),
    "cold": (0.05, 6, 0.9),
    "greedy": (0.0, 1, 0.1),
}


def random_logits(seed):
    return np.random.default_rng(seed).normal(scale=2, size=(ROWS, WORDS)).astype(np.float32)


@pytest.mark.parametrize("name", FILTERS)
def test_filters_against_a_sort(name):
    counts = check_filter(random_logits(1), *(np.full(ROWS, value) for value in FILTERS[name]))
    if name in ("nothing", "k beyond the vocabulary", "greedy"):
        assert (counts == WORDS).all()
    elif name in ("k=1", "p tiny", "k=5"):
        assert (counts == (5 if name == "k=5" else 1)).all()
    else:
        assert 1 < counts.mean() < 0.9 * WORDS


def test_rows_are_filtered_each_by_its_own_settings():
    rng = np.random.default_rng(2)
    columns = zip(*(list(FILTERS.values())[i] for i in rng.integers(len(FILTERS), size=ROWS)), strict=True)
    counts = check_filter(random_logits(3), *columns)
    assert len(set(counts.tolist())) > 5


@pytest.mark.parametrize("top_k", [1, 3, WORDS])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 1.0])
def test_tokens_as_probable_as_the_last_one_kept_are_kept(top_k, top_p):
    """Few different logits, many of each."""
    steps = np.random.default_rng(4).integers(0, 6, size=(ROWS, WORDS))
    logits = np.log(2) * steps
    counts = check_filter(logits, np.ones(ROWS), np.full(ROWS, top_k), np.full(ROWS, top_p))
    assert (counts >= (steps == steps.max(axis=-1, keepdims=True)).sum(axis=-1)).all()
    assert counts.max() > min(top_k, 3)
    equal = check_filter(np.zeros((ROWS, WORDS)), np.ones(ROWS), np.full(ROWS, top_k), np.full(ROWS, top_p))
    assert (equal == WORDS).all()


def test_suppressed_tokens_are_no_part_of_the_nucleus():
    logits = random_logits(5)
    logits[:, :40] = -np.inf
    counts = check_filter(logits, np.ones(ROWS), np.full(ROWS, WORDS), np.full(ROWS, 0.999))
    assert counts.max() <= 10
    few = filter_compiled(logits, np.ones(ROWS, np.float32), np.full(ROWS, 30), np.ones(ROWS, np.float32))
    assert (np.isfinite(few).sum(axis=-1) == 10).all()


# ---- draws ---------------------------------------------------------------------------------------------------------


def test_noise_depends_on_key_draw_and_position_only():
    """Whatever else is in the batch, and wherever in it a token stands."""
    keys = keys_of(1, 1, 1, 2, 2, 2)
    positions, draws = np.array([3, 9, 4, 9, 3, 3]), np.array([5, 5, 5, 0, 0, 0])
    noise = gumbel_noise(keys, draws, positions, VOCAB)
    assert noise.shape == (6, VOCAB) and noise.dtype == np.float32
    alone = gumbel_noise(keys_of(2, 2), np.array([0, 0]), np.array([3, 9]), VOCAB)
    np.testing.assert_array_equal(alone, noise[jnp.array([4, 3])])
    np.testing.assert_array_equal(noise[4], noise[5])
    square = gumbel_noise(keys.reshape(2, 3, 2), draws.reshape(2, 3), positions.reshape(2, 3), VOCAB)
    np.testing.assert_array_equal(square.reshape(6, VOCAB), noise)

    redrawn = gumbel_noise(keys_of(1), np.array([6]), positions[:1], VOCAB)
    different = [noise[0], noise[1], noise[3], noise[4], redrawn[0]]
    for i, one in enumerate(different):
        for other in different[:i]:
            assert (one != other).all()


DRAWS = 20_000
DISTRIBUTION = np.array([1.0, -2.0, 0.3, 2.0, 0.0, -0.5], np.float32)


@pytest.fixture(scope="module")
def noise():
    keys = jnp.broadcast_to(keys_of(0)[0], (DRAWS, 2))
    return np.asarray(noise_compiled(keys, np.zeros(DRAWS, np.int32), np.arange(DRAWS), len(DISTRIBUTION)))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.5, 6, 1.0), (1.0, 6, 1.0), (2.0, 6, 1.0), (1.0, 3, 1.0), (1.5, 6, 0.7), (2.0, 4, 0.8), (1.0, 1, 1.0)],
)
def test_choices_follow_the_filtered_softmax(noise, temperature, top_k, top_p):
    """Frequencies of 20,000 positions' choices, within five standard deviations."""
    everywhere = np.broadcast_to(DISTRIBUTION, noise.shape)
    settings = np.full(DRAWS, temperature, np.float32), np.full(DRAWS, top_k), np.full(DRAWS, top_p, np.float32)
    scores = filter_compiled(everywhere, *settings) + temperature * noise
    reading = read_logits(everywhere, scores, np.zeros(DRAWS, np.int32), probability)
    frequency = np.bincount(reading.choice, minlength=len(DISTRIBUTION)) / DRAWS
    kept = kept_by_sorting(DISTRIBUTION, temperature, top_k, top_p)
    assert kept.sum() == min(top_k, {0.7: 3, 0.8: 3}.get(top_p, 6))
    expected = softmax(np.where(kept, DISTRIBUTION, -np.inf) / temperature)
    deviation = np.sqrt(expected * (1 - expected) / DRAWS)
    assert (np.abs(frequency - expected) < 5 * deviation + 1e-9).all()
    # The probability that a choice is accepted with is the unfiltered one, at temperature 1.
    np.testing.assert_allclose(reading.choice_probability, softmax(DISTRIBUTION)[reading.choice], rtol=1e-5)


def test_draws_are_independent():
    """The same positions drawn anew: agreement no more frequent than chance has it."""
    count, vocab = 5_000, 4
    keys = jnp.broadcast_to(keys_of(0)[0], (2 * count, 2))
    draws, positions = np.repeat([0, 1], count), np.tile(np.arange(count), 2)
    first, second = np.asarray(noise_compiled(keys, draws, positions, vocab)).argmax(axis=-1).reshape(2, count)
    assert abs((first == second).mean() - 1 / vocab) < 5 * np.sqrt(3 / 16 / count)
