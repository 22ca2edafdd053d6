"""The static KV buffer of a decode: filled with prompts, extended by committing finished tokens."""

from typing import Any

import jax
import jax.numpy as jnp

from refusion_jax.config import ModelConfig
from refusion_jax.modeling.attention import KVCache
from refusion_jax.modeling.quantization import quantize_heads

CHUNK = 16  # tokens per write of a commit


def empty_cache(config: ModelConfig, batch: int, buffer_length: int) -> KVCache:
    """A buffer of zeros with nothing committed; `2 * layers * batch * kv_heads * buffer_length * head_dim` numbers."""
    shape = (config.num_hidden_layers, batch, config.num_key_value_heads, buffer_length, config.head_dim)
    dtype = config.kv_dtype or config.dtype
    buffers = {name: jnp.zeros(shape, jnp.dtype(dtype)) for name in ("keys", "values")}
    if config.kv_dtype:
        buffers |= {name: jnp.zeros(shape[:-1], jnp.float32) for name in ("key_scales", "value_scales")}
    return KVCache(lengths=jnp.zeros(batch, jnp.int32), **buffers)


def full_cache(config: ModelConfig, kv: tuple[jax.Array, jax.Array], lengths: jax.Array) -> KVCache:
    """The keys and values (layers, batch, kv_heads, width, head_dim) of a forward as a buffer of their own.

    Args:
      config: of the model, which says the buffer's type.
      kv: the keys and values.
      lengths: (batch,) int32, how many entries of each row count.
    """
    keys, values, key_scales, value_scales = _entries(kv, bool(config.kv_dtype))
    return KVCache(keys=keys, values=values, lengths=lengths, key_scales=key_scales, value_scales=value_scales)


def write_prompts(cache: KVCache, kv: tuple[jax.Array, jax.Array], rows: jax.Array, lengths: jax.Array) -> KVCache:
    """Starts rows anew with the KV of their prompts.

    Args:
      cache: the buffer; donated buffers are updated in place.
      kv: keys and values of the prompts, (layers, prompts, kv_heads, width, head_dim), width <= buffer_length.
      rows: (prompts,) int32, the row each prompt takes; one beyond the batch writes nothing.
      lengths: (prompts,) int32, tokens of each prompt.
    """
    batch, entries = cache.keys.shape[1], _entries(kv, cache.key_scales is not None)

    def write(index: jax.Array, buffers: Any) -> Any:
        def update(buffer: jax.Array, new: jax.Array) -> jax.Array:
            at = (0, jnp.minimum(rows[index], batch - 1), 0, 0, 0)[: buffer.ndim]
            new = jax.lax.dynamic_slice_in_dim(new, index, 1, axis=1)
            old = jax.lax.dynamic_slice(buffer, at, new.shape)
            return jax.lax.dynamic_update_slice(buffer, jnp.where(rows[index] < batch, new, old), at)

        return jax.tree.map(update, buffers, entries)

    # A loop over rows keeps the update in place; a vectorised scatter was measured to copy the whole buffer.
    buffers = jax.lax.fori_loop(0, kv[0].shape[1], write, _buffers(cache))
    return _with(cache, buffers, cache.lengths.at[rows].set(lengths, mode="drop"))


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
    layers, batch, heads, width, _ = kv[0].shape
    chunk = min(CHUNK, width, cache.keys.shape[3])
    index, entries = jnp.arange(chunk), _entries(kv, cache.key_scales is not None)

    def write(step: jax.Array, buffers: Any) -> Any:
        row, done = step % batch, step // batch * chunk
        # The last chunk of the query is moved back too, so that it lies inside.
        source = jnp.minimum(done, width - chunk)
        wanted = cache.lengths[row] + source
        start = jnp.minimum(wanted, cache.keys.shape[3] - chunk)
        shift = wanted - start
        place = index - shift + source  # the query's entry that belongs at each place of the window
        taken = (place >= done) & (place < counts[row])

        def update(buffer: jax.Array, new: jax.Array) -> jax.Array:
            at, window = (0, row, 0, start), (layers, 1, heads, chunk)
            rest = buffer.shape[4:]  # head_dim, or nothing of scales
            old = jax.lax.dynamic_slice(buffer, (*at, *[0] * len(rest)), (*window, *rest))
            new = jax.lax.dynamic_slice(new, (0, row, 0, source, *[0] * len(rest)), (*window, *rest))
            new = jnp.where(taken.reshape(chunk, *[1] * len(rest)), jnp.roll(new, shift, axis=3), old)
            return jax.lax.dynamic_update_slice(buffer, new, (*at, *[0] * len(rest)))

        return jax.tree.map(update, buffers, entries)

    steps = batch * ((jnp.max(counts, initial=0) + chunk - 1) // chunk)
    buffers = jax.lax.fori_loop(0, steps, write, _buffers(cache))
    return _with(cache, buffers, cache.lengths + counts)


def _entries(kv: tuple[jax.Array, jax.Array], is_int8: bool) -> tuple[Any, Any, Any, Any]:
    """Keys, values and their scales, as a buffer holds them."""
    if not is_int8:
        return *kv, None, None
    keys, values = map(quantize_heads, kv)
    return keys.numbers, values.numbers, keys.scales, values.scales


def _buffers(cache: KVCache) -> tuple[Any, Any, Any, Any]:
    return cache.keys, cache.values, cache.key_scales, cache.value_scales


def _with(cache: KVCache, buffers: tuple[Any, Any, Any, Any], lengths: jax.Array) -> KVCache:
    keys, values, key_scales, value_scales = buffers
    return cache.replace(keys=keys, values=values, key_scales=key_scales, value_scales=value_scales, lengths=lengths)
