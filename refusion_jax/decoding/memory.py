"""How many rows a decode may have at once, from the memory that is free."""

import dataclasses
import os

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from refusion_jax.config import ModelConfig
from refusion_jax.sharding import row_shares

MOST_ROWS = 256  # of a device: more hardly raise any one's throughput
SHARE = 0.7  # of free memory; the rest is for the allocator's gaps and what the formula leaves out
UNKNOWN_FREE = 4 * 2**30  # bytes, where neither the device nor the system says


def kv_bytes(config: ModelConfig, rows: int, length: int) -> int:
    """Bytes of a KV buffer: 2 * layers * rows * length * kv_heads * head_dim * bytes per number, plus int8's scales."""
    heads = 2 * config.num_hidden_layers * rows * length * config.num_key_value_heads
    scale = 4 if config.kv_dtype else 0
    return heads * (config.head_dim * jnp.dtype(config.kv_dtype or config.dtype).itemsize + scale)


def row_bytes(config: ModelConfig, buffer_length: int, width: int, tensor: int = 1) -> int:
    """Bytes that one row takes while it decodes: its KV, its query's KV, and the temporaries of one forward.

    Args:
      buffer_length: KV entries. width: the longest query.
      tensor: devices that heads, feed-forward width and vocabulary are split over; what each of them has.
    """
    own = kv_bytes(dataclasses.replace(config, kv_dtype=""), 1, 2 * width)
    kv = (kv_bytes(config, 1, buffer_length) + own) // tensor
    logits = 4 * 3 * width * config.vocab_size // (tensor if config.vocab_size % tensor == 0 else 1)
    attention = 4 * 3 * config.num_attention_heads * width * (buffer_length + width) // tensor
    activations = 4 * width * (6 * config.hidden_size + 3 * config.intermediate_size // tensor)
    return kv + logits + attention + activations


def free_bytes(mesh: Mesh | None = None) -> int:
    """Memory that is free on the default device, or on each of this process's devices of a mesh.

    CPUs have their share of the machine's.
    """
    devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
    statistics = [device.memory_stats() or {} for device in devices]
    if all("bytes_limit" in each for each in statistics):
        return min(each["bytes_limit"] - each["bytes_in_use"] for each in statistics)
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)
    except (ValueError, OSError):  # not every system knows
        return UNKNOWN_FREE


def fitting_rows(
    config: ModelConfig, buffer_length: int, width: int, free: int | None = None, mesh: Mesh | None = None
) -> int:
    """How many rows fit: on each device the largest power of two, at least 1.

    Args:
      config: the model's. buffer_length: KV entries of a row. width: the longest query.
      free: bytes that each device has for them; by default what is free now.
      mesh: of the devices; by default it is one.
    """
    free = free_bytes(mesh) if free is None else free
    tensor = 1 if mesh is None else mesh.shape["tensor"]
    rows = 1
    while rows < MOST_ROWS and 2 * rows * row_bytes(config, buffer_length, width, tensor) <= SHARE * free:
        rows *= 2
    return rows * row_shares(mesh)
