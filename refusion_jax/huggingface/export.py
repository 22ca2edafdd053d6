"""A model as a Hugging Face directory: configuration, safetensors files and tokenizer, for `transformers` to load."""

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from refusion_jax.config import DTYPES, ModelConfig
from refusion_jax.files import replace_file, write_json
from refusion_jax.huggingface.architectures import (
    ATTENTION,
    BLOCKS_FIELD,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    MLP,
    OBJECTIVE_FIELD,
)
from refusion_jax.huggingface.directories import new_directory, read_object
from refusion_jax.huggingface.errors import CheckpointError
from refusion_jax.huggingface.names import TensorSpec, get, stored_name, tensor_specs
from refusion_jax.huggingface.rope import write_rope
from refusion_jax.huggingface.safetensors_files import DTYPES as STORED_DTYPES
from refusion_jax.huggingface.safetensors_files import INDEX_NAME, WEIGHTS_NAME

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SPELLINGS = {dtype.name: spelling for spelling, dtype in STORED_DTYPES.items()}


class SavedTokenizer(Protocol):
    """What is written of a tokenizer."""

    bos_token_id: int | None

    def export(self, directory: Path) -> None:
        """Writes its files."""


def parse_size(text: str) -> int:
    """Bytes of a size such as "5GB" or "200MiB".

    Raises:
      CheckpointError: for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size < 1:
        raise CheckpointError(f"{text!r} is no size of a file; give a number of bytes, such as 5GB or 500MB.")
    return size


def export_checkpoint(
    params: Any,
    config: ModelConfig,
    directory: Path,
    tokenizer: SavedTokenizer | None = None,
    dtype: str | None = None,
    max_shard_size: int = 5 * 10**9,
    objective: str = "",
    block_lengths: tuple[int, ...] = (),
) -> None:
    """Writes a model as a directory that `transformers` and `load` read. The host holds one tensor at a time.

    Args:
      params: the parameter tree.
      config: its model.
      directory: to write; it appears when complete.
      tokenizer: whose files are written beside the weights.
      dtype: of the tensors; by default that of the parameters.
      max_shard_size: bytes of tensors in a file; a larger tensor has a file of its own.
      objective: what the model was trained for, which `load` reads again; "" where that is not known.
      block_lengths: of "block_diffusion" the lengths of the blocks it was trained in, as far as known.

    Raises:
      CheckpointError: when `directory` holds something or cannot be written, the parameters are quantised, or no
        architecture that `transformers` knows computes what the model does.
    """
    check_unquantised(params)
    dtype = dtype or config.param_dtype
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype is {dtype!r}, not one of {', '.join(DTYPES)}.")
    described = describe(config, dtype, getattr(tokenizer, "bos_token_id", None))
    described |= {OBJECTIVE_FIELD: objective} if objective else {}
    described |= {BLOCKS_FIELD: list(block_lengths)} if block_lengths else {}
    with new_directory(directory) as temporary:
        if tokenizer is not None:
            tokenizer.export(temporary)
        write_json(temporary / CONFIG_NAME, described)
        _write_generation_config(temporary / GENERATION_CONFIG_NAME, described)
        _write_weights(temporary, params, tensor_specs(config, described["model_type"]), dtype, max_shard_size)


def check_unquantised(params: Any) -> None:
    """Refuses to write parameters of `modeling.quantization.quantize`.

    Raises:
      CheckpointError: for these.
    """
    if any(leaf.dtype == jnp.int8 for leaf in jax.tree.leaves(params)):
        raise CheckpointError(
            "The parameters are quantised to int8, from which the model's own weights cannot be had again; load it "
            "without quantize, and write that."
        )


def describe(config: ModelConfig, dtype: str, bos_token_id: int | None = None) -> dict[str, Any]:
    """The `config.json` of a model.

    Raises:
      CheckpointError: when none of the architectures there computes the same.
    """
    eos = config.eos_token_ids
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
        "initializer_range", "pad_token_id", "mask_token_id",
    )  # fmt: skip
    return {
        **_architecture(config),
        **{name: getattr(config, name) for name in names},
        **write_rope(config),
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos),
        "torch_dtype": dtype,
        "use_cache": True,
    }


def _architecture(config: ModelConfig) -> dict[str, Any]:
    biases = set(config.biases)
    attention, mlp = biases & set(ATTENTION), biases & set(MLP)
    whole_attention = attention in (set(), set(ATTENTION))
    if config.qk_norm and whole_attention and not mlp:
        plain = {"sliding_window": None, "use_sliding_window": False, "max_window_layers": config.num_hidden_layers}
        return {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": bool(attention), **plain,
        }  # fmt: skip
    if not config.qk_norm and biases == set(ATTENTION[:3]):
        plain = {"sliding_window": None, "use_sliding_window": False, "max_window_layers": config.num_hidden_layers}
        return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **plain}
    if not config.qk_norm and whole_attention and mlp in (set(), set(MLP)):
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": bool(attention),
            "mlp_bias": bool(mlp),
        }  # fmt: skip
    raise CheckpointError(
        f"No Hugging Face architecture here has model.qk_norm {config.qk_norm} with model.biases {config.biases}: with "
        f"it Qwen3 has none or all of {', '.join(ATTENTION)}; without it Qwen2 has the first three, and Llama none or "
        f"all of these, and none or all of {', '.join(MLP)}."
    )


def _write_generation_config(path: Path, described: dict[str, Any]) -> None:
    """Special tokens of the model, beside what the file that came with a tokenizer says of sampling."""
    settings = read_object(path) if path.exists() else {}
    special = {name: described[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(path, settings | {name: token for name, token in special.items() if token is not None})


def _write_weights(directory: Path, params: Any, specs: list[TensorSpec], dtype: str, max_shard_size: int) -> None:
    shards: list[list[TensorSpec]] = [[]]
    room = max_shard_size
    for spec in specs:
        size = _bytes(spec, dtype)
        if shards[-1] and size > room:
            shards.append([])
            room = max_shard_size
        shards[-1].append(spec)
        room -= size
    if len(shards) == 1:
        _write_file(directory / WEIGHTS_NAME, params, shards[0], dtype)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_file(directory / name, params, shard, dtype)
        weight_map |= {_full_name(spec): name for spec in shard}
    total = sum(_bytes(spec, dtype) for spec in specs)
    write_json(directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _bytes(spec: TensorSpec, dtype: str) -> int:
    return int(np.prod(spec.shape, dtype=np.int64)) * jnp.dtype(dtype).itemsize


def _full_name(spec: TensorSpec) -> str:
    return stored_name(spec.name, "")


def _write_file(path: Path, params: Any, specs: list[TensorSpec], dtype: str) -> None:
    """Writes a safetensors file tensor by tensor, which the format's own library does only with all in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # which `transformers` asks for
    end = 0
    for spec in specs:
        begin, end = end, end + _bytes(spec, dtype)
        entry = {"dtype": _SPELLINGS[dtype], "shape": spec.shape, "data_offsets": [begin, end]}
        header[_full_name(spec)] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    with replace_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in _tensors(params, specs, dtype):
            file.write(tensor.view(np.uint8).data)


def _tensors(params: Any, specs: list[TensorSpec], dtype: str) -> Iterator[np.ndarray]:
    for spec in specs:
        leaf, layer = get(params, spec.path), np.int32(spec.layer or 0)
        tensor = _take(leaf, layer, spec.layer is not None, spec.is_transposed, dtype)
        yield np.ascontiguousarray(jax.device_get(tensor)).reshape(-1)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _take(leaf: jax.Array, layer: jax.Array, has_layers: bool, is_transposed: bool, dtype: str) -> jax.Array:
    tensor = jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False) if has_layers else leaf
    return (tensor.T if is_transposed else tensor).astype(dtype)
