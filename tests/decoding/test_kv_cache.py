"""Committing to the KV buffer, and starting its rows anew, against plain loops."""

import jax
import numpy as np
import pytest

from refusion_jax.config import ModelConfig
from refusion_jax.decoding import kv_cache
from refusion_jax.decoding.kv_cache import commit, empty_cache, full_cache, write_prompts
from refusion_jax.modeling import KVCache
from refusion_jax.modeling.quantization import quantize_heads

pytestmark = pytest.mark.usefixtures("quick_compilation")

LAYERS, HEADS, BUFFER, HEAD_DIM = 2, 2, 12, 4
write_compiled, commit_compiled = jax.jit(write_prompts), jax.jit(commit)


def random_cache(rng, lengths) -> KVCache:
    """Entries beyond the committed length hold junk, as they may after a rejected draft."""
    keys, values = rng.normal(size=(2, LAYERS, len(lengths), HEADS, BUFFER, HEAD_DIM)).astype(np.float32)
    return KVCache(keys=keys, values=values, lengths=np.array(lengths, np.int32))


def random_query(rng, rows, width):
    return tuple(rng.normal(size=(2, LAYERS, rows, HEADS, width, HEAD_DIM)).astype(np.float32))


def plain_commit(buffer, lengths, new, counts):
    buffer = buffer.copy()
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for entry in range(count):
            buffer[:, row, :, length + entry] = new[:, row, :, entry]
    return buffer


def check(cache, kv, counts, committing=None):
    counts = np.array(counts, np.int32)
    after = (committing or jax.jit(commit))(cache, kv, counts)
    np.testing.assert_array_equal(after.lengths, cache.lengths + counts)
    np.testing.assert_array_equal(after.keys, plain_commit(cache.keys, cache.lengths, kv[0], counts))
    np.testing.assert_array_equal(after.values, plain_commit(cache.values, cache.lengths, kv[1], counts))
    return after


def fresh_commit():
    """`commit` compiled anew: the chunk is read when it is traced."""
    return jax.jit(lambda *arguments: commit(*arguments))


def test_empty_cache():
    config = ModelConfig(vocab_size=16, num_hidden_layers=3, num_key_value_heads=2, head_dim=6, dtype="bfloat16")
    cache = empty_cache(config, batch=5, buffer_length=9)
    assert cache.keys.shape == cache.values.shape == (3, 5, 2, 9, 6)
    assert cache.keys.dtype == cache.values.dtype == "bfloat16"
    assert not cache.keys.any() and not cache.values.any()
    assert cache.lengths.tolist() == [0] * 5


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        pytest.param([0, 3, 5], [4, 2, 1], id="inside"),
        pytest.param([0, 3, 8], [0, 0, 0], id="nothing"),
        pytest.param([8, 9, 11, 12], [4, 3, 1, 0], id="to_the_end"),
        pytest.param([9, 10, 12], [1, 0, 0], id="window_beyond_the_end"),
    ],
)
@pytest.mark.parametrize("chunk", [16, 3, 1])
def test_commit(monkeypatch, lengths, counts, chunk):
    monkeypatch.setattr(kv_cache, "CHUNK", chunk)
    rng = np.random.default_rng(0)
    check(random_cache(rng, lengths), random_query(rng, len(lengths), 4), counts, fresh_commit())


@pytest.mark.parametrize("chunk", [3, 5, 16])
@pytest.mark.parametrize("width", [1, 5, 7, BUFFER, BUFFER + 5])
def test_random_commits_in_a_row(monkeypatch, width, chunk):
    """Several queries after one another, until the buffer is full; a query may be wider than the buffer."""
    monkeypatch.setattr(kv_cache, "CHUNK", chunk)
    committing = fresh_commit()
    rng = np.random.default_rng(width)
    for _ in range(5):
        cache = random_cache(rng, [0, 2, 7, 12])
        while (cache.lengths < BUFFER).any():
            room = np.minimum(width, BUFFER - cache.lengths)
            counts = rng.choice([rng.integers(0, room, endpoint=True), room])
            cache = jax.device_get(check(cache, random_query(rng, 4, width), counts, committing))


def test_the_longest_commit_decides_how_many_chunks_are_written(monkeypatch):
    """One row needs many chunks, the others few, none, or a part of one that reaches the buffer's end."""
    monkeypatch.setattr(kv_cache, "CHUNK", 3)
    committing, rng = fresh_commit(), np.random.default_rng(1)
    for counts in ([8, 0, 4, 1], [1, 8, 4, 1], [7, 3, 0, 0]):
        check(random_cache(rng, [0, 2, 8, 11]), random_query(rng, 4, 8), counts, committing)


# ---- int8 --------------------------------------------------------------------------------------------------------

INT8 = ModelConfig(
    vocab_size=16, num_hidden_layers=LAYERS, num_key_value_heads=HEADS, head_dim=HEAD_DIM, kv_dtype="int8"
)


def dequantised(cache):
    return cache.keys * cache.key_scales[..., None], cache.values * cache.value_scales[..., None]


def test_an_empty_cache_in_int8():
    cache = empty_cache(INT8, batch=3, buffer_length=9)
    assert cache.keys.shape == cache.values.shape == (LAYERS, 3, HEADS, 9, HEAD_DIM)
    assert cache.key_scales.shape == cache.value_scales.shape == (LAYERS, 3, HEADS, 9)
    assert cache.keys.dtype == cache.values.dtype == "int8"
    assert cache.key_scales.dtype == cache.value_scales.dtype == "float32"


def test_int8_entries_are_those_of_the_other_buffers_rounded():
    """Prompts and commits, one of them with its window moved back from the buffer's end."""
    rng = np.random.default_rng(5)
    exact = random_cache(rng, [0, 2, 7, 8])
    rounded = full_cache(INT8, (exact.keys, exact.values), exact.lengths)
    kv, prompts = random_query(rng, 4, 5), random_query(rng, 2, 3)
    arguments = (np.array([3, 4], np.int32), np.array([3, 1], np.int32))
    for cache in (exact, rounded):
        after = commit_compiled(write_compiled(cache, prompts, *arguments), kv, np.array([5, 0, 5, 1], np.int32))
        if cache is exact:
            wanted = after
    np.testing.assert_array_equal(after.lengths, wanted.lengths)
    for part, whole, scales in zip(
        dequantised(after), (wanted.keys, wanted.values), (after.key_scales, after.value_scales), strict=True
    ):
        expected = quantize_heads(whole)
        np.testing.assert_allclose(scales, expected.scales, rtol=1e-6)
        assert np.all(np.abs(part - whole) <= 0.5001 * expected.scales[..., None])


# ---- prompts -------------------------------------------------------------------------------------------------------

BATCH = 4


def check_prompts(rows, lengths, width=5, seed=0):
    rng = np.random.default_rng(seed)
    cache, kv = random_cache(rng, [3, 0, 12, 7]), random_query(rng, len(rows), width)
    after = write_compiled(cache, kv, np.array(rows, np.int32), np.array(lengths, np.int32))
    expected = jax.tree.map(np.array, cache)
    for prompt, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if row < BATCH:
            expected.keys[:, row, :, :width] = kv[0][:, prompt]
            expected.values[:, row, :, :width] = kv[1][:, prompt]
            expected.lengths[row] = length
    jax.tree.map(np.testing.assert_array_equal, after, expected)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([0, 1, 2], id="in_order"),
        pytest.param([3, 0, 2], id="in_any_order"),
        pytest.param([1, BATCH, BATCH], id="one"),
        pytest.param([BATCH, BATCH, 3], id="last_row_after_none"),
        pytest.param([3, BATCH, 0], id="last_row_before_none"),
        pytest.param([BATCH, 3, BATCH], id="last_row_between_none"),
        pytest.param([BATCH + 7, 2, BATCH], id="far_beyond"),
        pytest.param([BATCH] * 3, id="none"),
    ],
)
def test_prompts_take_their_rows(rows):
    """All other rows stay as they are; a row beyond the batch is nobody's."""
    check_prompts(rows, [4, 1, 5])


@pytest.mark.parametrize("width", [1, BUFFER])
def test_prompts_of_any_width(width):
    check_prompts([2, 0, BATCH], [1, width, 0], width)
