"""ReFusion: a diffusion language model that decodes whole slots of tokens in parallel, in JAX and Flax."""

from refusion_jax.api import Model, generate, load, logits
from refusion_jax.config import Config, ConfigError, DecodeConfig, ModelConfig
from refusion_jax.data import DataError
from refusion_jax.decoding import Generation
from refusion_jax.huggingface import CheckpointError

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "DecodeConfig",
    "Generation",
    "Model",
    "ModelConfig",
    "generate",
    "load",
    "logits",
]
