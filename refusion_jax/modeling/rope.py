"""Rotary position embedding from explicit position IDs, plain or stretched to longer sequences."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from refusion_jax.config import ModelConfig

_RAMPS = {"yarn": (32.0, 1.0), "llama3": (4.0, 1.0)}


def rotary_angles(position_ids: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the rotation of every position, in float32.

    The angles depend on a token's index in the *original* sequence, never on where it stands in the buffer; this is
    what lets finished slots move ahead of masked ones (paper section 3).

    Args:
      position_ids: (...) int, any order.
      config: `head_dim` and what begins with `rope_`.

    Returns:
      cos, sin: (..., 1, head_dim // 2) float32, ready to broadcast over heads.
    """
    angles = position_ids.astype(jnp.float32)[..., None, None] * inverse_frequencies(config)
    factor = attention_factor(config)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of each of the head_dim // 2 rotated pairs, float32.

    Plain RoPE has `theta ** (-2 i / head_dim)`. "linear" divides all by `rope_scaling`. The others leave the fast pairs
    as they are and divide the slow ones, which never completed a turn in training: YaRN (arXiv 2309.00071, section 3.2)
    blends over the pairs between two rates of turning, Llama 3.1 over the rates themselves.
    """
    theta, width = np.float32(config.rope_theta), config.head_dim
    plain = 1.0 / theta ** (np.arange(0, width, 2, dtype=np.float32) / np.float32(width))
    if config.rope_type == "linear" or config.rope_scaling == 1:
        return plain / np.float32(config.rope_scaling)
    length = config.rope_original_length or config.max_position_embeddings
    high, low = config.rope_ramp or _RAMPS[config.rope_type]
    if config.rope_type == "yarn":
        kept = _yarn_kept(config, length, high, low)
    else:
        kept = np.clip((length * plain / (2 * np.pi) - low) / (high - low), 0, 1)
    kept = kept.astype(np.float32)
    return plain / np.float32(config.rope_scaling) * (1 - kept) + plain * kept


def _yarn_kept(config: ModelConfig, length: int, high: float, low: float) -> np.ndarray:
    """Which share of each pair's plain frequency YaRN keeps."""

    def pair_with(turns: float) -> float:
        """The pair, as a real number, that turns so often in the original length."""
        return config.head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    first = max(math.floor(pair_with(high)), 0)
    last = min(math.ceil(pair_with(low)), config.head_dim - 1)
    ramp = (np.arange(config.head_dim // 2) - first) / (last - first if last != first else 0.001)
    return 1 - np.clip(ramp, 0, 1)


def attention_factor(config: ModelConfig) -> float:
    """What YaRN multiplies cosines and sines by, so that attention stays as sharp over more tokens; 1 without it."""
    if config.rope_type != "yarn":
        return 1.0
    return config.rope_attention_factor or 0.1 * math.log(config.rope_scaling) + 1.0


def rotate(heads: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the half-split pairs (i, i + head_dim // 2) of `heads` (..., heads, head_dim), keeping its dtype."""
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(heads.dtype)
