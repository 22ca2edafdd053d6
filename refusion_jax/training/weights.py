"""Weights alone, without the rest of a training state: to decode with, or to begin another run with."""

import dataclasses
import hashlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh

from refusion_jax.config import Config, ModelConfig, join_some
from refusion_jax.huggingface import CheckpointError, local_directory, read_model_config, read_params
from refusion_jax.modeling import Transformer
from refusion_jax.modeling.lora import init_lora, merge
from refusion_jax.sharding import tree_shardings
from refusion_jax.training.integrity import absolute, finished_steps, reported_damage
from refusion_jax.training.run_directory import CHECKPOINTS_NAME, CONFIG_NAME, TOKENIZER_NAME, read_run_config

# Two models that differ in these only can have the same weights.
_COMPUTED_WITH = (
    "dtype", "param_dtype", "remat", "scan_unroll", "attention_chunk", "attention", "kv_dtype",
    "initializer_range", "max_position_embeddings", "rope_type", "rope_scaling", "rope_original_length", "rope_ramp",
    "rope_attention_factor", "pad_token_id", "eos_token_ids", "mask_token_id",
)  # fmt: skip


def param_shardings(config: ModelConfig, mesh: Mesh) -> Any:
    """Where each parameter of a model goes on a mesh, a pytree like them."""
    return tree_shardings(_boxed_shapes(config), mesh)


def run_params(workdir: epath.Path, config: Config, shardings: Any = None, dtype: str | None = None) -> Any:
    """The parameters of a run's model at its newest checkpoint that is not damaged, adapters merged in.

    Args:
      workdir: the run directory.
      config: the run's configuration.
      shardings: where each parameter goes, a pytree like them; by default all to the first device.
      dtype: of the parameters; by default the run's.

    Raises:
      CheckpointError: when there is no checkpoint, or it does not hold the parameters of this model.
    """
    if config.model.vocab_size == 0:
        raise CheckpointError(f"{workdir / CONFIG_NAME} is not that of a started run: model.vocab_size is 0.")
    dtype = dtype or config.model.param_dtype
    if not config.lora.rank:
        return _restore(workdir, _shapes(dataclasses.replace(config.model, param_dtype=dtype)), shardings)
    # Adapters know the weights they adapt, so these are read as they were in training.
    shapes = _shapes(config.model)
    base = initial_params(config.train.init_from, config.model, shardings)
    adapters = jax.eval_shape(lambda: init_lora(jax.random.key(0), shapes, config.lora))
    adapters = _restore(workdir, adapters, None, weights_digest(base))

    def merged(base: Any, adapters: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(dtype), merge(base, adapters, config.lora))

    return jax.jit(merged, out_shardings=shardings)(base, jax.device_get(adapters))


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
    if run:
        return run_params(directory, run, shardings, config.param_dtype)
    return read_params(directory, config, shardings)


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
def _sums(params: Any) -> Any:
    """A number for each leaf that any change of its bits most likely changes, the same for any sharding."""

    def of_leaf(leaf: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
        place = jnp.arange(leaf.size, dtype=jnp.uint32).reshape(leaf.shape)
        return jnp.sum((bits ^ (place * jnp.uint32(2654435761))) * (2 * place + 1), dtype=jnp.uint32)

    return jax.tree.map(of_leaf, params)


def weights_digest(params: Any) -> str:
    """A hash of a pytree of weights, of at most 4 bytes each."""
    numbers = jax.device_get(jax.tree.leaves(_sums(params)))
    return hashlib.sha256(b"".join(int(number).to_bytes(4, "little") for number in numbers)).hexdigest()


def check_base(about: dict[str, Any], base_digest: str, where: str) -> None:
    """Compares the weights that a checkpoint's adapters adapt.

    Raises:
      CheckpointError: when they were others.
    """
    if about.get("base_digest", "") != base_digest:
        raise CheckpointError(
            f"{where} adapts other weights than train.init_from now holds; restore those that training began with."
        )


def _restore(workdir: epath.Path, shapes: Any, shardings: Any, base_digest: str = "") -> Any:
    """The "params" item of the newest checkpoint that is not damaged."""
    directory = absolute(workdir) / CHECKPOINTS_NAME
    steps = finished_steps(directory)
    if not steps:
        raise CheckpointError(
            f"{directory} holds no finished checkpoint; train longer, or lower checkpoint.save_every."
        )
    step = next((step for step in reversed(steps) if not reported_damage(directory, step)), None)
    if step is None:
        raise CheckpointError(f"All checkpoints in {directory} are damaged.")
    where = f"Checkpoint {step} of {directory}"
    if shardings is None:
        first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: first, shapes)
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )
    try:
        saved = ocp.StandardCheckpointHandler().metadata(directory / str(step) / "params")
        check_shapes(saved, abstract, where)
        with ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(create=False)) as manager:
            if base_digest:
                about = manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore())).about
                check_base(about, base_digest, where)
            return manager.restore(step, args=ocp.args.Composite(params=ocp.args.StandardRestore(abstract))).params
    except CheckpointError:
        raise
    except (ValueError, KeyError, OSError, AttributeError) as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error


def check_shapes(saved: Any, wanted: Any, where: str) -> None:
    """Compares names and shapes before anything is read.

    Args:
      saved: what Orbax says of an item. wanted: a pytree of arrays or their shapes.
      where: how messages begin.

    Raises:
      CheckpointError: naming every parameter that is missing, misshapen or unknown.
    """

    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }

    there, needed = shapes(getattr(saved, "tree", saved)), shapes(wanted)
    problems = [f"{name} is missing (expected shape {shape})" for name, shape in needed.items() if name not in there]
    problems += [
        f"{name} has shape {there[name]}, not {shape}"
        for name, shape in needed.items()
        if name in there and there[name] != shape
    ]
    problems += [f"{name} is no part of the model" for name in there if name not in needed]
    if problems:
        raise CheckpointError(f"{where} does not match its config.json: {join_some(problems, 8)}.")
