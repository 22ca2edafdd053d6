"""The static KV buffer of a decode: made by prefill, extended by committing finished tokens."""

import jax
import jax.numpy as jnp

from refusion_jax.config import ModelConfig
from refusion_jax.modeling.attention import KVCache


def empty_cache(config: ModelConfig, batch: int, buffer_length: int) -> KVCache:
    """A buffer of zeros with nothing committed; `2 * layers * batch * kv_heads * buffer_length * head_dim` numbers."""
    shape = (config.num_hidden_layers, batch, config.num_key_value_heads, buffer_length, config.head_dim)
    zeros = jnp.zeros(shape, jnp.dtype(config.dtype))
    return KVCache(keys=zeros, values=jnp.zeros_like(zeros), lengths=jnp.zeros(batch, jnp.int32))


def commit(cache: KVCache, kv: tuple[jax.Array, jax.Array], counts: jax.Array) -> KVCache:
    """Appends the first `counts[row]` of the query's entries to each row.

    Query layouts put what can be committed first, so this is one contiguous write per row at the row's own offset. A
    window that would pass the buffer's end is moved back; entries beyond the committed length are never touched.

    Args:
      cache: the buffer; donated buffers are updated in place.
      kv: the query's keys and values, (layers, batch, kv_heads, width, head_dim), width <= buffer_length.
      counts: (batch,) int32.
    """
    layers, batch, heads, width, head_dim = kv[0].shape
    start = jnp.minimum(cache.lengths, cache.keys.shape[3] - width)
    shift = cache.lengths - start
    index = jnp.arange(width)

    def write(row: jax.Array, buffers: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        taken = (index >= shift[row]) & (index < shift[row] + counts[row])

        def update(buffer: jax.Array, new: jax.Array) -> jax.Array:
            at = (0, row, 0, start[row], 0)
            old = jax.lax.dynamic_slice(buffer, at, (layers, 1, heads, width, head_dim))
            new = jnp.roll(jax.lax.dynamic_slice_in_dim(new, row, 1, axis=1), shift[row], axis=3)
            return jax.lax.dynamic_update_slice(buffer, jnp.where(taken[:, None], new, old), at)

        return update(buffers[0], kv[0]), update(buffers[1], kv[1])

    # A loop over rows keeps the update in place; a vectorised scatter was measured to copy the whole buffer.
    keys, values = jax.lax.fori_loop(0, batch, write, (cache.keys, cache.values))
    return KVCache(keys=keys, values=values, lengths=cache.lengths + counts)
