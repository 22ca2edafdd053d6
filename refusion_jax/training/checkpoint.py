"""Run directories and their Orbax checkpoints.

A run directory holds `config.json`, `metrics.jsonl`, `summary.json`, `checkpoints/` and `tokenizer/`. A checkpoint
keeps parameters and the rest of the training state as two items, so that decoding reads the parameters alone.
"""

import json
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from refusion_jax.config import CheckpointConfig, Config, ConfigError, ModelConfig, from_dict, join_some, to_dict
from refusion_jax.files import replace_file
from refusion_jax.huggingface import CheckpointError
from refusion_jax.modeling import Transformer
from refusion_jax.training.state import TrainState

CONFIG_NAME = "config.json"
CHECKPOINTS_NAME = "checkpoints"
TOKENIZER_NAME = "tokenizer"


class WorkdirError(ValueError):
    """A work directory that cannot be used for this run."""


def write_json(path: Path, value: Any) -> None:
    """Writes `value` under a temporary name, then renames: a reader never meets half a file."""
    with replace_file(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


def claim_workdir(workdir: Path, config: Config) -> None:
    """Creates the run directory and saves the resolved configuration in it, or checks the one it holds.

    Raises:
      WorkdirError: when it holds a different configuration (naming the fields), or is not a directory one can write to.
    """
    path = workdir / CONFIG_NAME
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_json(path, to_dict(config))
            return
        saved = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise WorkdirError(f"{workdir} cannot be used as a work directory: {error}.") from error
    differences = _differences(saved, to_dict(config))
    if differences:
        shown = join_some(differences, 3)
        raise WorkdirError(
            f"{workdir} already holds a run with another configuration ({shown}): choose another --workdir, or remove "
            "it."
        )


def _differences(saved: Any, wanted: Any, name: str = "") -> list[str]:
    if isinstance(saved, dict) and isinstance(wanted, dict):
        fields = sorted(saved.keys() | wanted.keys())
        return [
            difference
            for field in fields
            for difference in _differences(saved.get(field), wanted.get(field), f"{name}.{field}" if name else field)
        ]
    return [] if saved == wanted else [f"{name} is {saved!r} there and {wanted!r} here"]


def read_run_config(workdir: Path) -> Config:
    """The resolved configuration of a run directory.

    Raises:
      CheckpointError: when it is missing or cannot be read.
    """
    path = workdir / CONFIG_NAME
    try:
        return from_dict(Config, json.loads(path.read_text()))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); a run directory has one.") from error
    except (json.JSONDecodeError, ConfigError) as error:
        raise CheckpointError(f"{path} is not the configuration of a run: {error}") from error


class Checkpoints:
    """The checkpoints of a run; the newest `keep` stay. Saving happens in the background until `close`."""

    def __init__(self, workdir: Path, config: CheckpointConfig):
        options = ocp.CheckpointManagerOptions(max_to_keep=config.keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager((workdir / CHECKPOINTS_NAME).absolute(), options=options)

    def save(self, state: TrainState) -> None:
        """Saves a state under its step."""
        rest = {"step": state.step, "opt_state": state.opt_state}
        items = ocp.args.Composite(params=ocp.args.StandardSave(state.params), rest=ocp.args.StandardSave(rest))
        self._manager.save(int(state.step), args=items)

    def restore(self, state: TrainState) -> TrainState:
        """The newest saved state, placed like `state`; `state` itself when there is none.

        Raises:
          CheckpointError: when the checkpoint does not fit the state.
        """
        step = self._manager.latest_step()
        if step is None:
            return state
        rest = {"step": state.step, "opt_state": state.opt_state}
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, (state.params, rest))
        items = ocp.args.Composite(
            params=ocp.args.StandardRestore(abstract[0]), rest=ocp.args.StandardRestore(abstract[1])
        )
        try:
            restored = self._manager.restore(step, args=items)
        except (ValueError, KeyError, OSError) as error:
            raise CheckpointError(f"Checkpoint {step} of {self._manager.directory} cannot be read: {error}") from error
        return TrainState(restored.rest["step"], restored.params, restored.rest["opt_state"])

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._manager.close()


def restore_params(workdir: Path, config: ModelConfig) -> Any:
    """The parameters of a run's newest checkpoint, on the default device.

    Raises:
      CheckpointError: when there is no checkpoint, or it does not hold the parameters of this model.
    """
    if config.vocab_size == 0:
        raise CheckpointError(f"{workdir / CONFIG_NAME} is not that of a started run: model.vocab_size is 0.")
    directory = (workdir / CHECKPOINTS_NAME).absolute()
    nothing = f"{directory} holds no finished checkpoint; train longer, or lower checkpoint.save_every."
    if not directory.is_dir():
        raise CheckpointError(nothing)
    options = ocp.CheckpointManagerOptions(create=False)
    with ocp.CheckpointManager(directory, options=options) as manager:
        step = manager.latest_step()
        if step is None:
            raise CheckpointError(nothing)
        tokens = jnp.zeros((1, 1), jnp.int32)
        shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens, tokens)["params"]
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), nn.unbox(shapes)
        )
        try:
            saved = ocp.StandardCheckpointHandler().metadata(directory / str(step) / "params")
            _check_shapes(saved, abstract, f"Checkpoint {step} of {directory}")
            return manager.restore(step, args=ocp.args.Composite(params=ocp.args.StandardRestore(abstract))).params
        except CheckpointError:
            raise
        except (ValueError, KeyError, OSError, AttributeError) as error:
            raise CheckpointError(f"Checkpoint {step} of {directory} cannot be read: {error}") from error


def _check_shapes(saved: Any, wanted: Any, where: str) -> None:
    """Compares names and shapes before anything is read.

    Raises:
      CheckpointError: naming every parameter that is missing, misshapen or unknown.
    """

    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        return {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}

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
