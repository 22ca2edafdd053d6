"""The static KV buffer of a decode: filled with prompts, extended by committing finished tokens."""

import jax
import jax.numpy as jnp

from refusion_jax.config import ModelConfig
from refusion_jax.modeling.attention import KVCache

CHUNK = 16  # tokens per write of a commit


def empty_cache(config: ModelConfig, batch: int, buffer_length: int) -> KVCache:
    """A buffer of zeros with nothing committed; `2 * layers * batch * kv_heads * buffer_length * head_dim` numbers."""
    shape = (config.num_hidden_layers, batch, config.num_key_value_heads, buffer_length, config.head_dim)
    zeros = jnp.zeros(shape, jnp.dtype(config.dtype))
    return KVCache(keys=zeros, values=jnp.zeros_like(zeros), lengths=jnp.zeros(batch, jnp.int32))


def write_prompts(cache: KVCache, kv: tuple[jax.Array, jax.Array], rows: jax.Array, lengths: jax.Array) -> KVCache:
    """Starts rows anew with the KV of their prompts.

    Args:
      cache: the buffer; donated buffers are updated in place.
      kv: keys and values of the prompts, (layers, prompts, kv_heads, width, head_dim), width <= buffer_length.
      rows: (prompts,) int32, the row each prompt takes; one beyond the batch writes nothing.
      lengths: (prompts,) int32, tokens of each prompt.
    """
    layers, prompts, heads, width, head_dim = kv[0].shape
    batch = cache.keys.shape[1]

    def write(index: jax.Array, buffers: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def update(buffer: jax.Array, new: jax.Array) -> jax.Array:
            at = (0, jnp.minimum(rows[index], batch - 1), 0, 0, 0)
            old = jax.lax.dynamic_slice(buffer, at, (layers, 1, heads, width, head_dim))
            new = jax.lax.dynamic_slice_in_dim(new, index, 1, axis=1)
            return jax.lax.dynamic_update_slice(buffer, jnp.where(rows[index] < batch, new, old), at)

        return update(buffers[0], kv[0]), update(buffers[1], kv[1])

    # A loop over rows keeps the update in place; a vectorised scatter was measured to copy the whole buffer.
    keys, values = jax.lax.fori_loop(0, prompts, write, (cache.keys, cache.values))
    return KVCache(keys=keys, values=values, lengths=cache.lengths.at[rows].set(lengths, mode="drop"))


def commit(cache: KVCache, kv: tuple[jax.Array, jax.Array], counts: jax.Array) -> KVCache:
    """Appends the first `counts[row]` of the query's entries to each row.

    Query layouts put what can be committed first, so this is one contiguous write per row at the row's own offset, in
    as many chunks as the longest needs. A chunk that would pass the buffer's end is moved back; entries beyond the
    committed length are never touched.

    Args:
      cache: the buffer; donated buffers are updated in place.
      kv: the query's keys and values, (layers, batch, kv_heads, width, head_dim).
      counts: (batch,) int32, at most `width`, and no more than the row has room for.
    """
    layers, batch, heads, width, head_dim = kv[0].shape
    chunk = min(CHUNK, width, cache.keys.shape[3])
    index = jnp.arange(chunk)

    def write(step: jax.Array, buffers: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        row, done = step % batch, step // batch * chunk
        # The last chunk of the query is moved back too, so that it lies inside.
        source = jnp.minimum(done, width - chunk)
        wanted = cache.lengths[row] + source
        start = jnp.minimum(wanted, cache.keys.shape[3] - chunk)
        shift = wanted - start
        place = index - shift + source  # the query's entry that belongs at each place of the window
        taken = (place >= done) & (place < counts[row])

        def update(buffer: jax.Array, new: jax.Array) -> jax.Array:
            at = (0, row, 0, start, 0)
            old = jax.lax.dynamic_slice(buffer, at, (layers, 1, heads, chunk, head_dim))
            new = jax.lax.dynamic_slice(new, (0, row, 0, source, 0), (layers, 1, heads, chunk, head_dim))
            new = jnp.roll(new, shift, axis=3)
            return jax.lax.dynamic_update_slice(buffer, jnp.where(taken[:, None], new, old), at)

        return update(buffers[0], kv[0]), update(buffers[1], kv[1])

    steps = batch * ((jnp.max(counts, initial=0) + chunk - 1) // chunk)
    keys, values = jax.lax.fori_loop(0, steps, write, (cache.keys, cache.values))
    return KVCache(keys=keys, values=values, lengths=cache.lengths + counts)
