"""Weights alone, without the rest of a training state: to decode with, or to begin another run with."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, Sharding

from refusion_jax.config import Config, LoraConfig, ModelConfig, join_some
from refusion_jax.huggingface import CheckpointError, local_directory, read_model_config, read_params
from refusion_jax.huggingface.weights import read_leaves
from refusion_jax.modeling import Transformer
from refusion_jax.modeling.lora import init_lora, merge_kernel
from refusion_jax.modeling.quantization import quantize_leaves
from refusion_jax.sharding import tree_shardings
from refusion_jax.training.restoring import check_base, newest, restore, restore_leaves
from refusion_jax.training.run_directory import CHECKPOINTS_NAME, CONFIG_NAME, TOKENIZER_NAME, read_run_config

_Leaves = Iterator[tuple[tuple[str, ...], jax.Array]]

# Two models that differ in these only can have the same weights.
_COMPUTED_WITH = (
    "dtype", "param_dtype", "remat", "scan_unroll", "attention_chunk", "attention", "kv_dtype",
    "initializer_range", "max_position_embeddings", "rope_type", "rope_scaling", "rope_original_length", "rope_ramp",
    "rope_attention_factor", "pad_token_id", "eos_token_ids", "mask_token_id",
)  # fmt: skip


def param_shardings(config: ModelConfig, mesh: Mesh) -> Any:
    """Where each parameter of a model goes on a mesh, a pytree like them."""
    return tree_shardings(_boxed_shapes(config), mesh)


def run_params(
    workdir: epath.Path,
    config: Config,
    shardings: Any = None,
    dtype: str | None = None,
    quantize: str | None = None,
) -> Any:
    """The parameters of a run's model at its newest checkpoint that is not damaged, adapters merged in.

    Args:
      workdir: the run directory.
      config: the run's configuration.
      shardings: where each parameter goes, a pytree like them; by default all to the first device.
      dtype: of the parameters; by default the run's.
      quantize: "int8" for what `modeling.quantization.quantize` makes of them, one parameter after another.

    Raises:
      CheckpointError: when there is no checkpoint, or it does not hold the parameters of this model.
    """
    if config.model.vocab_size == 0:
        raise CheckpointError(f"{workdir / CONFIG_NAME} is not that of a started run: model.vocab_size is 0.")
    dtype = dtype or config.model.param_dtype
    if quantize:
        return quantize_leaves(_run_leaves(workdir, config, shardings, dtype), config.model.tie_word_embeddings)
    if config.lora.rank:
        return unflatten_dict(dict(_run_leaves(workdir, config, shardings, dtype)))
    shapes = _shapes(dataclasses.replace(config.model, param_dtype=dtype))
    return restore(newest(workdir), shapes, shardings)


def _run_leaves(workdir: epath.Path, config: Config, shardings: Any, dtype: str) -> _Leaves:
    """Each parameter of `run_params` with its path, one after another, the largest first."""
    saved = newest(workdir)
    if not config.lora.rank:
        shapes = _shapes(dataclasses.replace(config.model, param_dtype=dtype))
        yield from restore_leaves(saved, shapes, shardings)
        return
    adapters = jax.eval_shape(lambda: init_lora(jax.random.key(0), _shapes(config.model), config.lora))
    adapters = flatten_dict(jax.device_get(restore(saved, adapters)))
    sums = {}
    # Adapters know the weights they adapt, so these are read as they were in training.
    for path, leaf in _initial_leaves(config.train.init_from, config.model, shardings):
        sums[path] = _sum(leaf)
        a, b = (adapters.get((*path[:-1], name)) for name in ("a", "b"))
        if path[-1] == "kernel" and a is not None:
            leaf = _merge_layers(config.lora, leaf.sharding)(leaf, a, b)
        yield path, _cast(leaf, dtype)
    check_base(saved.about(), _digest(unflatten_dict(sums)), saved.where)


@functools.cache
def _merge_layers(config: LoraConfig, sharding: Sharding) -> Any:
    """Consumes the kernel, and has one layer of it in float32 at a time."""

    def merge_layers(kernel: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        def merge_layer(layer: jax.Array, kernel: jax.Array) -> jax.Array:
            return kernel.at[layer].set(merge_kernel(kernel[layer], a[layer], b[layer], config))

        return jax.lax.fori_loop(0, len(kernel), merge_layer, kernel)

    return jax.jit(merge_layers, out_shardings=sharding, donate_argnums=0)


def _cast(leaf: jax.Array, dtype: str) -> jax.Array:
    """Consumes the leaf."""
    if leaf.dtype == dtype:
        return leaf
    cast = jax.block_until_ready(jax.jit(lambda leaf: leaf.astype(dtype), out_shardings=leaf.sharding)(leaf))
    leaf.delete()
    return cast


def initial_params(path: str, config: ModelConfig, shardings: Any = None) -> Any:
    """The weights of a run, a Hugging Face directory or a model of the Hub, for another run to begin with.

    A Hugging Face vocabulary may have fewer or more rows than `config.vocab_size`, see `read_params`.

    Args:
      path: the directory, or a name such as "org/name".
      config: the model that begins with them.
      shardings: where each parameter goes, a pytree like them; by default all to the first device.

    Raises:
      CheckpointError: when it has no usable weights, or those of another model, naming the first differences.
    """
    directory, run = _find_initial(path, config)
    if run:
        return run_params(directory, run, shardings, config.param_dtype)
    return read_params(directory, config, shardings)


def _initial_leaves(path: str, config: ModelConfig, shardings: Any) -> _Leaves:
    """Each parameter of `initial_params` with its path, one after another."""
    directory, run = _find_initial(path, config)
    if run:
        return _run_leaves(directory, run, shardings, config.param_dtype)
    return read_leaves(directory, config, shardings)


def _find_initial(path: str, config: ModelConfig) -> tuple[epath.Path, Config | None]:
    """The directory that `initial_params` reads, and the configuration of a run."""
    directory = local_directory(path)
    if not directory.is_dir():
        raise CheckpointError(f"{path}, which train.init_from names, is not a directory.")
    run = read_run_config(directory) if is_run(directory) else None
    ours, theirs = map(dataclasses.asdict, (config, run.model if run else read_model_config(directory)))
    may_differ = _COMPUTED_WITH if run else (*_COMPUTED_WITH, "vocab_size")
    different = [
        f"model.{name} is {theirs[name]!r} there and {ours[name]!r} here"
        for name in ours
        if name not in may_differ and ours[name] != theirs[name]
    ]
    if different:
        raise CheckpointError(f"{path} holds the weights of another model: {join_some(different, 10)}.")
    return directory, run


def is_run(directory: epath.Path) -> bool:
    """Whether it is a run directory, rather than a Hugging Face directory."""
    return (directory / CHECKPOINTS_NAME).is_dir()


def is_begun_run(directory: epath.Path) -> bool:
    """Whether it is a run directory, perhaps of a run that has no checkpoint yet."""
    return is_run(directory) or (directory / TOKENIZER_NAME).is_dir()


def _boxed_shapes(config: ModelConfig) -> Any:
    tokens = jnp.zeros((1, 1), jnp.int32)
    return jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens, tokens)["params"]


def _shapes(config: ModelConfig) -> Any:
    return nn.unbox(_boxed_shapes(config))


@jax.jit
def _sum(leaf: jax.Array) -> jax.Array:
    """A number that any change of the leaf's bits most likely changes, the same for any sharding."""
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
    place = jnp.arange(leaf.size, dtype=jnp.uint32).reshape(leaf.shape)
    return jnp.sum((bits ^ (place * jnp.uint32(2654435761))) * (2 * place + 1), dtype=jnp.uint32)


def weights_digest(params: Any) -> str:
    """A hash of a pytree of weights, of at most 4 bytes each."""
    return _digest(jax.tree.map(_sum, params))


def _digest(sums: Any) -> str:
    numbers = jax.device_get(jax.tree.leaves(sums))
    return hashlib.sha256(b"".join(int(number).to_bytes(4, "little") for number in numbers)).hexdigest()
