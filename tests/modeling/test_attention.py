"""Attention against a plain softmax over the tokens one may see, written out for each kind of visibility."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.modeling.attention import ALL_GROUPS, KVCache, LongVisibility, Visibility, attend, visibility_bias
from refusion_jax.modeling.quantization import quantize_heads

pytestmark = pytest.mark.usefixtures("quick_compilation")

BATCH, LENGTH, BUFFER, HEADS, KV_HEADS, HEAD_DIM = 3, 12, 8, 6, 2, 4
COMMITTED = np.array([0, 3, BUFFER])
INDEX = np.arange(LENGTH)
PACKED = np.array([1] * 5 + [2] * 4 + [0] * 3)  # two examples and padding
SLOTS = INDEX // 4

# (labels per token: segment, order, group; what token i sees of token j, said without these labels)
KINDS = {
    "causal": ((INDEX * 0 + 1, INDEX, INDEX * 0), lambda i, j: j <= i),
    "bidirectional": ((INDEX * 0 + 1, INDEX * 0, INDEX * 0), lambda i, j: True),
    "slot-local causal": ((INDEX * 0 + 1, INDEX, SLOTS + 1), lambda i, j: j <= i and i // 4 == j // 4),
    "slot-local causal after a shared prefix": (
        (INDEX * 0 + 1, INDEX, SLOTS),  # group 0 is shared
        lambda i, j: j <= i and (j < 4 or i // 4 == j // 4),
    ),
    "slot-local causal, then tokens that see every slot": (
        (INDEX * 0 + 1, INDEX, np.where(INDEX < 8, SLOTS + 1, ALL_GROUPS)),
        lambda i, j: j <= i and (i >= 8 or i // 4 == j // 4),
    ),
    "a token that sees every slot and that no slot sees": (
        (INDEX * 0 + 1, INDEX * 0, np.where(INDEX == 5, ALL_GROUPS, SLOTS + 1)),
        lambda i, j: i == 5 or (j != 5 and i // 4 == j // 4),
    ),
    "block-causal": ((INDEX * 0 + 1, SLOTS, INDEX * 0), lambda i, j: j // 4 <= i // 4),
    "packed": ((PACKED, INDEX, INDEX * 0), lambda i, j: j <= i and (i < 5) == (j < 5) and (i < 9) == (j < 9)),
}


def labels(kind):
    return Visibility(*(jnp.broadcast_to(jnp.asarray(part, jnp.int32), (BATCH, LENGTH)) for part in KINDS[kind][0]))


def sees(kind):
    return np.array([[KINDS[kind][1](i, j) for j in range(LENGTH)] for i in range(LENGTH)])


def random_inputs(seed, with_buffer, dtype=np.float32):
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(BATCH, LENGTH, HEADS, HEAD_DIM)).astype(dtype)
    lengths = (BUFFER, LENGTH) if with_buffer else (LENGTH,)
    keys, values = (
        tuple(rng.normal(size=(BATCH, KV_HEADS, length, HEAD_DIM)).astype(dtype) for length in lengths) for _ in "kv"
    )
    return query, keys, values


def cache_of(keys, values, lengths=COMMITTED):
    return KVCache(jnp.asarray(keys)[None], jnp.asarray(values)[None], jnp.asarray(lengths, jnp.int32))


def plain_attention(query, keys, values, visible):
    """One token and head at a time, over visible (batch, length, total) keys only; keys and values joined."""
    out = np.zeros((BATCH, LENGTH, HEADS, HEAD_DIM))
    for b, t, h in np.ndindex(BATCH, LENGTH, HEADS):
        seen, head = np.flatnonzero(visible[b, t]), h // (HEADS // KV_HEADS)
        scores = keys[b, head, seen].astype(np.float64) @ query[b, t, h] / np.sqrt(HEAD_DIM)
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ values[b, head, seen]
    return out.reshape(BATCH, LENGTH, -1)


@pytest.mark.parametrize("with_buffer", [False, True], ids=["alone", "behind a buffer"])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_a_softmax_over_the_visible(kind, with_buffer):
    query, keys, values = random_inputs(0, with_buffer)
    caches = [cache_of(keys[0], values[0])] if with_buffer else []
    bias = visibility_bias(labels(kind), caches)
    visible = np.broadcast_to(sees(kind), (BATCH, LENGTH, LENGTH))
    if with_buffer:
        committed = np.broadcast_to(np.arange(BUFFER) < COMMITTED[:, None, None], (BATCH, LENGTH, BUFFER))
        visible = np.concatenate([committed, visible], axis=-1)
    assert bias.shape == visible.shape
    assert bias.dtype == jnp.float32
    assert np.array_equal(np.asarray(bias) == 0, visible)
    got = jax.jit(attend)(query, keys, values, bias)
    assert got.dtype == query.dtype
    joined = (np.concatenate(blocks, axis=2) for blocks in (keys, values))
    np.testing.assert_allclose(got, plain_attention(query, *joined, visible), atol=1e-5)


def attend_behind(caches, seed=6):
    """What a random causal query sees behind KV buffers."""
    query, keys, values = random_inputs(seed, with_buffer=False)
    blocks = [(*(cache.keys[0] for cache in caches), *keys), (*(cache.values[0] for cache in caches), *values)]
    return np.asarray(jax.jit(attend)(query, *blocks, visibility_bias(labels("causal"), caches)))


@pytest.mark.parametrize("rows", [1, BATCH])
def test_int8_buffers_are_their_numbers_times_their_scales(rows):
    query, keys, values = random_inputs(8, with_buffer=False)
    buffers = np.random.default_rng(9).normal(size=(2, rows, KV_HEADS, BUFFER, HEAD_DIM)).astype(np.float32)
    lengths = COMMITTED[:rows]
    held = [quantize_heads(jnp.asarray(part)[None]) for part in buffers]
    (key_numbers, key_scales), (value_numbers, value_scales) = ((part.numbers, part.scales) for part in held)
    cache = KVCache(key_numbers, value_numbers, jnp.asarray(lengths), key_scales, value_scales)
    exact = cache_of(*(np.asarray(part.numbers * part.scales[..., None])[0] for part in held), lengths)
    bias = visibility_bias(labels("causal"), [cache])
    (key_block, value_block) = jax.tree.map(lambda part: part[0], cache.blocks)
    got = jax.jit(attend)(query, (key_block, *keys), (value_block, *values), bias)
    np.testing.assert_allclose(got, attend_behind([exact], seed=8), atol=1e-5)
    long = LongVisibility(labels("causal"), (cache.lengths,), 3)
    np.testing.assert_allclose(jax.jit(attend)(query, (key_block, *keys), (value_block, *values), long), got, atol=1e-5)


@pytest.mark.parametrize("committed", [0, 5, BUFFER])
def test_a_buffer_of_batch_one_is_every_rows(committed):
    rng = np.random.default_rng(7)
    keys, values = rng.normal(size=(2, 1, KV_HEADS, BUFFER, HEAD_DIM)).astype(np.float32)
    shared = cache_of(keys, values, [committed])
    repeated = cache_of(*(np.repeat(part, BATCH, axis=0) for part in (keys, values)), [committed] * BATCH)
    assert np.array_equal(visibility_bias(labels("causal"), [shared]), visibility_bias(labels("causal"), [repeated]))
    got = attend_behind([shared])
    np.testing.assert_allclose(got, attend_behind([repeated]), atol=1e-6)
    assert np.allclose(got, attend_behind([]), atol=1e-3) == (committed == 0)


def test_two_buffers_are_one_that_holds_both():
    """The first is shared and wholly committed, so the joined one has the same entries in every row."""
    rng = np.random.default_rng(8)
    shared = rng.normal(size=(2, 1, KV_HEADS, 5, HEAD_DIM)).astype(np.float32)
    own = rng.normal(size=(2, BATCH, KV_HEADS, BUFFER, HEAD_DIM)).astype(np.float32)
    joined = (np.concatenate([np.repeat(s, BATCH, axis=0), o], axis=2) for s, o in zip(shared, own, strict=True))
    two = attend_behind([cache_of(*shared, [5]), cache_of(*own)])
    np.testing.assert_allclose(two, attend_behind([cache_of(*joined, COMMITTED + 5)]), atol=1e-6)
    half = attend_behind([cache_of(*shared, [3]), cache_of(*own)])
    assert np.abs(two - half).max(axis=(1, 2)).min() > 1e-3


def test_the_causal_constructor():
    made, by_hand = Visibility.causal(BATCH, LENGTH), labels("causal")
    assert jax.tree.map(lambda a: (a.shape, a.dtype), made) == jax.tree.map(lambda a: (a.shape, a.dtype), by_hand)
    assert np.array_equal(visibility_bias(made), visibility_bias(by_hand))
    assert made.in_buffer_order
    assert not by_hand.in_buffer_order


def naive_attention(query, keys, values, visible):
    """The same with differentiable array operations: heads repeated, blocks joined, softmax of masked scores."""
    keys, values = (jnp.repeat(jnp.concatenate(blocks, axis=2), HEADS // KV_HEADS, axis=1) for blocks in (keys, values))
    scores = jnp.einsum("bthd,bhsd->bhts", query, keys) / jnp.sqrt(HEAD_DIM)
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bhsd->bthd", weights, values).reshape(BATCH, LENGTH, -1)


@pytest.mark.parametrize("with_buffer", [False, True], ids=["one block", "two blocks"])
@pytest.mark.parametrize("kind", ["causal", "packed", "slot-local causal"])
def test_gradient_is_that_of_plain_attention(kind, with_buffer):
    query, keys, values = random_inputs(1, with_buffer)
    bias = visibility_bias(labels(kind), [cache_of(keys[0], values[0])] if with_buffer else [])
    cotangent = np.random.default_rng(2).normal(size=(BATCH, LENGTH, HEADS * HEAD_DIM)).astype(np.float32)

    def gradients(attention, last):
        gradient = jax.grad(lambda *args: jnp.sum(attention(*args, last) * cotangent), argnums=(0, 1, 2))
        return jax.jit(gradient)(query, keys, values)

    got, expected = gradients(attend, bias), gradients(naive_attention, bias == 0)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.abs(theirs).max() > 0.1
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_bfloat16_keeps_its_dtype_and_stays_close():
    query, keys, values = random_inputs(3, with_buffer=True)
    rounded = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), (query, keys, values))
    bias = visibility_bias(labels("causal"), [cache_of(keys[0], values[0])])

    def loss(query, keys, values):
        return jnp.sum(attend(query, keys, values, bias).astype(jnp.float32) ** 2)

    out = attend(*rounded, bias)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), attend(query, keys, values, bias), atol=0.03)
    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    got, expected = gradient(*rounded), gradient(query, keys, values)
    for ours, exact in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == jnp.bfloat16
        assert np.linalg.norm(ours.astype(jnp.float32) - exact) < 0.03 * np.linalg.norm(exact)


def test_what_lies_beyond_the_committed_length_changes_nothing():
    query, keys, values = random_inputs(4, with_buffer=True)
    free = np.arange(BUFFER)[None, None, :, None] >= COMMITTED[:, None, None, None]
    outputs = []
    for garbage in (0.0, 1e6, -1e30):
        buffers = [(np.where(free, np.float32(garbage), blocks[0]), blocks[1]) for blocks in (keys, values)]
        bias = visibility_bias(labels("causal"), [cache_of(buffers[0][0], buffers[1][0])])
        outputs.append(np.asarray(attend(query, *buffers, bias)))
    assert np.isfinite(outputs[0]).all()
    assert np.array_equal(outputs[0], outputs[1])
    assert np.array_equal(outputs[0], outputs[2])


def test_a_token_that_sees_nothing_is_finite_and_has_a_finite_gradient():
    query, keys, values = random_inputs(5, with_buffer=True)
    order = jnp.broadcast_to(jnp.asarray(INDEX, jnp.int32), (BATCH, LENGTH))
    # No key is in a group that any query is in, and nothing is committed.
    lonely = Visibility(segment=jnp.ones_like(order), order=-order, group=order + 1)
    bias = visibility_bias(lonely, [cache_of(keys[0], values[0], lengths=[0, 0, 0])])
    nothing = jnp.full_like(bias, bias.min())
    out, gradient = jax.value_and_grad(lambda q: jnp.sum(attend(q, keys, values, nothing)))(query)
    assert np.isfinite(out)
    assert np.isfinite(gradient).all()
    assert np.isfinite(attend(query, keys, values, bias)).all()


@pytest.mark.parametrize("chunk", [1, 4, LENGTH - 1])
@pytest.mark.parametrize("with_buffer", [False, True], ids=["one block", "two blocks"])
def test_chunks_of_the_query_change_nothing(with_buffer, chunk):
    query, keys, values = random_inputs(9, with_buffer)
    cotangent = np.random.default_rng(2).normal(size=(BATCH, LENGTH, HEADS * HEAD_DIM)).astype(np.float32)
    caches = [cache_of(keys[0], values[0])] if with_buffer else []

    def outcome(bias):
        def loss(*inputs):
            out = attend(*inputs, bias)
            return jnp.sum(out * cotangent), out

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(query, keys, values)

    for kind in ("packed", "slot-local causal"):
        long = LongVisibility(labels(kind), tuple(cache.lengths for cache in caches), chunk)
        got, expected = outcome(long), outcome(visibility_bias(labels(kind), caches))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, expected)


def test_scores_of_long_rows_never_exist_as_a_whole():
    """Value and gradient of a row of 8,192 tokens: its scores alone would take 2 heads * 8,192**2 * 4 bytes."""
    length, heads = 8192, 2
    shapes = jax.eval_shape(lambda: (jnp.zeros((1, length, heads, 4)), jnp.zeros((1, 1, length, 4))))
    long = jax.eval_shape(lambda: LongVisibility(Visibility.causal(1, length), (), 256))

    def loss(query, block, long):
        return jnp.sum(attend(query, (block,), (block,), long) ** 2)

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes, long).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.2 * heads * length**2 * 4
