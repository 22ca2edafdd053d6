"""Attention of a few tokens to their KV buffer and to each other on TPUs, reading only what is committed.

A buffer is as long as the longest text it may have to hold; XLA reads all of it in every forward. This kernel walks
each row's buffer in blocks, with softmax's maximum and sum carried along in float32, and stops at the row's length:
blocks behind it are not fetched, since their index is that of the last one needed. A layer is picked out of the whole
buffer by index, because a slice of it would be a copy.
"""

import functools
from typing import Any

import flax
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from refusion_jax.modeling.quantization import Quantized
from refusion_jax.sharding import per_device

BLOCK_LENGTH = 512  # entries of a buffer that are fetched at a time
LANES, SUBLANES = 128, 8
MOST_QUERIES = 1024  # of one head of keys, in a row: what the scores of a block leave room for on a chip
_FLOOR = float(jnp.finfo(jnp.float32).min)


class BufferedRows(flax.struct.PyTreeNode):
    """Rows whose tokens see the committed entries of a buffer, and each other as `bias` says.

    Attributes:
      bias: (batch, length, length) float32, from `visibility_bias` of the tokens alone.
      keys, values: (layers, batch, kv_heads, buffer_length, head_dim), perhaps `Quantized`. lengths: (batch,) int32.
      interpret: run the kernel in Python, where there is no TPU.
    """

    bias: jax.Array
    keys: Any
    values: Any
    lengths: jax.Array
    interpret: bool = flax.struct.field(pytree_node=False)


def fits(length: int, groups: int, head_dim: int) -> bool:
    """Whether the kernel can compute rows of `length` tokens, `groups` query heads for each head of keys.

    Narrower heads than 128 would fit, too, but lie in memory otherwise: a copy of the buffer in every layer.
    """
    return length * groups <= MOST_QUERIES and head_dim % LANES == 0


def buffer_attention(
    layer: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, rows: BufferedRows
) -> jax.Array:
    """`attend` for tokens behind one buffer; it has no gradient.

    On a mesh each device computes its rows and heads.

    Args:
      layer: () int32, whose part of the buffer is meant.
      query: (batch, length, heads, head_dim).
      key, value: (batch, kv_heads, length, head_dim), of the tokens themselves. Each has to see at least one of them.
      rows: what they see.

    Returns:
      (batch, length, heads * head_dim), in the query's dtype.
    """
    batch, length, num_heads, head_dim = query.shape
    kv_heads = key.shape[1]
    grouped = (query * head_dim**-0.5).reshape(batch, length, kv_heads, num_heads // kv_heads, head_dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, head_dim)
    heads, buffer = ("batch", "activation_heads", None, None), (None, "batch", "activation_heads", None, None)
    buffers = _buffers(rows)
    inputs = ((None,), ("batch",), heads, heads, heads, ("batch", None, None), *[buffer] * len(buffers))
    of_device = per_device(functools.partial(_call, interpret=rows.interpret), inputs, heads)
    mixed = of_device(layer[None], rows.lengths, grouped, key, value, rows.bias, *buffers)
    mixed = mixed.reshape(batch, kv_heads, -1, length, head_dim).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(batch, length, num_heads * head_dim)


def _buffers(rows: BufferedRows) -> tuple[jax.Array, ...]:
    """Keys, values and, of int8, the scales of both, (layers, batch, kv_heads, 1, buffer_length): rows of a tile."""
    if not isinstance(rows.keys, Quantized):
        return rows.keys, rows.values
    scales = (part.scales[:, :, :, None] for part in (rows.keys, rows.values))
    return rows.keys.numbers, rows.values.numbers, *scales


def _call(
    layer: jax.Array,
    lengths: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *scales: jax.Array,
    interpret: bool,
) -> jax.Array:
    """Attention of scaled, grouped queries (batch, kv_heads, groups * length, head_dim)."""
    batch, kv_heads, queries, head_dim = query.shape
    bias = jnp.tile(bias, (1, queries // key.shape[2], 1))
    # The compiler refuses products with a single key, so there are never fewer than a register's rows of them.
    spare = -key.shape[2] % SUBLANES
    key, value = (jnp.pad(part, ((0, 0), (0, 0), (0, spare), (0, 0))) for part in (key, value))
    bias = jnp.pad(bias, ((0, 0), (0, 0), (0, spare)), constant_values=_FLOOR)
    length, buffer_length = key.shape[2], keys.shape[3]
    block = min(BLOCK_LENGTH, buffer_length)

    def of_head(row: Any, head: Any, *_: Any) -> tuple[Any, ...]:
        return row, head, 0, 0

    def of_buffer(row: Any, head: Any, step: Any, layer: Any, lengths: Any) -> tuple[Any, ...]:
        return layer[0], row, head, jnp.minimum(step, jnp.maximum(pl.cdiv(lengths[row], block) - 1, 0)), 0

    def of_scales(*indices: Any) -> tuple[Any, ...]:
        *leading, number, _ = of_buffer(*indices)
        return *leading, 0, number

    queries_spec = pl.BlockSpec((None, None, queries, head_dim), of_head)
    own_spec = pl.BlockSpec((None, None, length, head_dim), of_head)
    bias_spec = pl.BlockSpec((None, queries, length), lambda row, *_: (row, 0, 0))
    buffer_spec = pl.BlockSpec((None, None, None, block, head_dim), of_buffer)
    scales_spec = pl.BlockSpec((None, None, None, 1, block), of_scales)
    return pl.pallas_call(
        functools.partial(_kernel, block=block),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, kv_heads, pl.cdiv(buffer_length, block)),
            in_specs=[
                queries_spec,
                own_spec,
                own_spec,
                bias_spec,
                buffer_spec,
                buffer_spec,
                *[scales_spec] * len(scales),
            ],
            out_specs=queries_spec,
            scratch_shapes=[pltpu.VMEM((queries, width), jnp.float32) for width in (LANES, LANES, head_dim)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=_cost(query, length, keys, values, *scales),
        interpret=interpret,
        name="buffer_attention",
    )(layer, lengths, query, key, value, bias, keys, values, *scales)


def _cost(query: jax.Array, length: int, *buffers: jax.Array) -> pl.CostEstimate:
    """Of buffers that are full: how much is committed is not known when a program is compiled."""
    batch, kv_heads, _, head_dim = query.shape
    pairs = query.size // head_dim * (buffers[0].shape[3] + length)
    own = query.size + batch * kv_heads * length * head_dim
    return pl.CostEstimate(
        flops=4 * pairs * head_dim,
        transcendentals=pairs,
        bytes_accessed=2 * own * query.dtype.itemsize + sum(part.nbytes // part.shape[0] for part in buffers),
    )


def _kernel(
    layer: Any,
    lengths: Any,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    buffer_keys: Any,
    buffer_values: Any,
    *others: Any,
    block: int,
) -> None:
    """One block of one row and head: folds it into the softmax's maximum, sum and weighted values so far."""
    del layer
    *scales, mixed, peak, total, sums = others
    step, committed = pl.program_id(2), lengths[pl.program_id(0)]

    @pl.when(step == 0)
    def begin_with_the_tokens_themselves() -> None:
        scores = _scores(query[...], key[...]) + bias[...]
        highest = jnp.max(scores, axis=1, keepdims=True)
        weights = jnp.exp(scores - highest)
        peak[...] = jnp.broadcast_to(highest, peak.shape)
        total[...] = jnp.broadcast_to(jnp.sum(weights, axis=1, keepdims=True), total.shape)
        sums[...] = _weighted(weights, value[...])

    @pl.when(step * block < committed)
    def add_what_is_committed() -> None:
        # What lies behind may be anything, NaN too, so it is taken out of the scores and the values.
        index = step * block + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
        scores = _scores(query[...], buffer_keys[...].astype(query.dtype))
        if scales:
            scores *= scales[0][...]
        scores = jnp.where(index < committed, scores, _FLOOR)
        before = peak[:, :1]
        highest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights, shrunk = jnp.exp(scores - highest), jnp.exp(before - highest)
        peak[...] = jnp.broadcast_to(highest, peak.shape)
        total[...] = total[...] * shrunk + jnp.sum(weights, axis=1, keepdims=True)
        values = buffer_values[...].astype(query.dtype)
        if scales:
            weights *= jnp.where(index < committed, scales[1][...], 0)
        else:
            place = step * block + jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0)
            values = jnp.where(place < committed, values, 0)
        sums[...] = sums[...] * shrunk + _weighted(weights, values)

    @pl.when(step == pl.num_programs(2) - 1)
    def divide() -> None:
        mixed[...] = (sums[...] / total[:, :1]).astype(mixed.dtype)


def _scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """(queries, keys) float32."""
    return jax.lax.dot_general(query, key, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _weighted(weights: jax.Array, values: jax.Array) -> jax.Array:
    """(queries, head_dim) float32."""
    return jnp.dot(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
