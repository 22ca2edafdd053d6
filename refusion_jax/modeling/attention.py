"""Attention whose visibility is data: a few integers per token, turned into a mask inside the backend.

A query token `i` sees a query token `j` of its row when all three hold:

    segment[i] == segment[j]                     same packed example (idle padding has a segment of its own)
    order[j] <= order[i]                         not later in the visibility order
    group[j] == 0 or group[j] == group[i]        shared, or in the same private group

and it sees the first `lengths[row]` entries of the KV buffer. Causal attention is `order = index`; bidirectional is
`order = 0`; slot-local causal is `order = index` with the slot's number as group; block-causal is `order = block`.
"""

import flax
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Visibility:
    """Who sees whom: three (batch, length) int32 arrays, as the module's text defines."""

    segment: jax.Array
    order: jax.Array
    group: jax.Array

    @classmethod
    def causal(cls, batch: int, length: int) -> "Visibility":
        """Plain causal attention in buffer order, one segment."""
        order = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        return cls(segment=jnp.ones_like(order), order=order, group=jnp.zeros_like(order))


@flax.struct.dataclass
class KVCache:
    """A static buffer of keys and values; row `r` holds `lengths[r]` committed entries from index 0.

    keys, values: (layers, batch, kv_heads, buffer_length, head_dim). lengths: (batch,) int32.
    """

    keys: jax.Array
    values: jax.Array
    lengths: jax.Array


def dense_mask(visibility: Visibility, cache: KVCache | None) -> jax.Array:
    """(batch, length, buffer_length + length) bool: what each query token sees, the buffer's entries first."""
    same = visibility.segment[:, :, None] == visibility.segment[:, None, :]
    earlier = visibility.order[:, None, :] <= visibility.order[:, :, None]
    key_group = visibility.group[:, None, :]
    shared = (key_group == 0) | (key_group == visibility.group[:, :, None])
    mask = same & earlier & shared
    if cache is None:
        return mask
    committed = jnp.arange(cache.keys.shape[3]) < cache.lengths[:, None]
    committed = jnp.broadcast_to(committed[:, None, :], (*mask.shape[:2], committed.shape[1]))
    return jnp.concatenate([committed, mask], axis=-1)


def attend(
    query: jax.Array, keys: list[jax.Array], values: list[jax.Array], mask: jax.Array
) -> jax.Array:
    """Scaled dot-product attention over several blocks of keys, softmax in float32.

    Heads come first so that every (row, kv head) is one matrix product; the query heads that share a kv head are
    stacked along its rows. The blocks (buffer, query) are never joined: copying the buffer would cost its whole size.

    Args:
      query: (batch, length, heads, head_dim).
      keys, values: blocks of (batch, kv_heads, block_length, head_dim).
      mask: (batch, length, total block length) bool.

    Returns:
      (batch, length, heads * head_dim), in the query's dtype.
    """
    batch, length, num_heads, head_dim = query.shape
    kv_heads = keys[0].shape[1]
    query = query.reshape(batch, length, kv_heads, num_heads // kv_heads, head_dim)
    query = query.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, head_dim)
    scores = [
        jnp.einsum("bhtd,bhsd->bhts", query, block, preferred_element_type=jnp.float32) * head_dim**-0.5
        for block in keys
    ]
    scores = jnp.concatenate(scores, axis=-1).reshape(batch, kv_heads, -1, length, mask.shape[-1])
    # A finite floor, so that a row that sees nothing gives a mean rather than NaN.
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype).reshape(batch, kv_heads, -1, mask.shape[-1])
    start, mixed = 0, jnp.zeros((), query.dtype)
    for block in values:
        stop = start + block.shape[2]
        mixed = mixed + jnp.einsum("bhts,bhsd->bhtd", weights[..., start:stop], block)
        start = stop
    mixed = mixed.reshape(batch, kv_heads, -1, length, head_dim).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(batch, length, num_heads * head_dim)
