"""Attention whose visibility is data: a few integers per token, turned into a bias inside the backend.

A query token `i` sees a query token `j` of its row when all three hold:

    segment[i] == segment[j]                     same packed example (idle padding has a segment of its own)
    order[j] <= order[i]                         not later in the visibility order
    group[j] == 0 or group[j] == group[i]        shared, or in the same private group;
                                                 a query of group ALL_GROUPS sees every group

and it sees the first `lengths[row]` entries of every KV buffer. Causal attention is `order = index`; bidirectional is
`order = 0`; slot-local causal is `order = index` with the slot's number as group; block-causal is `order = block`.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp

from refusion_jax.modeling.quantization import Quantized

ALL_GROUPS = -1


class Visibility(flax.struct.PyTreeNode):
    """Who sees whom: three (batch, length) int32 arrays, as the module's text defines.

    `in_buffer_order` is the maker's promise that `order` is the index and every group 0, so that tokens see what is not
    behind them in their segment: kernels for causal attention have to know it before there are values.
    """

    segment: jax.Array
    order: jax.Array
    group: jax.Array
    in_buffer_order: bool = flax.struct.field(pytree_node=False, default=False, compare=False)

    @classmethod
    def causal(cls, batch: int, length: int) -> "Visibility":
        """Plain causal attention in buffer order, one segment."""
        order = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        segment, group = jnp.ones_like(order), jnp.zeros_like(order)
        return cls(segment=segment, order=order, group=group, in_buffer_order=True)


class KVCache(flax.struct.PyTreeNode):
    """A static buffer of keys and values; row `r` holds `lengths[r]` committed entries from index 0.

    keys, values: (layers, batch, kv_heads, buffer_length, head_dim). lengths: (batch,) int32. A buffer of batch 1 is
    shared by all rows of whatever batch attends to it. One in int8 has key_scales and value_scales, (layers, batch,
    kv_heads, buffer_length) float32, which its numbers are to be multiplied by.
    """

    keys: jax.Array
    values: jax.Array
    lengths: jax.Array
    key_scales: jax.Array | None = None
    value_scales: jax.Array | None = None

    @property
    def blocks(self) -> tuple[Any, Any]:
        """Keys and values as `attend` takes them, for all layers."""
        if self.key_scales is None or self.value_scales is None:
            return self.keys, self.values
        return Quantized(self.keys, self.key_scales), Quantized(self.values, self.value_scales)


class LongVisibility(flax.struct.PyTreeNode):
    """What `visibility_bias` is made of, for queries too long to have a bias and scores of all pairs at once.

    Attributes:
      visibility: of the tokens. lengths: committed entries of every buffer, (batch,) or (1,) int32 each.
      chunk: query tokens of a row whose scores exist at a time.
    """

    visibility: Visibility
    lengths: tuple[jax.Array, ...]
    chunk: int = flax.struct.field(pytree_node=False)


def visibility_bias(visibility: Visibility, caches: Sequence[KVCache] = ()) -> jax.Array:
    """What to add to attention scores so that a token sees only what it may.

    Returns:
      (batch, length, total) float32, entries of the buffers first and in their order, then the tokens: 0 where visible,
      else a finite floor, so that a token that sees nothing gets a mean rather than NaN.
    """
    sizes = [cache.keys.shape[3] for cache in caches]
    return _bias(visibility, visibility, [cache.lengths for cache in caches], sizes)


def _bias(queries: Visibility, tokens: Visibility, lengths: Sequence[jax.Array], sizes: Sequence[int]) -> jax.Array:
    """The rows of `visibility_bias` for some of the tokens, `queries`; `sizes` are those of the buffers."""
    same = queries.segment[:, :, None] == tokens.segment[:, None, :]
    earlier = tokens.order[:, None, :] <= queries.order[:, :, None]
    key_group, query_group = tokens.group[:, None, :], queries.group[:, :, None]
    shared = (key_group == 0) | (key_group == query_group) | (query_group == ALL_GROUPS)
    mask = same & earlier & shared
    committed = [jnp.arange(size) < length[:, None, None] for size, length in zip(sizes, lengths, strict=True)]
    parts = [jnp.broadcast_to(part, (*mask.shape[:2], part.shape[2])) for part in committed]
    return jnp.where(jnp.concatenate([*parts, mask], axis=-1), 0.0, jnp.finfo(jnp.float32).min)


def attend(
    query: jax.Array,
    keys: tuple[Any, ...],
    values: tuple[Any, ...],
    bias: jax.Array | LongVisibility,
) -> jax.Array:
    """Scaled dot-product attention over several blocks of keys, softmax in float32.

    Heads come first so that every (row, kv head) is one matrix product; the query heads that share a kv head are
    stacked along its rows. The blocks (buffers, query) are never joined: copying a buffer would cost its whole size.

    Args:
      query: (batch, length, heads, head_dim).
      keys, values: blocks of (batch, kv_heads, block_length, head_dim); a block of batch 1 serves all rows. A
        `Quantized` one is multiplied as it is, and scores and weights by its scales; it has no gradient.
      bias: (batch, length, total block length) float32, from `visibility_bias`; or what it is made of, and then it and
        the scores exist for a chunk of the query at a time, and are computed again for the gradient.

    Returns:
      (batch, length, heads * head_dim), in the query's dtype.
    """
    if isinstance(bias, LongVisibility):
        return _attend_in_chunks(query, keys, values, bias)
    batch, length, num_heads, head_dim = query.shape
    kv_heads = keys[0].shape[1]
    grouped = (query * head_dim**-0.5).reshape(batch, length, kv_heads, num_heads // kv_heads, head_dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, head_dim)
    mixed = _attend_grouped(grouped, keys, values, bias)
    mixed = mixed.reshape(batch, kv_heads, -1, length, head_dim).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(batch, length, num_heads * head_dim)


def _attend_in_chunks(
    query: jax.Array, keys: tuple[Any, ...], values: tuple[Any, ...], long: LongVisibility
) -> jax.Array:
    batch, length = query.shape[:2]
    count = -(-length // long.chunk)
    sizes = [block.shape[2] for block in keys[:-1]]

    def cut(values: jax.Array) -> jax.Array:
        """(count, batch, chunk, ...) from (batch, length, ...); what is behind the end is cut off the result."""
        padding = ((0, 0), (0, count * long.chunk - length), *[(0, 0)] * (values.ndim - 2))
        return jnp.moveaxis(jnp.pad(values, padding).reshape(batch, count, long.chunk, *values.shape[2:]), 1, 0)

    @jax.checkpoint
    def of_chunk(part: tuple[jax.Array, Visibility]) -> jax.Array:
        return attend(part[0], keys, values, _bias(part[1], long.visibility, long.lengths, sizes))

    mixed = jax.lax.map(of_chunk, (cut(query), jax.tree.map(cut, long.visibility)))
    return jnp.moveaxis(mixed, 0, 1).reshape(batch, count * long.chunk, -1)[:, :length]


@jax.custom_vjp
def _attend_grouped(query: jax.Array, keys: tuple[Any, ...], values: tuple[Any, ...], bias: jax.Array) -> jax.Array:
    """Attention of scaled, grouped queries (batch, kv_heads, groups * length, head_dim) under `bias`."""
    return _forward(query, keys, values, bias)[0]


def _forward(
    query: jax.Array, keys: tuple[Any, ...], values: tuple[Any, ...], bias: jax.Array
) -> tuple[jax.Array, tuple[Any, ...]]:
    batch, kv_heads, rows, _ = query.shape
    length, total = bias.shape[1:]
    scores = [_scores(query, block) for block in keys]
    joined = jnp.concatenate(scores, axis=-1).reshape(batch, kv_heads, -1, length, total) + bias[:, None, None]
    weights = jax.nn.softmax(joined, axis=-1).reshape(batch, kv_heads, rows, total)
    parts = [_weighted(w, block, query.dtype) for w, block in zip(_split(weights, values), values, strict=True)]
    mixed = functools.reduce(jnp.add, parts)
    return mixed, (query, keys, values, weights.astype(query.dtype), mixed)


def _scores(query: jax.Array, keys: Any) -> jax.Array:
    if isinstance(keys, Quantized):
        return _scores(query, keys.numbers.astype(query.dtype)) * keys.scales[:, :, None]
    return _per_row("bhtd,bhsd->bhts", query, keys, jnp.float32)


def _weighted(weights: jax.Array, values: Any, dtype: Any) -> jax.Array:
    if isinstance(values, Quantized):
        return _weighted(weights * values.scales[:, :, None], values.numbers.astype(dtype), dtype)
    return _per_row("bhts,bhsd->bhtd", weights.astype(dtype), values)


def _per_row(equation: str, left: jax.Array, block: jax.Array, dtype: Any = None) -> jax.Array:
    """`einsum` of a per-row operand with a block, which all rows share when its batch is 1."""
    if block.shape[0] != left.shape[0]:
        equation, block = equation.replace(",b", ","), block[0]
    return jnp.einsum(equation, left, block, preferred_element_type=dtype)


def _backward(residuals: tuple[Any, ...], gradient: jax.Array) -> tuple[Any, ...]:
    """The softmax's gradient from its output alone, and the two transposed products from explicit transposes.

    XLA's CPU backend multiplies by a transposed batch of matrices several times slower than it transposes them; the
    barrier keeps it from folding the one into the other.
    """
    query, keys, values, weights, mixed = residuals
    delta = jnp.sum((gradient * mixed).astype(jnp.float32), axis=-1, keepdims=True)
    query_gradient, key_gradients, value_gradients = jnp.zeros((), query.dtype), [], []
    for part, key, value in zip(_split(weights, values), keys, values, strict=True):
        towards = jnp.einsum("bhtd,bhsd->bhts", gradient, value, preferred_element_type=jnp.float32)
        scores = (part * (towards - delta)).astype(query.dtype)
        query_gradient = query_gradient + jnp.einsum("bhts,bhsd->bhtd", scores, key)
        scores, part = jax.lax.optimization_barrier((scores.swapaxes(2, 3), part.swapaxes(2, 3)))
        key_gradients.append(jnp.einsum("bhst,bhtd->bhsd", scores, query))
        value_gradients.append(jnp.einsum("bhst,bhtd->bhsd", part, gradient))
    return query_gradient, tuple(key_gradients), tuple(value_gradients), None


_attend_grouped.defvjp(_forward, _backward)


def _split(weights: jax.Array, blocks: tuple[Any, ...]) -> list[jax.Array]:
    """Cuts the last axis of `weights` into the blocks' lengths."""
    stops = list(itertools.accumulate(block.shape[2] for block in blocks))
    return jnp.split(weights, stops[:-1], axis=-1)
