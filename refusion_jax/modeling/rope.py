"""Rotary position embedding from explicit position IDs."""

import jax
import jax.numpy as jnp


def rotary_angles(
    position_ids: jax.Array, head_dim: int, theta: float, scaling: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the rotation of every position, in float32.

    The angles depend on a token's index in the *original* sequence, never on where it stands in the buffer; this is
    what lets finished slots move ahead of masked ones (paper section 3).

    Args:
      position_ids: (...) int, any order.
      head_dim: even size of a head.
      theta: base of the geometric progression of wavelengths.
      scaling: what positions are divided by, so that longer sequences meet the angles of shorter ones (linear
        interpolation).

    Returns:
      cos, sin: (..., 1, head_dim // 2) float32, ready to broadcast over heads.
    """
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = position_ids.astype(jnp.float32)[..., None, None] / scaling * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(heads: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the half-split pairs (i, i + head_dim // 2) of `heads` (..., heads, head_dim), keeping its dtype."""
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(heads.dtype)
