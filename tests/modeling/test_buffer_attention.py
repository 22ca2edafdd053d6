"""The kernel for tokens behind a KV buffer, interpreted, against the plain backend."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.config import ModelConfig
from refusion_jax.decoding.kv_cache import full_cache
from refusion_jax.modeling import ALL_GROUPS, KVCache, Transformer, Visibility, buffer_attention
from refusion_jax.modeling.attention import attend, visibility_bias
from refusion_jax.modeling.buffer_attention import BufferedRows, fits
from refusion_jax.modeling.quantization import Quantized, quantize_heads

LAYERS, BATCH, KV_HEADS, BUFFER, HEAD_DIM, LAYER = 2, 4, 2, 40, 128, 1
BLOCK = 16  # so that the last of the buffer's blocks is cut short
LENGTHS = np.array([0, BUFFER, 16, 21], np.int32)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(buffer_attention, "BLOCK_LENGTH", BLOCK)


def visibility_of(kind, length):
    index = np.broadcast_to(np.arange(length), (BATCH, length))
    live = index < np.array([[length], [0], [max(length - 3, 1)], [1]])
    group = {"causal": index * 0, "slot-local": index // 4 + 1, "all": np.full_like(index, ALL_GROUPS)}[kind]
    order = index * 0 if kind == "all" else index
    return Visibility(*(jnp.asarray(part, jnp.int32) for part in (live, order, group)))


def random_inputs(seed, length, groups, dtype=np.float32):
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(BATCH, length, KV_HEADS * groups, HEAD_DIM))
    key, value = rng.normal(size=(2, BATCH, KV_HEADS, length, HEAD_DIM))
    keys, values = rng.normal(size=(2, LAYERS, BATCH, KV_HEADS, BUFFER, HEAD_DIM))
    return tuple(jnp.asarray(part, dtype) for part in (query, key, value, keys, values))


def plain(query, key, value, keys, values, visibility, lengths=LENGTHS):
    cache = KVCache(keys, values, jnp.asarray(lengths))
    bias = visibility_bias(visibility, [cache])
    return jax.jit(attend)(query, (keys[LAYER], key), (values[LAYER], value), bias)


def by_kernel(query, key, value, keys, values, visibility, lengths=LENGTHS):
    rows = BufferedRows(visibility_bias(visibility), keys, values, jnp.asarray(lengths), interpret=True)
    return jax.jit(buffer_attention.buffer_attention)(jnp.int32(LAYER), query, key, value, rows)


@pytest.mark.parametrize("kind", ["causal", "slot-local", "all"])
@pytest.mark.parametrize(("length", "groups"), [(1, 1), (9, 3), (16, 2)])
def test_equals_plain_attention(kind, length, groups):
    inputs, visibility = random_inputs(length, length, groups), visibility_of(kind, length)
    got = by_kernel(*inputs, visibility)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, plain(*inputs, visibility), atol=1e-5)


def test_bfloat16_keeps_its_dtype_and_stays_close():
    exact, visibility = random_inputs(5, 8, 2), visibility_of("causal", 8)
    got = by_kernel(*(part.astype(jnp.bfloat16) for part in exact), visibility)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), plain(*exact, visibility), atol=0.05)


def test_what_lies_beyond_the_committed_length_changes_nothing():
    query, key, value, keys, values = random_inputs(6, 8, 2)
    visibility = visibility_of("causal", 8)
    free = np.arange(BUFFER)[:, None] >= LENGTHS[:, None, None, None]
    spoiled = (jnp.where(free, jnp.nan, part) for part in (keys, values))
    expected = by_kernel(query, key, value, keys, values, visibility)
    assert np.array_equal(by_kernel(query, key, value, *spoiled, visibility), expected)


@pytest.mark.parametrize("kind", ["causal", "slot-local", "all"])
@pytest.mark.parametrize(("length", "groups"), [(1, 1), (9, 3)])
def test_a_buffer_in_int8_equals_plain_attention_to_its_numbers_times_its_scales(kind, length, groups):
    query, key, value, *buffers = random_inputs(length, length, groups)
    keys, values = map(quantize_heads, buffers)
    visibility = visibility_of(kind, length)
    exact = (part.numbers * part.scales[..., None] for part in (keys, values))
    got = by_kernel(query, key, value, keys, values, visibility)
    np.testing.assert_allclose(got, plain(query, key, value, *exact, visibility), atol=1e-5)


def test_scales_beyond_the_committed_length_change_nothing():
    query, key, value, *buffers = random_inputs(6, 8, 2)
    keys, values = map(quantize_heads, buffers)
    visibility, free = visibility_of("causal", 8), np.arange(BUFFER) >= LENGTHS[:, None, None]
    spoiled = (Quantized(part.numbers, jnp.where(free, jnp.nan, part.scales)) for part in (keys, values))
    expected = by_kernel(query, key, value, keys, values, visibility)
    assert np.array_equal(by_kernel(query, key, value, *spoiled, visibility), expected)


@pytest.mark.parametrize(
    ("length", "groups", "head_dim", "possible"),
    [(16, 4, 128, True), (1, 1, 256, True), (256, 4, 128, True), (257, 4, 128, False), (16, 4, 64, False)],
)
def test_what_fits(length, groups, head_dim, possible):
    assert fits(length, groups, head_dim) == possible


@pytest.mark.parametrize("kv_dtype", ["", "int8"])
def test_the_layers_of_a_model_read_their_own_part_of_the_buffer(kv_dtype):
    config = ModelConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, initializer_range=0.3,
    )  # fmt: skip
    length = 5
    tokens = np.random.default_rng(7).integers(0, 40, (BATCH, length)).astype(np.int32)
    position_ids = np.broadcast_to(np.arange(length), tokens.shape) + LENGTHS[:, None]
    cache = full_cache(dataclasses.replace(config, kv_dtype=kv_dtype), random_inputs(8, length, 2)[3:], LENGTHS)
    params = nn.unbox(jax.jit(Transformer(config).init)(jax.random.key(0), tokens, tokens))["params"]

    def hidden(attention):
        module = Transformer(dataclasses.replace(config, attention=attention))
        arguments = (tokens, position_ids, Visibility.causal(*tokens.shape), (cache,), True)
        return jax.jit(lambda params: module.apply({"params": params}, *arguments, method="encode"))(params)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), hidden("pallas"), hidden("xla"))
