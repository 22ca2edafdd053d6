"""The decoder: RoPE from position IDs, attention whose visibility is data, scanned layers."""

from refusion_jax.modeling.attention import ALL_GROUPS, KVCache, Visibility
from refusion_jax.modeling.transformer import Packing, Transformer

__all__ = ["ALL_GROUPS", "KVCache", "Packing", "Transformer", "Visibility"]
