"""LLaDA's and Dream's decoding against one plain loop over NumPy forwards of whole sequences."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from random_models import random_model
from reference_masked_diffusion import PlainDecode

from refusion_jax.config import ModelConfig
from refusion_jax.decoding import masked_diffusion
from refusion_jax.decoding.masked_diffusion import decode_loop, decode_masked
from refusion_jax.decoding.revealing import random_scores
from refusion_jax.decoding.rows import Rows
from refusion_jax.decoding.sampling import gumbel_noise
from refusion_jax.methods import Method

pytestmark = pytest.mark.usefixtures("quick_compilation", "narrow_windows")

PROMPT_LENGTH, CAPACITY, VOCAB, ROWS = 5, 9, 16, 6
MASK, EOS, UNUSED = 15, (5,), VOCAB
SEEDS = (1, 2)
MARGIN = 2e-5  # closer decisions may fall differently in two float32 programs
CONFIG = ModelConfig(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, eos_token_ids=EOS, mask_token_id=MASK,
)  # fmt: skip


@pytest.fixture(scope="module")
def narrow_windows():
    """Two lengths of a window for the cache "prefix"."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masked_diffusion, "NARROWEST", 4)
        yield


def model_of(seed):
    """One as sure as it takes to reveal several tokens at once."""
    return random_model(CONFIG, seed, sharpness=3)


# ---- requests ------------------------------------------------------------------------------------------------------


def requests(method, seed=1, temperature=0.0):
    """Prompts of all lengths and a row for each; response lengths that the method's blocks divide."""
    rng = np.random.default_rng(seed)
    unit = max(method.block_length, method.steps, 1)
    prompts = [rng.integers(MASK, size=1 + row % PROMPT_LENGTH).tolist() for row in range(ROWS)]
    return prompts, make_rows(method, prompts, rng.choice(range(unit, CAPACITY + 1, unit), ROWS), temperature)


def make_rows(method, prompts, lengths, temperature=0.0, prompt_length=PROMPT_LENGTH):
    """Rows whose random keys are of their prompts, so that a row is the same in any batch."""
    count = len(prompts)
    tokens = np.full((count, prompt_length), 1, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    blocks = np.array([method.blocks(int(length)) if length else (0, 0) for length in lengths], np.int32)
    keys = [np.asarray([sum(prompt), len(prompt)], np.uint32) for prompt in prompts]

    def full(value, dtype=np.float32):
        return np.full(count, value, dtype)

    return Rows(
        prompts=tokens, prompt_lengths=np.array([len(prompt) for prompt in prompts], np.int32),
        lengths=np.asarray(lengths, np.int32), block_lengths=blocks[:, 0], block_steps=blocks[:, 1],
        thresholds=full(method.threshold), factors=full(method.factor), guidances=full(method.guidance),
        temperatures=full(temperature), top_ps=full(1), top_ks=full(VOCAB, np.int32), keys=np.stack(keys),
        eos_ids=np.tile(np.array(EOS, np.int32), (count, 1)),
        suppressed_ids=np.tile(np.array([MASK, UNUSED], np.int32), (count, 1)),
    )  # fmt: skip


def decode(method, rows, seed=1, capacity=CAPACITY):
    module, params, _ = model_of(seed)
    # Where drawn responses are tested, greedy ones come from the same program.
    sampling = method.ordering == "random" or method.cache == "dual"
    return jax.device_get(decode_masked(module, params, rows, method, capacity, sampling))


# ---- comparing -----------------------------------------------------------------------------------------------------


@functools.cache
def _noise_program():
    draws, offsets = np.mgrid[: 2 * CAPACITY, :CAPACITY].astype(np.int32)

    @jax.jit
    def grids(key, prompt_length):
        keys = jax.numpy.broadcast_to(key, (*draws.shape, 2))
        positions = offsets + prompt_length
        uniform = random_scores(keys.reshape(-1, 2), draws.reshape(-1), positions.reshape(-1))
        return gumbel_noise(keys, draws, positions, VOCAB), uniform.reshape(draws.shape)

    return grids


def noise(key, prompt_length):
    """Gumbel (draws, capacity, vocab) and uniform (draws, capacity) noise of a row."""
    return jax.device_get(_noise_program()(key, np.int32(prompt_length)))


def plain_decode(model, method, prompt, rows, row):
    settings = {"mask": MASK, "eos": EOS, "temperature": float(rows.temperatures[row])}
    gumbel, uniform = noise(rows.keys[row], len(prompt))
    return PlainDecode(model, method, prompt, int(rows.lengths[row]), gumbel=gumbel, uniform=uniform, **settings).run()


def check(method, temperature=0.0):
    """Compares all rows whose decisions are clear, and returns what they were like."""
    compared, rows_seen = [], 0
    for seed in SEEDS:
        prompts, rows = requests(method, seed, temperature)
        got = decode(method, rows, seed)
        for row, prompt in enumerate(prompts):
            plain = plain_decode(model_of(seed)[2], method, prompt, rows, row)
            rows_seen += 1
            if plain.margin > MARGIN:
                compared.append(plain)
                assert_same(plain, got, row)
    assert len(compared) >= 0.8 * rows_seen
    return compared


def assert_same(plain, got, row):
    committed = got.committed[row]
    assert committed[: plain.length].tolist() == [token is not None for token in plain.answer]
    assert not committed[plain.length :].any() and (got.tokens[row][~committed] == MASK).all()
    assert got.tokens[row][committed].tolist() == plain.tokens
    assert got.commit_forwards[row][committed].tolist() == [by for by in plain.by if by is not None]
    expected = [p for p in plain.probabilities if p is not None]
    np.testing.assert_allclose(got.probabilities[row][committed], expected, rtol=1e-3)
    counts = (got.forwards[row], got.positions[row], got.cached[row])
    assert counts == (plain.forwards, plain.positions, plain.cached)


def assert_alike(got, expected):
    for field in ("tokens", "committed", "commit_forwards", "forwards", "positions", "cached"):
        np.testing.assert_array_equal(getattr(got, field), getattr(expected, field))
    np.testing.assert_allclose(got.probabilities, expected.probabilities, rtol=1e-3, atol=1e-6)


def describe(value):
    """A method as a test's name has room for."""
    if not isinstance(value, Method | dict):
        return None
    fields = value if isinstance(value, dict) else dataclasses.asdict(value)
    return "-".join(f"{field}={value}" for field, value in fields.items() if value not in ("", 0, "none"))


# ---- without a cache -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ordering"),
    [("llada", "confidence"), ("llada", "margin"), ("llada", "random"), ("dream", "entropy")],
)
def test_orderings(name, ordering):
    """Whole responses, in blocks, and in fewer steps than tokens; rows are of different lengths, some end early."""
    rows = []
    for settings in ({}, {"block_length": 3}, {"block_length": 1}, {"steps": 3}, {"steps": 1}):
        rows += check(Method(name, ordering=ordering, **settings))
    ended = [plain for plain in rows if None in plain.answer]
    assert ended and all(plain.ended for plain in ended)
    assert any(plain.forwards < plain.length for plain in rows if plain not in ended)
    assert any(plain.by != sorted(plain.by) for plain in rows if plain not in ended)


def test_steps_that_share_a_block_unequally():
    method = Method("llada", block_length=9, steps=4)
    assert max(plain.by[::-1].count(0) for plain in check(method)) == 3


@pytest.mark.parametrize(("name", "ordering"), [("llada", "confidence"), ("dream", "entropy")])
def test_the_default_ordering(name, ordering):
    _, rows = requests(Method(name))
    jax.tree.map(
        np.testing.assert_array_equal, decode(Method(name), rows), decode(Method(name, ordering=ordering), rows)
    )


@pytest.mark.parametrize("method", [Method("llada"), Method("llada", ordering="margin"), Method("dream")], ids=describe)
@pytest.mark.parametrize(
    "way", [{"threshold": 0.3}, {"threshold": 0.7}, {"factor": 0.8}, {"factor": 1.6}], ids=describe
)
def test_as_many_as_the_model_is_sure_of(method, way):
    rows = check(dataclasses.replace(method, **way)) + check(dataclasses.replace(method, block_length=3, **way))
    saved = {len(plain.tokens) - plain.forwards for plain in rows}
    assert len(saved) > 2


@pytest.mark.parametrize(("name", "unconditional"), [("llada", "mask"), ("dream", "empty")])
def test_guidance(name, unconditional):
    for guidance, block_length in ((0.5, 0), (2.0, 3)):
        method = Method(name, guidance=guidance, unconditional=unconditional, block_length=block_length)
        without = check(Method(name, block_length=block_length))
        assert [plain.answer for plain in check(method)] != [plain.answer for plain in without]


def test_drawn_tokens():
    method = Method("llada", ordering="random")
    assert [plain.answer for plain in check(method, 1.5)] != [plain.answer for plain in check(method)]


# ---- with a cache --------------------------------------------------------------------------------------------------

CACHED = [(name, cache) for name in ("llada", "dream") for cache in ("prefix", "dual")]
OFTEN = {("llada", "prefix")}  # the others are compiled with the slow tests


def cached(*more):
    """Cases of all systems and caches, with further values."""
    return [pytest.param(*each, *more, marks=[] if each in OFTEN else pytest.mark.slow) for each in CACHED]


@pytest.mark.parametrize(("name", "cache"), cached())
def test_what_a_block_keeps(name, cache):
    rows = check(Method(name, cache=cache, block_length=3))
    assert any(plain.cached for plain in rows)
    exact = check(Method(name, block_length=3))
    assert [plain.answer for plain in rows] != [plain.answer for plain in exact]
    assert sum(plain.positions for plain in rows) < sum(plain.positions for plain in exact)
    fewer = check(Method(name, cache=cache, block_length=3, threshold=0.4))
    assert sum(plain.forwards for plain in fewer) < sum(plain.forwards for plain in rows)


def test_drawn_tokens_with_a_cache():
    check(Method("dream", cache="dual", block_length=3), 1.0)


@pytest.mark.parametrize(
    ("name", "cache", "way"),
    [
        *cached({"block_length": 3, "threshold": 1e-6}),
        pytest.param("dream", "dual", {"block_length": 1}, marks=pytest.mark.slow),
    ],
)
def test_blocks_of_one_forward_are_exact(name, cache, way):
    _, rows = requests(Method(name, **way))
    exact, got = decode(Method(name, **way), rows), decode(Method(name, cache=cache, **way), rows)
    assert_alike(got, exact)
    assert not got.cached.any() and got.forwards.any()


# ---- batches and programs ------------------------------------------------------------------------------------------

UNCACHED, DUAL = Method("llada", ordering="random"), Method("dream", block_length=3, cache="dual", threshold=0.5)
PREFIX = Method("llada", block_length=3, cache="prefix")


@pytest.mark.parametrize(("method", "temperature"), [(UNCACHED, 1.5), (DUAL, 1.0), (PREFIX, 0.0)], ids=describe)
def test_a_row_does_not_depend_on_the_others(method, temperature):
    prompts, rows = requests(method, temperature=temperature)
    together = decode(method, rows)
    assert len(set(together.forwards.tolist())) > 1
    for row in range(ROWS):
        own = np.arange(ROWS) == row
        others = [prompt if is_own else [] for prompt, is_own in zip(prompts, own, strict=True)]
        alone = decode(method, make_rows(method, others, rows.lengths * own, temperature))
        assert_alike(only(alone, own), only(together, own))
        idle = only(alone, ~own)
        assert not idle.committed.any() and not idle.forwards.any() and not idle.positions.any()


@pytest.mark.slow
def test_room_for_more_changes_nothing():
    """Another row, longer prompts, longer responses."""
    prompts, rows = requests(DUAL, temperature=1.0)
    more = make_rows(DUAL, [*prompts, [1] * 8], [*rows.lengths, 12], 1.0, prompt_length=8)
    got = only(decode(DUAL, more, capacity=12), np.arange(ROWS))
    trimmed = jax.tree.map(lambda part: part if part.ndim == 1 else part[:, :CAPACITY], got)
    assert_alike(trimmed, decode(DUAL, rows))


def only(responses, rows):
    return jax.tree.map(lambda part: part[rows], responses)


def test_numbers_compile_nothing():
    numbers = [{"threshold": 0.2}, {"threshold": 0.9}, {"factor": 1.0}, {"steps": 3}, {}]
    prompts = requests(DUAL)[0]
    sweeps = [
        [Method("llada", block_length=length, **each) for length in (0, 9, 3) for each in numbers],
        [Method("dream", block_length=3, cache="dual", **each) for each in numbers],
        [Method("llada", guidance=each, unconditional="mask") for each in (0.5, 1.0, 4.0)],
    ]
    for methods in sweeps:
        batches = [make_rows(method, prompts, [9] * ROWS) for method in methods]
        decode(methods[0], batches[0])
        before = decode_loop._cache_size()
        results = [decode(method, rows) for method, rows in zip(methods, batches, strict=True)]
        assert decode_loop._cache_size() == before
        assert len({result.tokens.tobytes() for result in results}) > 1
