"""ReFusion: a diffusion language model that decodes whole slots of tokens in parallel, in JAX and Flax."""

from refusion_jax import accelerators
from refusion_jax.api import Model, StreamRequest, Watch, generate, generate_stream, load, logits, prepare
from refusion_jax.config import Config, ConfigError, DecodeConfig, MeshConfig, ModelConfig
from refusion_jax.data import DataError
from refusion_jax.decoding import Answer, Generation, Hole, Rules, SlotScore, Statistics, Verification
from refusion_jax.decoding.rules import SLOT_SCORES
from refusion_jax.huggingface import CheckpointError
from refusion_jax.likelihood import LogLikelihood, log_likelihood
from refusion_jax.methods import Method
from refusion_jax.sharding import make_mesh

__all__ = [
    "SLOT_SCORES",
    "Answer",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "DecodeConfig",
    "Generation",
    "Hole",
    "LogLikelihood",
    "MeshConfig",
    "Method",
    "Model",
    "ModelConfig",
    "Rules",
    "SlotScore",
    "Statistics",
    "StreamRequest",
    "Verification",
    "Watch",
    "accelerators",
    "generate",
    "generate_stream",
    "load",
    "log_likelihood",
    "logits",
    "make_mesh",
    "prepare",
]
