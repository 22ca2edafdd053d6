"""The published sizes of the Qwen3 backbone."""

from typing import Any

from refusion_jax.config import ConfigError, ModelConfig, nearest

# hidden size, feed-forward width, layers, query heads, tied embeddings; all have 8 key heads of size 128.
_SIZES = {
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12288, 36, 32, False),
    "14B": (5120, 17408, 40, 40, False),
    "32B": (5120, 25600, 64, 64, False),
}


def qwen3(size: str, **changes: Any) -> ModelConfig:
    """The dense Qwen3 of a size; its special tokens are the tokenizer's to tell.

    Args:
      size: "0.6B", "1.7B", "4B", "8B", "14B" or "32B".
      changes: fields to set otherwise, such as dtype and remat.

    Raises:
      ConfigError: for another size, or changes that do not make a usable model.
    """
    if size not in _SIZES:
        raise ConfigError(f"There is no Qwen3 of size {size!r}.{nearest(size, _SIZES)}")
    hidden_size, intermediate_size, layers, heads, tied = _SIZES[size]
    fields: dict[str, Any] = {
        "vocab_size": 151_936,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
    }
    return ModelConfig(**fields | changes)
