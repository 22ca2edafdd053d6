"""Which masks a step reveals, against loops over their definitions; what is proposed, against plain formulas."""

import jax
import numpy as np
import pytest

from refusion_jax.decoding.revealing import propose, quota_of_step, random_scores, reveal
from refusion_jax.decoding.rows import Rows
from refusion_jax.decoding.sampling import filter_logits, gumbel_noise
from refusion_jax.methods import ORDERINGS

pytestmark = pytest.mark.usefixtures("quick_compilation")

BATCH, WIDTH, VOCAB = 6, 5, 11

reveal_compiled = jax.jit(reveal)
propose_compiled = jax.jit(propose, static_argnames=("ordering", "sampling"))
filter_compiled, noise_compiled = jax.jit(filter_logits), jax.jit(gumbel_noise, static_argnums=3)


def make_rows(batch=BATCH, **fields):
    zeros = np.zeros(batch, np.int32)
    floats = np.zeros(batch, np.float32)
    keys = np.stack([jax.random.key_data(jax.random.key(seed)) for seed in range(batch)])
    none = np.full((batch, 1), VOCAB, np.int32)
    rows = Rows(
        prompts=none, prompt_lengths=zeros, lengths=zeros, block_lengths=zeros, block_steps=zeros, thresholds=floats,
        factors=floats, guidances=floats, temperatures=floats, top_ps=floats + 1, top_ks=zeros + VOCAB, keys=keys,
        eos_ids=none, suppressed_ids=none,
    )  # fmt: skip
    return rows.replace(**fields)


# ---- which masks ---------------------------------------------------------------------------------------------------


def revealed_of_row(scores, masked, quota, threshold, factor):
    """The places revealed, one after another from the best."""
    best_first = sorted(np.flatnonzero(masked), key=lambda place: (-scores[place], place))
    if threshold:
        count = sum(scores[place] >= threshold for place in best_first)
    elif factor:
        fits = [n for n, place in enumerate(best_first, 1) if np.float32(n + 1) * (1 - scores[place]) < factor]
        count = max(fits, default=0)
    else:
        count = quota
    return set(best_first[: max(count, 1)])


@pytest.mark.parametrize("way", ["quota", "threshold", "factor", "mixed"])
def test_against_a_loop(way):
    rng = np.random.default_rng(0)
    batch, width = 200, 8
    # Few values, so that many are equal and some are exactly the threshold.
    scores = (rng.integers(0, 9, (batch, width)) / np.float32(8)).astype(np.float32)
    masked = rng.random((batch, width)) < rng.choice([0, 0.5, 1], (batch, 1))
    quota = rng.integers(1, width + 1, batch).astype(np.int32)
    mode = rng.integers(0, 3, batch) if way == "mixed" else np.full(batch, ["quota", "threshold", "factor"].index(way))
    thresholds = np.where(mode == 1, rng.choice([0.25, 0.5, 0.875, 1], batch), 0).astype(np.float32)
    factors = np.where(mode == 2, rng.choice([0.3, 1, 1.9], batch), 0).astype(np.float32)
    got = np.asarray(reveal_compiled(scores, masked, quota, thresholds, factors))
    counts = set()
    for row in range(batch):
        expected = revealed_of_row(scores[row], masked[row], quota[row], thresholds[row], factors[row])
        assert set(np.flatnonzero(got[row])) == expected
        counts.add(len(expected))
    assert {0, 1, 2, 3, 4} <= counts  # none in rows without masks


def test_the_largest_number_that_fits_even_past_one_that_does_not():
    """`(n + 1) * (1 - c)` of 0.8, 0.8, 0.79 is 0.4, 0.6, 0.84; of 0.5 three times and 1 before it, 0, 1.5, 2, 2.5."""
    scores = np.array([[0.8, 0.8, 0.79, 0.1], [1, 0.5, 0.5, 0.5]], np.float32)
    masked, none, quota = np.ones((2, 4), bool), np.zeros(2, np.float32), np.full(2, 4, np.int32)
    for factor, counts in ((0.3, [1, 1]), (0.7, [2, 1]), (0.85, [3, 1]), (2.1, [3, 3]), (5.0, [4, 4])):
        got = reveal_compiled(scores, masked, quota, none, np.full(2, factor, np.float32))
        assert np.sum(got, axis=1).tolist() == counts


@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_scores_that_are_no_numbers_come_last_and_do_not_stop_decoding(threshold, factor):
    scores = np.array([[np.nan, np.nan, 0.25], [np.nan, 0.25, np.nan]], np.float32)
    masked = np.array([[True, True, False], [True, True, True]])
    full = [np.full(2, value, np.float32) for value in (threshold, factor)]
    got = reveal_compiled(scores, masked, np.ones(2, np.int32), *full)
    assert np.asarray(got).tolist() == [[True, False, False], [False, True, False]]


def test_quotas_are_as_equal_as_possible_the_earlier_ones_more():
    shares = [(tokens, steps) for tokens in (1, 4, 7, 32) for steps in range(1, tokens + 1)]
    cases = np.array([(step, tokens, steps) for tokens, steps in shares for step in range(steps)], np.int32)
    quotas = np.asarray(quota_of_step(*cases.T))
    for tokens, steps in shares:
        own = quotas[(cases[:, 1] == tokens) & (cases[:, 2] == steps)]
        assert own.sum() == tokens and np.ptp(own) <= 1 and (np.diff(own) <= 0).all()


# ---- what is proposed ----------------------------------------------------------------------------------------------


@pytest.fixture
def logits():
    return np.random.default_rng(1).normal(scale=2, size=(BATCH, WIDTH, VOCAB)).astype(np.float32)


@pytest.fixture
def positions():
    return np.arange(3, 3 + BATCH * WIDTH, dtype=np.int32).reshape(BATCH, WIDTH)


DRAWS = np.arange(BATCH, dtype=np.int32)


def softmax(logits):
    exp = np.exp(np.asarray(logits, np.float64))
    return exp / exp.sum(axis=-1, keepdims=True)


def score_of(ordering, logits, choice):
    p = softmax(logits)
    match ordering:
        case "confidence":
            return np.take_along_axis(p, np.asarray(choice)[..., None], axis=-1)[..., 0]
        case "entropy":
            return 1 + (p * np.log(p)).sum(axis=-1) / np.log(VOCAB)
        case "margin":
            return np.sort(p)[..., -1] - np.sort(p)[..., -2]


@pytest.mark.parametrize(("ordering", "sampling"), [*((each, False) for each in ORDERINGS), ("confidence", True)])
def test_greedy(logits, positions, ordering, sampling):
    """Rows without a temperature among those that have one are greedy, too; their filters take no part."""
    rows = make_rows(top_ks=np.full(BATCH, 2, np.int32), top_ps=np.full(BATCH, 0.1, np.float32))
    if sampling:
        rows = rows.replace(temperatures=np.where(DRAWS == 0, 1, 0).astype(np.float32))
    proposal = propose_compiled(logits, rows, positions, DRAWS, ordering, sampling)
    greedy = slice(1, None) if sampling else slice(None)
    np.testing.assert_array_equal(proposal.choice[greedy], logits.argmax(axis=-1)[greedy])
    assert (proposal.choice.dtype, proposal.score.dtype) == (np.int32, np.float32)
    sure = score_of("confidence", logits, proposal.choice)
    np.testing.assert_allclose(proposal.probability, sure, rtol=1e-5)
    if ordering != "random":
        expected = score_of(ordering, logits, proposal.choice)
        np.testing.assert_allclose(proposal.score, expected, rtol=1e-4, atol=1e-6)


def test_suppressed_tokens_are_not_proposed_but_count_in_the_distribution(logits, positions):
    best = logits[:, 0].argmax(axis=-1).astype(np.int32)
    rows = make_rows(suppressed_ids=np.stack([best, np.full(BATCH, VOCAB)], axis=1).astype(np.int32))
    proposal = propose_compiled(logits, rows, positions, DRAWS, "confidence", False)
    allowed = logits.copy()
    allowed[np.arange(BATCH), :, best] = -np.inf
    np.testing.assert_array_equal(proposal.choice, allowed.argmax(axis=-1))
    np.testing.assert_allclose(proposal.score, score_of("confidence", logits, proposal.choice), rtol=1e-5)


def test_drawn_tokens_are_the_filtered_logits_with_scaled_noise(logits, positions):
    temperatures = np.linspace(0.5, 3, BATCH).astype(np.float32)
    top_ks, top_ps = np.full(BATCH, 4, np.int32), np.full(BATCH, 0.9, np.float32)
    rows = make_rows(temperatures=temperatures, top_ks=top_ks, top_ps=top_ps)
    proposal = propose_compiled(logits, rows, positions, DRAWS, "margin", True)
    token_settings = [np.repeat(values, WIDTH) for values in (temperatures, top_ks, top_ps)]
    kept = filter_compiled(logits.reshape(-1, VOCAB), *token_settings)
    noise = noise_compiled(np.repeat(rows.keys, WIDTH, axis=0), np.repeat(DRAWS, WIDTH), positions.reshape(-1), VOCAB)
    expected = np.argmax(kept + token_settings[0][:, None] * noise, axis=-1)
    np.testing.assert_array_equal(proposal.choice.reshape(-1), expected)
    assert (np.asarray(proposal.choice) != logits.argmax(axis=-1)).any()
    # What is drawn changes neither what the model's distribution is nor its margin.
    np.testing.assert_allclose(proposal.score, score_of("margin", logits, None), rtol=1e-4, atol=1e-6)
    sure = score_of("confidence", logits, proposal.choice)
    np.testing.assert_allclose(proposal.probability, sure, rtol=1e-5)


def test_random_scores_are_uniform_and_differ_by_row_forward_and_position():
    count = 4000
    keys = np.tile(make_rows().keys[0], (count, 1))
    ones, numbers = np.ones(count, np.int32), np.arange(count, dtype=np.int32)
    by_position, by_forward = random_scores(keys, ones, numbers), random_scores(keys, numbers, ones)
    by_row = random_scores(np.stack([keys[:, 0], numbers.astype(np.uint32)], axis=1), ones, ones)
    for scores in (by_position, by_forward, by_row):
        assert np.min(scores) >= 0 and np.max(scores) < 1 and len(np.unique(scores)) > 0.99 * count
        assert np.abs(np.sort(scores) - (numbers + 0.5) / count).max() < 0.03  # Kolmogorov-Smirnov, p < 0.002
    # Nothing to do with the noise of any token.
    noise = np.asarray(noise_compiled(keys, ones, numbers, 3))
    assert np.abs(np.corrcoef(np.asarray(by_position), noise.T)[0, 1:]).max() < 0.06


def test_random_ordering_takes_them(logits, positions):
    rows = make_rows()
    proposal = propose_compiled(logits, rows, positions, DRAWS, "random", False)
    keys, draws = np.repeat(rows.keys, WIDTH, axis=0), np.repeat(DRAWS, WIDTH)
    expected = random_scores(keys, draws, positions.reshape(-1)).reshape(BATCH, WIDTH)
    np.testing.assert_array_equal(proposal.score, expected)
