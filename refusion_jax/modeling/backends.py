"""Which program computes attention: plain XLA, or a kernel of the platform where one fits.

`model.attention` names it; "auto" takes what the platform is expected to be fastest with:

    TPU   "splash" for causal rows of at least `LONG` tokens; "pallas" for a few tokens behind one KV buffer that has a
          row for each of theirs
    GPU   "cudnn" for causal rows of at least `LONG` tokens, on NVIDIA's from Ampere on
    else  XLA

A kernel that is named is used for shorter rows, too. What it cannot compute is XLA's either way: other visibilities, a
buffer that rows share, sizes that are not its multiples, or rows and heads that do not divide among the devices. The
compiler cannot divide a kernel, so "auto" takes one only under `jax.set_mesh`, or where there is but one device.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from refusion_jax.config import ConfigError, ModelConfig
from refusion_jax.modeling import buffer_attention, cudnn, splash
from refusion_jax.modeling.attention import KVCache, LongVisibility, Visibility, attend, visibility_bias
from refusion_jax.sharding import divides

LONG = 1024  # tokens of a row, from which a kernel is taken rather than scores in memory
PLATFORMS = {"splash": ("tpu", "cpu"), "pallas": ("tpu", "cpu"), "cudnn": ("gpu",)}  # on a CPU in Python, for tests


def plan(config: ModelConfig, visibility: Visibility, caches: Sequence[KVCache]) -> tuple[Any, Any]:
    """Chooses how a forward attends.

    Args:
      config: the model's.
      visibility: of the (batch, length) tokens.
      caches: the buffers that they see.

    Returns:
      what every layer has of its own, a pytree of arrays (layers, ...), and what all share: the first and last inputs
      of `mix`.

    Raises:
      ConfigError: when the platform does not have the backend that `config.attention` names.
    """
    platform = _platform()
    _check(config.attention, platform)
    if _takes_splash(config, visibility, caches, platform):
        return (), splash.CausalRows(visibility.segment, interpret=platform == "cpu")
    if _takes_cudnn(config, visibility, caches, platform):
        return (), cudnn.MaskedRows.of(visibility)
    if _takes_buffer_attention(config, visibility, caches, platform):
        (cache,), bias = caches, visibility_bias(visibility)
        layers = jnp.arange(cache.keys.shape[0], dtype=jnp.int32)
        interpret = platform == "cpu"
        return layers, buffer_attention.BufferedRows(bias, *cache.blocks, cache.lengths, interpret=interpret)
    blocks = tuple(cache.blocks for cache in caches)
    if visibility.segment.shape[1] > config.attention_chunk > 0:
        return blocks, LongVisibility(visibility, tuple(cache.lengths for cache in caches), config.attention_chunk)
    return blocks, visibility_bias(visibility, caches)


def mix(own: Any, query: jax.Array, key: jax.Array, value: jax.Array, shared: Any) -> jax.Array:
    """Attention of a layer's tokens to its buffers and to each other.

    Args:
      own, shared: from `plan`, the former of this layer.
      query: (batch, length, heads, head_dim).
      key, value: (batch, kv_heads, length, head_dim).

    Returns:
      (batch, length, heads * head_dim), in the query's dtype, named "attention" for rematerialisation.
    """
    match shared:
        case splash.CausalRows():
            return splash.splash_attention(query, key, value, shared)  # which names it
        case buffer_attention.BufferedRows():
            mixed = buffer_attention.buffer_attention(own, query, key, value, shared)
        case cudnn.MaskedRows():
            mixed = cudnn.cudnn_attention(query, key, value, shared)
        case _:
            mixed = attend(query, (*(k for k, _ in own), key), (*(v for _, v in own), value), shared)
    return checkpoint_name(mixed, "attention")


def _platform() -> str:
    """Of the mesh in use, which need not be this machine's, or else of the default device."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    return jax.default_backend() if device is None else device.platform


def _check(attention: str, platform: str) -> None:
    if platform not in PLATFORMS.get(attention, (platform,)):
        raise ConfigError(
            f"model.attention is {attention!r}, which does not run on the platform {platform!r}; use 'auto' or 'xla'."
        )
    if attention == "cudnn" and not cudnn.is_capable():
        raise ConfigError(
            "model.attention is 'cudnn', which needs an NVIDIA GPU of compute capability "
            f"{cudnn.LEAST_CAPABILITY}.0 or more; use 'auto' or 'xla'."
        )


def _takes(config: ModelConfig, batch: int, name: str, automatic: bool) -> bool:
    """Whether a kernel that fits is to be used: by name, or when the platform suggests it."""
    if not (divides(batch, "batch") and divides(config.num_key_value_heads, "activation_heads")):
        return False
    is_told = not jax.sharding.get_abstract_mesh().empty or jax.device_count() == 1
    return config.attention == name or (config.attention == "auto" and automatic and is_told)


def _takes_splash(config: ModelConfig, visibility: Visibility, caches: Sequence[KVCache], platform: str) -> bool:
    batch, length = visibility.segment.shape
    possible = visibility.in_buffer_order and not caches and splash.fits(length, config.head_dim)
    return possible and _takes(config, batch, "splash", platform == "tpu" and length >= LONG)


def _takes_cudnn(config: ModelConfig, visibility: Visibility, caches: Sequence[KVCache], platform: str) -> bool:
    batch, length = visibility.segment.shape
    possible = visibility.in_buffer_order and not caches and cudnn.fits(length, config.head_dim, config.dtype)
    return possible and _takes(config, batch, "cudnn", platform == "gpu" and length >= LONG and cudnn.is_capable())


def _takes_buffer_attention(
    config: ModelConfig, visibility: Visibility, caches: Sequence[KVCache], platform: str
) -> bool:
    batch, length = visibility.segment.shape
    groups = config.num_attention_heads // config.num_key_value_heads
    one_of_its_own = len(caches) == 1 and caches[0].keys.shape[1] == batch
    possible = one_of_its_own and buffer_attention.fits(length, groups, config.head_dim)
    return possible and _takes(config, batch, "pallas", platform == "tpu")
