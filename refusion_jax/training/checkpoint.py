"""A run's Orbax checkpoints: everything it needs to go on as if nothing had happened.

    params      what is trained; decoding reads this alone
    rest        the step and the optimizer's state
    about       JSON: step, configuration, tokenizer and what the data was; the batch of a step and its random draws
                follow from these alone
    files.json  size and checksum of every file, written once the checkpoint is whole

One whose files are not what `files.json` says is damaged: it is moved to `damaged/` and the newest whole one is used.
"""

import base64
import contextlib
import dataclasses
import errno
import operator
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import multihost
from orbax.checkpoint.checkpoint_managers import preservation_policy

from refusion_jax.config import LESS_IS_BETTER, CheckpointConfig, ModelConfig, join_some
from refusion_jax.huggingface import CheckpointError
from refusion_jax.training.integrity import (
    absolute,
    seal_all,
    set_aside,
    set_damaged_aside,
    warn,
)
from refusion_jax.training.restoring import check_base, check_shapes
from refusion_jax.training.run_directory import CHECKPOINTS_NAME, completed, differences
from refusion_jax.training.state import TrainState

DAMAGED_NAME = "damaged"


@dataclasses.dataclass(frozen=True)
class About:
    """What a checkpoint says of itself, besides its step; `base_digest` is that of the weights that adapters adapt."""

    config: dict[str, Any]
    data_fingerprint: str
    tokenizer: dict[str, bytes]
    base_digest: str = ""


def about_item(about: About, step: int) -> dict[str, Any]:
    """The "about" item of a checkpoint, plain JSON."""
    files = {name: base64.b64encode(content).decode() for name, content in about.tokenizer.items()}
    return dataclasses.asdict(about) | {"step": step, "tokenizer": files}


class Checkpoints:
    """The checkpoints of a run. Saving happens in the background until `close`.

    Args:
      workdir: the run directory.
      config: which checkpoints stay.
      about: what every checkpoint of this run says of itself.
    """

    def __init__(self, workdir: epath.Path, config: CheckpointConfig, about: About):
        self._config, self._about = config, about
        self._directory = absolute(workdir) / CHECKPOINTS_NAME
        self._damaged = self._directory.parent / DAMAGED_NAME
        self._sealing: threading.Thread | None = None
        self._saving = False
        set_damaged_aside(self._directory, self._damaged)
        policies: list[Any] = [preservation_policy.LatestN(config.keep)]
        if config.keep_every:
            policies.append(preservation_policy.EveryNSteps(config.keep_every))
        if config.keep_best:
            best = preservation_policy.BestN(
                get_metric_fn=operator.itemgetter(config.best_metric),
                reverse=config.best_metric in LESS_IS_BETTER,
                n=config.keep_best,
                keep_checkpoints_without_metrics=False,
            )
            policies.append(best)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
            enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(barrier_sync_fn=_wait_for_others),
        )
        with writing(self._directory):
            self._manager = ocp.CheckpointManager(self._directory, options=options)

    def save(self, state: TrainState, metrics: dict[str, float] | None = None) -> None:
        """Saves a state under its step; a step that is saved already stays as it is.

        Args:
          state: what to save.
          metrics: the evaluation of this very step, if there was one.

        Raises:
          CheckpointError: when it, or the one before, cannot be written; earlier ones are whole.
        """
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        with writing(self._directory):
            self._manager.wait_until_finished()
            self._seal_in_background()
            items = {
                "params": ocp.args.StandardSave(state.params),
                "rest": ocp.args.StandardSave(_rest(state)),
                "about": ocp.args.JsonSave(about_item(self._about, step)),
            }
            best = self._config.best_metric
            known = {best: metrics[best]} if self._config.keep_best and metrics and best in metrics else None
            self._manager.save(step, args=ocp.args.Composite(**items), metrics=known)
            self._saving = True

    def check(self) -> None:
        """Raises what went wrong in the background.

        Raises:
          CheckpointError: when a checkpoint could not be written.
        """
        if self._saving and not self._manager.is_saving_in_progress():
            self._saving = False
            with writing(self._directory):
                self._manager.wait_until_finished()

    def restore(self, state: TrainState) -> TrainState:
        """The newest saved state, placed like `state`; `state` itself when there is none.

        Raises:
          CheckpointError: when the checkpoint is of another model or of other data, or when none can be read.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps:
            where = f"Checkpoint {step} of {self._directory}"
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, (state.params, _rest(state)))
            arguments = dict(zip(("params", "rest"), map(ocp.args.StandardRestore, abstract), strict=True))
            try:
                about = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore())).about
                self._check_model(about, where)
                for item, wanted in zip(arguments, abstract, strict=True):
                    saved = ocp.StandardCheckpointHandler().metadata(self._directory / str(step) / item)
                    check_shapes(saved, wanted, where)
                restored = self._manager.restore(step, args=ocp.args.Composite(**arguments))
            except CheckpointError:
                raise
            except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
                if jax.process_count() > 1:  # what others have read of it nobody knows
                    raise CheckpointError(f"{where} cannot be read: {error}; move it away to use an older.") from error
                warn(f"{where} cannot be read ({_first_line(error)}); trying the one before.")
                continue
            self._check_data(about, where)
            check_base(about, self._about.base_digest, where)
            for skipped in steps[: steps.index(step)]:
                set_aside(self._directory, self._damaged, skipped)
            self._manager.reload()
            return state.replace(params=restored.params, **restored.rest)
        if steps:
            raise CheckpointError(f"None of the checkpoints in {self._directory} can be read; move them away to begin.")
        return state

    def _check_model(self, about: dict[str, Any], where: str) -> None:
        saved = completed(ModelConfig, about["config"]["model"])
        different = differences(saved, self._about.config["model"], "model")
        if different:
            raise CheckpointError(f"{where} is of another architecture: {join_some(different, 3)}.")

    def _check_data(self, about: dict[str, Any], where: str) -> None:
        same = about["data_fingerprint"] == self._about.data_fingerprint
        if not (same or self._config.accept_changed_data):
            raise CheckpointError(
                f"{where} was trained on other data: a file, the tokenizer or a setting that makes tokens has changed "
                "since; restore what changed, or set checkpoint.accept_changed_data to go on with what is there."
            )

    def _seal_in_background(self) -> None:
        if self._sealing is not None:
            self._sealing.join()
        if jax.process_index() == 0:
            self._sealing = threading.Thread(target=seal_all, args=(self._directory,), daemon=True)
            self._sealing.start()

    def close(self) -> None:
        """Waits until everything is on disk.

        Raises:
          CheckpointError: when it cannot be written.
        """
        try:
            with writing(self._directory):
                self._manager.wait_until_finished()
                self._seal_in_background()
                if self._sealing is not None:
                    self._sealing.join()
        finally:
            # Closing waits for what was saved, and would raise the same again.
            with contextlib.suppress(Exception):
                self._manager.close()


def _wait_for_others(*, key: str, timeout_ms: int) -> None:
    """Waits for the other processes, but not on the way out of an error: they may wait for what has failed here."""
    if sys.exc_info()[1] is None:
        multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def _rest(state: TrainState) -> dict[str, Any]:
    """What a checkpoint saves besides the parameters."""
    names = [field.name for field in dataclasses.fields(state) if field.name not in ("params", "base")]
    return {name: getattr(state, name) for name in names}


def _first_line(error: BaseException) -> str:
    text, full = str(error), os.strerror(errno.ENOSPC)
    return full if full in text else text.strip().split("\n")[0][:200] or type(error).__name__


@contextlib.contextmanager
def writing(directory: epath.Path) -> Iterator[None]:
    """Says in one sentence what keeps a checkpoint from being written."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"A checkpoint cannot be written to {directory}: {_first_line(error)}.") from error
