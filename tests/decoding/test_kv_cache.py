"""Committing to the KV buffer against a plain loop."""

import jax
import numpy as np
import pytest

from refusion_jax.config import ModelConfig
from refusion_jax.decoding.kv_cache import commit, empty_cache
from refusion_jax.modeling import KVCache

LAYERS, HEADS, BUFFER, HEAD_DIM = 2, 2, 12, 4


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


def check(cache, kv, counts):
    counts = np.array(counts, np.int32)
    after = jax.jit(commit)(cache, kv, counts)
    np.testing.assert_array_equal(after.lengths, cache.lengths + counts)
    np.testing.assert_array_equal(after.keys, plain_commit(cache.keys, cache.lengths, kv[0], counts))
    np.testing.assert_array_equal(after.values, plain_commit(cache.values, cache.lengths, kv[1], counts))
    return after


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
def test_commit(lengths, counts):
    rng = np.random.default_rng(0)
    check(random_cache(rng, lengths), random_query(rng, len(lengths), 4), counts)


@pytest.mark.parametrize("width", [1, 5, BUFFER])
def test_random_commits_in_a_row(width):
    """Several queries after one another, until the buffer is full."""
    rng = np.random.default_rng(width)
    cache = random_cache(rng, [0, 2, 7, 12])
    while (cache.lengths < BUFFER).any():
        counts = rng.integers(0, np.minimum(width, BUFFER - cache.lengths), endpoint=True)
        cache = jax.device_get(check(cache, random_query(rng, 4, width), counts))
