"""Looking up tokens in an embedding table of which every device keeps a share."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from refusion_jax.sharding import batch_shards, constrain, sum_over_batch


def look_up(table: jax.Array, tokens: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The tokens' rows of the table, (tokens, width) in `dtype`.

    The gradient is added up in float32 on each device, since the rows of frequent tokens, the mask's above all, are
    sums of thousands; and in `dtype` over devices, which each end with the share that they keep.

    Args:
      table: (vocab, width).
      tokens: (tokens,) int32.
    """
    return _look_up(jnp.dtype(dtype), table.shape, table.dtype, table, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _look_up(
    dtype: jnp.dtype, shape: tuple[int, int], param_dtype: jnp.dtype, table: jax.Array, tokens: jax.Array
) -> jax.Array:
    # Gathered over fsdp before tokens are looked up: the partitioner would otherwise make the result whole first.
    whole = constrain(table.astype(dtype), "vocab", "activation_embed")
    return constrain(jnp.take(whole, tokens, axis=0), "batch", "activation_embed")


def _forward(
    dtype: jnp.dtype, shape: tuple[int, int], param_dtype: jnp.dtype, table: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _look_up(dtype, shape, param_dtype, table, tokens), tokens


def _backward(
    dtype: jnp.dtype, shape: tuple[int, int], param_dtype: jnp.dtype, tokens: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, None]:
    shards = batch_shards(tokens.shape[0])
    at, new = tokens.reshape(shards, -1), gradient.astype(jnp.float32).reshape(shards, -1, shape[1])
    zeros = constrain(jnp.zeros((shards, *shape), jnp.float32), "batch", "vocab", "activation_embed")
    # One part by itself: a batch of one scatter is several times slower on CPUs.
    add = jax.vmap(lambda rows, at, new: rows.at[at].add(new))
    parts = zeros[0].at[at[0]].add(new[0])[None] if shards == 1 else add(zeros, at, new)
    return sum_over_batch(parts.astype(dtype), "vocab", "embed").astype(param_dtype), None


_look_up.defvjp(_forward, _backward)
