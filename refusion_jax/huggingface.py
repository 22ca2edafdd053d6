"""Weights and configuration in Hugging Face layout: `config.json` beside one or several safetensors files."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from refusion_jax.config import ConfigError, ModelConfig, from_dict, join_some, nearest

PARAM_PATHS: dict[str, tuple[str, ...]] = {
    "embed_tokens.weight": ("embed_tokens", "embedding"),
    "norm.weight": ("norm", "scale"),
    "lm_head.weight": ("lm_head", "kernel"),
}
LAYER_PARAM_PATHS: dict[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("input_layernorm", "scale"),
    "post_attention_layernorm.weight": ("post_attention_layernorm", "scale"),
    **{f"self_attn.{name}.weight": ("self_attn", name, "kernel") for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{f"self_attn.{name}.weight": ("self_attn", name, "scale") for name in ("q_norm", "k_norm")},
    **{f"mlp.{name}.weight": ("mlp", name, "kernel") for name in ("gate_proj", "up_proj", "down_proj")},
}

REFUSION_MASK_TOKEN_ID = 151_670

# What changes a Qwen3's computation, and its value in those that can be loaded.
_PLAIN = {
    "rope_scaling": None,
    "attention_bias": False,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "quantization_config": None,
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names what is missing or misshapen."""


def read_model_config(directory: Path) -> ModelConfig:
    """Reads `config.json` of a Qwen3-shaped checkpoint.

    Raises:
      CheckpointError: when the file is missing or malformed, or describes an architecture other than Qwen3.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; a Hugging Face directory has a config.json beside its weights.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not JSON (line {error.lineno}): {error.msg}.") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not JSON: {error}.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    if values.get("model_type") != "qwen3":
        raise CheckpointError(f"{path} describes model_type {values.get('model_type')!r}; only 'qwen3' can be loaded.")
    for field, plain in _PLAIN.items():
        if values.get(field, plain) not in (plain, None):
            raise CheckpointError(
                f"{path} sets {field} to {values[field]!r}, which is not supported; only {plain!r} is."
            )
    rope = values.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise CheckpointError(f"{path} sets rope_parameters to {rope!r}, which is not supported; only plain RoPE is.")
    try:
        return _model_config(values)
    except KeyError as error:
        raise CheckpointError(f"{path} has no field {error.args[0]!r}.{nearest(error.args[0], values)}") from error
    except ConfigError as error:
        raise CheckpointError(f"{path} does not describe a usable model: {error}") from error


def _model_config(values: dict[str, Any]) -> ModelConfig:
    eos = values["eos_token_id"]
    shape = {
        field: values[field]
        for field in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
        )
    }  # fmt: skip
    rope = values.get("rope_parameters") or {}
    last_token = values["vocab_size"] - 1 if isinstance(values["vocab_size"], int) else REFUSION_MASK_TOKEN_ID
    given = shape | {
        "rope_theta": rope["rope_theta"] if "rope_theta" in rope else values["rope_theta"],
        "eos_token_ids": eos if isinstance(eos, list) else [eos],
        # A plain Qwen3 names neither; its vocabulary has room for the mask of the published ReFusion.
        "mask_token_id": _first(values.get("mask_token_id"), min(REFUSION_MASK_TOKEN_ID, last_token)),
        "pad_token_id": _first(values.get("pad_token_id"), 0),
    }
    return from_dict(ModelConfig, given)  # which checks the types too


def _first(value: int | None, default: int) -> int:
    return default if value is None else value


def read_params(directory: Path, config: ModelConfig) -> dict[str, Any]:
    """Reads all tensors of a checkpoint into this package's parameter tree (float32, layers stacked).

    Raises:
      CheckpointError: naming every tensor that is missing, or whose shape is not what the configuration asks for.
    """
    tensors = _open_tensors(directory)
    problems: list[str] = []
    params: dict[str, Any] = {}
    for name, path in PARAM_PATHS.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        _put(params, path, _read(tensors, name, path, config, problems))
    for name, path in LAYER_PARAM_PATHS.items():
        layers = [_read(tensors, f"layers.{i}.{name}", path, config, problems) for i in range(config.num_hidden_layers)]
        _put(params, ("layers", *path), layers)
    if problems:
        raise CheckpointError(f"{directory} does not match its config.json: {join_some(problems, 8)}.")
    return _stack(params)


def _open_tensors(directory: Path) -> dict[str, Any]:
    """Maps tensor name, without a leading `model.`, to the open file that holds it and its full name."""
    index = directory / "model.safetensors.index.json"
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values() if index.is_file() else None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error!r}.") from error
    files = sorted(directory.glob("*.safetensors") if listed is None else {directory / name for name in listed})
    if not files:
        raise CheckpointError(f"{directory} holds no .safetensors file; weights in other formats cannot be loaded.")
    tensors: dict[str, Any] = {}
    for file in files:
        try:
            handle = safe_open(file, framework="flax")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is not a readable safetensors file: {error}.") from error
        tensors.update({name.removeprefix("model."): (handle, name) for name in handle.keys()})  # noqa: SIM118
    return tensors


def _read(tensors: dict[str, Any], name: str, path: tuple[str, ...], config: ModelConfig, problems: list[str]) -> Any:
    expected = _expected_shape(name, config)
    if name not in tensors:
        problems.append(f"{name} is missing (expected shape {expected})")
        return None
    handle, full_name = tensors[name]
    shape = tuple(handle.get_slice(full_name).get_shape())
    if shape != expected:
        problems.append(f"{full_name} has shape {shape}, not {expected}")
        return None
    array = np.asarray(jnp.asarray(handle.get_tensor(full_name), jnp.dtype(config.param_dtype)))
    return array.T if path[-1] == "kernel" else array


def _expected_shape(name: str, c: ModelConfig) -> tuple[int, ...]:
    module = name.removesuffix(".weight").split(".")[-1]
    heads, kv_heads = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (c.vocab_size, c.hidden_size), "lm_head": (c.vocab_size, c.hidden_size),
        "q_proj": (heads, c.hidden_size), "k_proj": (kv_heads, c.hidden_size), "v_proj": (kv_heads, c.hidden_size),
        "o_proj": (c.hidden_size, heads), "q_norm": (c.head_dim,), "k_norm": (c.head_dim,),
        "gate_proj": (c.intermediate_size, c.hidden_size), "up_proj": (c.intermediate_size, c.hidden_size),
        "down_proj": (c.hidden_size, c.intermediate_size),
    }  # fmt: skip
    return shapes.get(module, (c.hidden_size,))


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _stack(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _stack(value) for key, value in tree.items()}
    return jnp.asarray(np.stack(tree) if isinstance(tree, list) else tree)
