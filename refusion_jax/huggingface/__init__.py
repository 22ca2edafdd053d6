"""Checkpoints in Hugging Face's layout: read onto devices, fetched from the Hub, written for other programs."""

from refusion_jax.huggingface.architectures import read_model_config, read_objective
from refusion_jax.huggingface.errors import CheckpointError
from refusion_jax.huggingface.export import export_checkpoint, parse_size
from refusion_jax.huggingface.hub import local_directory
from refusion_jax.huggingface.names import LAYER_PARAM_PATHS, PARAM_PATHS
from refusion_jax.huggingface.tokenizer import read_tokenizer
from refusion_jax.huggingface.weights import read_params

__all__ = [
    "LAYER_PARAM_PATHS",
    "PARAM_PATHS",
    "CheckpointError",
    "export_checkpoint",
    "local_directory",
    "parse_size",
    "read_model_config",
    "read_objective",
    "read_params",
    "read_tokenizer",
]
