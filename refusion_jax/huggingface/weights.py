"""Weights of a Hugging Face directory, streamed onto devices: the host never holds more than one tensor.

Each tensor is read from its place in the file, put on its devices in the file's type and already split as its parameter
is, and a compiled update casts it, transposes it and writes it into its layer of the parameter, in place. What is
wanted in int8 is rounded before that, so that devices never hold more than one tensor of it in another type.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from refusion_jax.config import ModelConfig, join_some
from refusion_jax.huggingface.architectures import read_layout
from refusion_jax.huggingface.directories import on_disk
from refusion_jax.huggingface.errors import CheckpointError
from refusion_jax.huggingface.names import TensorSpec, get, stored_name, tensor_specs
from refusion_jax.huggingface.safetensors_files import DTYPES, StoredTensor, open_tensors
from refusion_jax.modeling.quantization import quantize_leaf, scale_axis, scale_path, scale_sharding

_MOST_PROBLEMS = 8


def read_params(
    directory: Path, config: ModelConfig, shardings: Any = None, quantize: str | None = None
) -> dict[str, Any]:
    """Reads a checkpoint into this package's parameter tree: layers stacked, all of type `config.param_dtype`.

    `config.vocab_size` may differ from the file's rows: of fewer, the first ones are taken; more get the mean of the
    file's rows. In a computation of several processes, each reads the files and keeps its devices' share.

    Args:
      directory: a Hugging Face directory.
      config: its model, see `read_model_config`.
      shardings: where each parameter goes, a pytree like them; by default all to the first device.
      quantize: "int8" for what `modeling.quantization.quantize` makes of them, each tensor on its arrival.

    Raises:
      CheckpointError: when the files are damaged, or hold other tensors than the model has: it names all that are
        missing, misshapen, of a type that is not supported, or not part of the model.
    """
    return unflatten_dict(dict(read_leaves(directory, config, shardings, quantize)))


def read_leaves(
    directory: Path, config: ModelConfig, shardings: Any = None, quantize: str | None = None
) -> Iterator[tuple[tuple[str, ...], jax.Array]]:
    """Each parameter of `read_params` with its path, one after another, the largest first.

    Args and what it raises, at the first parameter: those of `read_params`.
    """
    parameters: dict[tuple[str, ...], dict[TensorSpec, StoredTensor]] = {}
    for spec, tensor in match_tensors(on_disk(directory), config).items():
        parameters.setdefault(spec.path, {})[spec] = tensor
    largest = max(tensor.nbytes() for tensors in parameters.values() for tensor in tensors.values())
    # Allocated once: JAX lets go of what it has put on a device only some time later.
    buffer = np.empty(largest, np.uint8)
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    for path, tensors in sorted(parameters.items(), key=lambda item: -sum(t.nbytes() for t in item[1].values())):
        sharding = first if shardings is None else get(shardings, path)
        axis = scale_axis(path, config.tie_word_embeddings) if quantize else None
        if axis is None:
            yield path, _read_parameter(tensors, buffer, config, sharding)
            continue
        numbers, scale = _read_quantized(tensors, buffer, config, sharding, axis)
        yield path, numbers
        yield scale_path(path), scale


def match_tensors(directory: Path, config: ModelConfig) -> dict[TensorSpec, StoredTensor]:
    """Where each tensor of a model is, without reading any.

    Raises:
      CheckpointError: as `read_params`.
    """
    layout, tensors = read_layout(directory), open_tensors(directory)
    if config.num_hidden_layers > len(tensors):
        raise CheckpointError(
            f"{directory} does not match its config.json: {config.num_hidden_layers} layers, but only {len(tensors)} "
            "tensors."
        )
    specs = [
        spec._replace(shape=(layout.vocab_rows, *spec.shape[1:])) if spec.has_vocabulary else spec
        for spec in tensor_specs(config, layout.model_type)
    ]
    problems = _problems(specs, tensors, layout.model_type)
    if problems:
        raise CheckpointError(f"{directory} does not match its config.json: {join_some(problems, _MOST_PROBLEMS)}.")
    return {spec: tensors[spec.name] for spec in specs}


def _problems(specs: list[TensorSpec], tensors: Mapping[str, StoredTensor], model_type: str) -> list[str]:
    known = {spec.name for spec in specs}
    missing = [_missing(spec, model_type) for spec in specs if spec.name not in tensors]
    there = [(spec, tensors[spec.name]) for spec in specs if spec.name in tensors]
    misshapen = [
        f"{tensor.name} has shape {tensor.shape}, not {spec.shape}"
        for spec, tensor in there
        if tensor.shape != spec.shape
    ]
    mistyped = [
        f"{tensor.name} is of type {tensor.dtype}, not one of {', '.join(DTYPES)}"
        for _, tensor in there
        if tensor.dtype not in DTYPES
    ]
    extra = [
        f"{tensor.name} is no part of the model"
        for name, tensor in tensors.items()
        if name not in known and not _is_ignored(name)
    ]
    return missing + misshapen + mistyped + extra


def _missing(spec: TensorSpec, model_type: str) -> str:
    sentence = f"{stored_name(spec.name, model_type)} is missing (expected shape {spec.shape}"
    if spec.path[0] == "lm_head":
        field = "weight_tying" if model_type == "llada" else "tie_word_embeddings"
        sentence += f"; {field} is false: set it to true if the embeddings are tied, or add the file with the tensor"
    return f"{sentence})"


def _is_ignored(name: str) -> bool:
    """Whether a tensor that the model lacks changes nothing: constants of RoPE, tied embeddings stored once more."""
    return name.endswith("rotary_emb.inv_freq") or name in ("lm_head.weight", "transformer.ff_out.weight")


def _read_parameter(
    tensors: Mapping[TensorSpec, StoredTensor], buffer: np.ndarray, config: ModelConfig, sharding: Sharding
) -> jax.Array:
    (spec, tensor), *_ = tensors.items()
    if spec.layer is None:
        return _read_whole(spec, tensor, buffer, config, sharding)
    stack = _zeros((config.num_hidden_layers, *_layer_shape(spec)), jnp.dtype(config.param_dtype), sharding)()
    for spec, tensor in tensors.items():
        part = _put(tensor.read(buffer), _part_sharding(sharding, spec.shape, spec.is_transposed))
        if spec.is_transposed:
            # Apart from the writing: fused with that it is several times slower on CPUs.
            part = _transpose(_part_sharding(sharding, _layer_shape(spec), False))(part)
        stack = _write_layer(stack, part, spec, sharding)
    return stack


def _read_quantized(
    tensors: Mapping[TensorSpec, StoredTensor], buffer: np.ndarray, config: ModelConfig, sharding: Sharding, axis: int
) -> tuple[jax.Array, jax.Array]:
    """A parameter's int8 numbers and scales; each layer has its own, so it is rounded alone."""
    (spec, tensor), *_ = tensors.items()
    if spec.layer is None:
        return quantize_leaf(_read_whole(spec, tensor, buffer, config, sharding), axis)
    shape = (config.num_hidden_layers, *_layer_shape(spec))
    of_scale = scale_sharding(sharding, len(shape), axis)
    stack = _zeros(shape, jnp.dtype(jnp.int8), sharding)()
    scales = _zeros(tuple(np.delete(shape, axis)), jnp.dtype(jnp.float32), of_scale)()
    for spec, tensor in tensors.items():
        part = _part_sharding(sharding, _layer_shape(spec), False)
        numbers, scale = quantize_leaf(_read_whole(spec, tensor, buffer, config, part), axis)
        stack, scales = _write_layer(stack, numbers, spec, sharding), _write_layer(scales, scale, spec, of_scale)
    return stack, scales


def _layer_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Of what the tensor is in its parameter."""
    return spec.shape[::-1] if spec.is_transposed else spec.shape


# Both wait for the result, which may be computed from the buffer itself, before the next tensor is read into it.
def _read_whole(
    spec: TensorSpec, tensor: StoredTensor, buffer: np.ndarray, config: ModelConfig, sharding: Sharding
) -> jax.Array:
    """The tensor as a parameter, or as a layer of one; one over the vocabulary gets the rows of the configuration."""
    rows = config.vocab_size if spec.has_vocabulary else spec.shape[0]
    there = min(rows, spec.shape[0])
    part = _part_sharding(sharding, (there, *spec.shape[1:]), spec.is_transposed)
    convert = _convert(rows, jnp.dtype(config.param_dtype), spec.is_transposed, sharding)
    return jax.block_until_ready(convert(_put(tensor.read(buffer, there), part)))


def _write_layer(stack: jax.Array, part: jax.Array, spec: TensorSpec, sharding: Sharding) -> jax.Array:
    """`stack`, which is consumed, with `part` in the layer."""
    return jax.block_until_ready(_write(sharding)(stack, part, np.int32(spec.layer or 0)))


def _part_sharding(sharding: Sharding, shape: tuple[int, ...], is_transposed: bool) -> Sharding:
    """How a tensor of the file's shape is split so that each device gets its share of the parameter, where possible."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    axes = [None] * len(shape) + list(sharding.spec)
    axes = axes[-len(shape) :]  # without the layers'
    axes = axes[::-1] if is_transposed else axes
    sizes = [math.prod(sharding.mesh.shape[name] for name in _names(axis)) for axis in axes]
    spec = [axis if size % parts == 0 else None for axis, size, parts in zip(axes, shape, sizes, strict=True)]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def _names(axis: Any) -> tuple[str, ...]:
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def _put(data: np.ndarray, sharding: Sharding) -> jax.Array:
    """Puts each device's share on it, one after another: a share that is not contiguous is copied on the host."""
    indices = sharding.addressable_devices_indices_map(data.shape)
    parts = [jax.block_until_ready(jax.device_put(data[index], device)) for device, index in indices.items()]
    return jax.make_array_from_single_device_arrays(data.shape, sharding, parts)


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: jnp.dtype, sharding: Sharding) -> Any:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


@functools.cache
def _convert(rows: int, dtype: jnp.dtype, is_transposed: bool, sharding: Sharding) -> Any:
    def convert(tensor: jax.Array) -> jax.Array:
        new = rows - tensor.shape[0]
        if new:
            mean = jnp.mean(tensor.astype(jnp.float32), axis=0, keepdims=True).astype(dtype)
            tensor = jnp.concatenate([tensor.astype(dtype), jnp.repeat(mean, new, axis=0)])
        # A copy even where nothing changes, lest the parameter be the buffer.
        return jnp.copy((tensor.T if is_transposed else tensor).astype(dtype))

    return jax.jit(convert, out_shardings=sharding)


@functools.cache
def _transpose(sharding: Sharding) -> Any:
    return jax.jit(jnp.transpose, out_shardings=sharding)


@functools.cache
def _write(sharding: Sharding) -> Any:
    def write(stack: jax.Array, tensor: jax.Array, layer: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, tensor.astype(stack.dtype), layer, axis=0)

    return jax.jit(write, out_shardings=sharding, donate_argnums=0)
