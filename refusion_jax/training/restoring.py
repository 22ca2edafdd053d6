"""The "params" item of a run's newest checkpoint, whole or parameter by parameter."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict

from refusion_jax.config import join_some
from refusion_jax.huggingface import CheckpointError
from refusion_jax.training.integrity import absolute, finished_steps, reported_damage
from refusion_jax.training.run_directory import CHECKPOINTS_NAME


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint.

    Attributes:
      directory: of all checkpoints of the run.
      step: its step.
    """

    directory: epath.Path
    step: int

    @property
    def where(self) -> str:
        """How messages about it begin."""
        return f"Checkpoint {self.step} of {self.directory}"

    @property
    def params(self) -> epath.Path:
        """Where its parameters are."""
        return self.directory / str(self.step) / "params"

    def about(self) -> dict[str, Any]:
        """What it says of itself.

        Raises:
          CheckpointError: when that cannot be read.
        """
        with _reading(self), _manager(self.directory) as manager:
            return manager.restore(self.step, args=ocp.args.Composite(about=ocp.args.JsonRestore())).about


def newest(workdir: epath.Path) -> Saved:
    """The newest checkpoint of a run that is not damaged.

    Raises:
      CheckpointError: when there is none.
    """
    directory = absolute(workdir) / CHECKPOINTS_NAME
    steps = finished_steps(directory)
    if not steps:
        raise CheckpointError(
            f"{directory} holds no finished checkpoint; train longer, or lower checkpoint.save_every."
        )
    step = next((step for step in reversed(steps) if not reported_damage(directory, step)), None)
    if step is None:
        raise CheckpointError(f"All checkpoints in {directory} are damaged.")
    return Saved(directory, step)


def restore(saved: Saved, shapes: Any, shardings: Any = None) -> Any:
    """The parameters of a checkpoint.

    Args:
      saved: the checkpoint.
      shapes: theirs, and the types to convert them to.
      shardings: where each goes, a pytree like them; by default all to the first device.

    Raises:
      CheckpointError: when it holds others, or cannot be read.
    """
    with _reading(saved):
        arguments = ocp.args.StandardRestore(_checked(saved, shapes, shardings))
        with _manager(saved.directory) as manager:
            return manager.restore(saved.step, args=ocp.args.Composite(params=arguments)).params


def restore_leaves(saved: Saved, shapes: Any, shardings: Any = None) -> Iterator[tuple[tuple[str, ...], jax.Array]]:
    """Each parameter of `restore` with its path, read when it is asked for, the largest first.

    Args and what it raises, at the first parameter: those of `restore`.
    """
    with _reading(saved):
        wanted = flatten_dict(_checked(saved, shapes, shardings))
    handler = ocp.PyTreeCheckpointHandler()
    for path, leaf in sorted(wanted.items(), key=lambda item: -item[1].size):
        one = unflatten_dict({path: leaf})
        arguments = ocp.args.PyTreeRestore(one, ocp.checkpoint_utils.construct_restore_args(one), partial_restore=True)
        with _reading(saved):
            restored = handler.restore(saved.params, args=arguments)
        yield path, flatten_dict(restored)[path]


def _checked(saved: Saved, shapes: Any, shardings: Any) -> Any:
    """What to restore: shapes, types and places."""
    if shardings is None:
        first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: first, shapes)
    wanted = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )
    check_shapes(ocp.StandardCheckpointHandler().metadata(saved.params), wanted, saved.where)
    return wanted


def _manager(directory: epath.Path) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(create=False))


@contextlib.contextmanager
def _reading(saved: Saved) -> Iterator[None]:
    """Says in one sentence what keeps a checkpoint from being read."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, KeyError, OSError, AttributeError) as error:
        raise CheckpointError(f"{saved.where} cannot be read: {error}") from error


def check_base(about: dict[str, Any], base_digest: str, where: str) -> None:
    """Compares the weights that a checkpoint's adapters adapt.

    Raises:
      CheckpointError: when they were others.
    """
    if about.get("base_digest", "") != base_digest:
        raise CheckpointError(
            f"{where} adapts other weights than train.init_from now holds; restore those that training began with."
        )


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
