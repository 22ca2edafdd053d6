"""How many rows a decode may have at once, from the memory that is free."""

import os

import jax
import jax.numpy as jnp

from refusion_jax.config import ModelConfig

MOST_ROWS = 256  # more rows than that hardly raise any device's throughput
SHARE = 0.7  # of free memory; the rest is for the allocator's gaps and what the formula leaves out
UNKNOWN_FREE = 4 * 2**30  # bytes, where neither the device nor the system says


def kv_bytes(config: ModelConfig, rows: int, length: int) -> int:
    """Bytes of a KV buffer: 2 * layers * rows * length * kv_heads * head_dim * bytes per number."""
    numbers = 2 * config.num_hidden_layers * rows * length * config.num_key_value_heads * config.head_dim
    return numbers * jnp.dtype(config.dtype).itemsize


def row_bytes(config: ModelConfig, buffer_length: int, width: int) -> int:
    """Bytes that one row takes while it decodes: its KV, its query's KV, and the temporaries of one forward.

    Args:
      buffer_length: KV entries. width: the longest query.
    """
    kv = kv_bytes(config, 1, buffer_length + 2 * width)
    logits = 4 * 3 * width * config.vocab_size
    attention = 4 * 3 * config.num_attention_heads * width * (buffer_length + width)
    activations = 4 * width * (6 * config.hidden_size + 3 * config.intermediate_size)
    return kv + logits + attention + activations


def free_bytes() -> int:
    """Memory that is free on the default device; the machine's where the device is the CPU."""
    statistics = jax.local_devices()[0].memory_stats()
    if statistics and "bytes_limit" in statistics:
        return statistics["bytes_limit"] - statistics["bytes_in_use"]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not every system knows
        return UNKNOWN_FREE


def fitting_rows(config: ModelConfig, buffer_length: int, width: int, free: int | None = None) -> int:
    """The largest power of two of rows that fit into `free` bytes (by default what is free now), at least 1."""
    free = free_bytes() if free is None else free
    rows = 1
    while rows < MOST_ROWS and 2 * rows * row_bytes(config, buffer_length, width) <= SHARE * free:
        rows *= 2
    return rows
