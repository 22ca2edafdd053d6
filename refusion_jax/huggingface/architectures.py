"""`config.json` and `ModelConfig`: Qwen3, Llama, Qwen2 (also as Dream) and LLaDA.

Code that a checkpoint brings (`auto_map`) is never run: `model_type` alone decides how the fields are read.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from refusion_jax.config import DTYPES, OBJECTIVES, ConfigError, ModelConfig, from_dict, nearest
from refusion_jax.huggingface.directories import file_inside, on_disk, read_object
from refusion_jax.huggingface.errors import CheckpointError
from refusion_jax.huggingface.fields import Fields
from refusion_jax.huggingface.rope import read_rope
from refusion_jax.huggingface.safetensors_files import open_tensors

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
REFUSION_MASK_TOKEN_ID = 151_670
# Ours: other programs leave them alone.
OBJECTIVE_FIELD, BLOCKS_FIELD = "training_objective", "training_block_lengths"

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
_ROW_MULTIPLE = 128
_QWEN3_HEAD_DIM = 128


class SpecialTokens(Protocol):
    """What a tokenizer tells of its tokens."""

    vocab_size: int
    pad_token_id: int
    mask_token_id: int

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a directory's tensors are named, and how many rows its vocabulary has."""

    model_type: str
    vocab_rows: int


def read_model_config(directory: Path, tokenizer: SpecialTokens | None = None, dtype: str | None = None) -> ModelConfig:
    """The model that a directory's `config.json` describes.

    The vocabulary has the file's rows, unless the tokenizer has more tokens: then the next multiple of 128 that holds
    them. EOS tokens are those of `config.json` and then `generation_config.json`; where neither names any, the
    tokenizer's. The pad token is that of the first of these that has one, or 0; the mask token that of `config.json`,
    the tokenizer's, or that of the published ReFusion, for which a plain Qwen3 has room.

    Args:
      directory: a Hugging Face directory.
      tokenizer: its tokenizer, if it has one.
      dtype: of parameters and activations; by default that of `config.json`, or of the tensors.

    Raises:
      CheckpointError: when the file is missing or malformed, or describes what is not supported.
    """
    fields = _read_fields(directory)
    described = _read_architecture(fields)
    generation = _read_generation_config(directory)
    rows = described["vocab_size"]
    if tokenizer is not None and tokenizer.vocab_size > rows:
        rows = -(-tokenizer.vocab_size // _ROW_MULTIPLE) * _ROW_MULTIPLE
    eos = tuple(dict.fromkeys((*fields.integers("eos_token_id"), *generation.integers("eos_token_id"))))
    if not eos and tokenizer is not None:
        eos = tuple(tokenizer.eos_token_ids)
    pads = [each.integer("pad_token_id", None) for each in (fields, generation)]
    pads += [None if tokenizer is None else tokenizer.pad_token_id, 0]
    mask = fields.integer("mask_token_id", None)
    if mask is None:
        mask = min(REFUSION_MASK_TOKEN_ID, rows - 1) if tokenizer is None else tokenizer.mask_token_id
    dtype = dtype or _dtype(fields, directory)
    special = {
        "eos_token_ids": eos,
        "pad_token_id": next(pad for pad in pads if pad is not None),
        "mask_token_id": mask,
    }
    try:
        return from_dict(ModelConfig, described | special | {"vocab_size": rows, "dtype": dtype, "param_dtype": dtype})
    except ConfigError as error:
        raise CheckpointError(f"{fields.where} does not describe a usable model: {error}") from error


def stated_mask_token_id(directory: Path) -> int | None:
    """The mask token that `config.json` names; None without one, also where reading the model says what is wrong."""
    try:
        path = file_inside(on_disk(directory), CONFIG_NAME)
        token = Fields(read_object(path), str(path)).integer("mask_token_id", None)
    except CheckpointError:
        return None
    return token if token is not None and token >= 0 else None


def read_objective(directory: Path) -> tuple[str, tuple[int, ...]]:
    """What a directory's weights were trained for, one of `config.OBJECTIVES`; "" where its `config.json` does not say.

    LLaDA and Dream are architectures of their own; a ReFusion is a plain Qwen3 unless this package wrote it.

    Returns:
      the objective, and the lengths of the blocks that "block_diffusion" was trained in, as far as they are told.

    Raises:
      CheckpointError: when the file is missing or malformed, or names an unknown objective or no lengths.
    """
    fields = _read_fields(directory)
    objective = fields.text(OBJECTIVE_FIELD, "")
    if objective and objective not in OBJECTIVES:
        raise CheckpointError(
            f"{fields.where} has the {OBJECTIVE_FIELD} {objective!r}, which is none.{nearest(objective, OBJECTIVES)}"
        )
    lengths = fields.integers(BLOCKS_FIELD)
    if min(lengths, default=1) < 1:
        raise CheckpointError(f"{fields.where} has the {BLOCKS_FIELD} {list(lengths)}; a block has at least one token.")
    return objective or {"llada": "llada", "Dream": "dream"}.get(fields.values["model_type"], ""), lengths


def read_layout(directory: Path) -> Layout:
    """What `config.json` tells of the tensors.

    Raises:
      CheckpointError: when the file is missing or malformed, or describes what is not supported.
    """
    fields = _read_fields(directory)
    return Layout(fields.values["model_type"], _read_architecture(fields)["vocab_size"])


def _read_fields(directory: Path) -> Fields:
    path = file_inside(on_disk(directory), CONFIG_NAME)
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; a Hugging Face directory has a config.json beside its weights.")
    fields = Fields(read_object(path), str(path))
    model_type = fields.values.get("model_type")
    if not isinstance(model_type, str) or model_type not in _ARCHITECTURES:
        raise CheckpointError(
            f"{path} describes model_type {model_type!r}; only {', '.join(_ARCHITECTURES)} can be loaded."
        )
    return fields


def _read_generation_config(directory: Path) -> Fields:
    path = file_inside(on_disk(directory), GENERATION_CONFIG_NAME)
    return Fields(read_object(path) if path.is_file() else {}, str(path))


def _read_architecture(fields: Fields) -> dict[str, Any]:
    fields.refuse_unless("quantization_config", ())
    described = _ARCHITECTURES[fields.values["model_type"]](fields)
    if described["vocab_size"] < 1:
        raise CheckpointError(
            f"{fields.where} describes a vocabulary of {described['vocab_size']} tokens; give its size."
        )
    return described


def _dtype(fields: Fields, directory: Path) -> str:
    stated = fields.text("dtype", fields.text("torch_dtype", None))
    if stated is not None:
        name = stated.removeprefix("torch.")
        if name not in DTYPES:
            raise CheckpointError(
                f"{fields.where} has dtype {stated!r}; load with one of {', '.join(DTYPES)}, as dtype=..., instead."
            )
        return name
    tensors = open_tensors(directory)
    embeddings = [tensors[name] for name in ("embed_tokens.weight", "transformer.wte.weight") if name in tensors]
    name = embeddings[0].dtype_name if embeddings else None
    return name or "float32"


def _shape(fields: Fields) -> dict[str, Any]:
    fields.refuse_unless("hidden_act", ("silu", "swish"))
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    # A head count of 0 is refused with the other sizes, once they are all known.
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_hidden_layers": fields.integer("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": fields.integer("head_dim", hidden // max(heads, 1)),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
    }


def _refuse_sliding_window(fields: Fields) -> None:
    if fields.flag("use_sliding_window", False):
        raise fields.error("use_sliding_window", "which is not supported; only False is", "sets")
    kinds = fields.values.get("layer_types") or []
    kinds = kinds if isinstance(kinds, list) else [kinds]
    other = next((kind for kind in kinds if kind != "full_attention"), None)
    if other is not None:
        raise CheckpointError(
            f"{fields.where} sets layer_types to {other!r} for some layers, which is not supported; only "
            "'full_attention' is."
        )


def _qwen3(fields: Fields) -> dict[str, Any]:
    _refuse_sliding_window(fields)
    biases = ATTENTION if fields.flag("attention_bias", False) else ()
    # The head size is part of the architecture, whatever the width.
    head_dim = fields.integer("head_dim", _QWEN3_HEAD_DIM)
    return _shape(fields) | read_rope(fields) | {"biases": biases, "head_dim": head_dim}


def _qwen2(fields: Fields) -> dict[str, Any]:
    _refuse_sliding_window(fields)
    return _shape(fields) | read_rope(fields) | {"biases": ATTENTION[:3], "qk_norm": False}


def _llama(fields: Fields) -> dict[str, Any]:
    _refuse_sliding_window(fields)
    fields.refuse_unless("sliding_window", ())
    biases = (
        *(ATTENTION if fields.flag("attention_bias", False) else ()),
        *(MLP if fields.flag("mlp_bias", False) else ()),
    )
    return _shape(fields) | read_rope(fields) | {"biases": biases, "qk_norm": False}


# What LLaDA's own code can be told and only this is supported of.
_LLADA_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "block_type": ("llama",),
    "block_group_size": (1,),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (True,),
    "bias_for_layer_norm": (False,),
    "attention_layer_norm": (False,),
    "activation_type": ("silu",),
    "rope": (True,),
    "alibi": (False,),
    "multi_query_attention": (False,),
    "input_emb_norm": (False,),
    "scale_logits": (False,),
    "clip_qkv": (),
}


def _llada(fields: Fields) -> dict[str, Any]:
    for name, supported in _LLADA_SUPPORTED.items():
        fields.refuse_unless(name, supported)
    width, heads, tied = fields.integer("d_model"), fields.integer("n_heads"), fields.flag("weight_tying", True)
    biases: tuple[str, ...] = ATTENTION[:3] if fields.flag("include_qkv_bias", False) else ()
    if fields.flag("include_bias", False):
        # It also gives norms and an output embedding of their own a bias, unless these are told otherwise.
        if not tied or fields.flag("bias_for_layer_norm", None) is None:
            raise fields.error("include_bias", "which is not supported; only False is", "sets")
        biases = (*ATTENTION, *MLP)
    return read_rope(fields) | {
        "vocab_size": fields.integer("embedding_size", None) or fields.integer("vocab_size"),
        "hidden_size": width,
        "intermediate_size": fields.integer("mlp_hidden_size", None) or fields.integer("mlp_ratio") * width,
        "num_hidden_layers": fields.integer("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("n_kv_heads", heads),
        "head_dim": width // max(heads, 1),
        "max_position_embeddings": fields.integer("max_sequence_length"),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-5),
        "tie_word_embeddings": tied,
        "qk_norm": False,
        "biases": biases,
    }


_ARCHITECTURES: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "qwen3": _qwen3,
    "llama": _llama,
    "qwen2": _qwen2,
    "Dream": _qwen2,
    "llada": _llada,
}
