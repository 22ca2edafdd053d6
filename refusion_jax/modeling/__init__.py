"""The Qwen3 decoder: RoPE from position IDs, attention whose visibility is data, scanned layers."""

from refusion_jax.modeling.attention import KVCache, Visibility
from refusion_jax.modeling.transformer import Transformer

__all__ = ["KVCache", "Transformer", "Visibility"]
