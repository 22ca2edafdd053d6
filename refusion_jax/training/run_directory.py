"""A run directory: what is in it, and whose it is.

It holds `config.json`, `metrics.jsonl`, `summary.json`, `checkpoints/` and `tokenizer/`, and may be on disk or, as
gs://bucket/name, in object storage.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from typing import Any

from etils import epath

from refusion_jax.config import Config, ConfigError, from_dict, join_some, to_dict
from refusion_jax.data.tokenizers import Tokenizer
from refusion_jax.files import is_remote, write_json
from refusion_jax.huggingface import CheckpointError

CONFIG_NAME = "config.json"
CHECKPOINTS_NAME = "checkpoints"
TOKENIZER_NAME = "tokenizer"

# What may differ between the parts of a run that is continued: none of it changes what is computed.
FREE_SETTINGS = (
    "mesh", "checkpoint", "decode", "data.read_threads", "data.workers", "data.prefetch", "data.cache_dir",
    "model.remat", "model.scan_unroll", "model.attention_chunk", "model.attention", "train.log_every",
    "train.eval_every", "train.eval_draws", "train.eval_decode_examples", "train.profile_steps", "train.max_skipped",
    "train.slow_step_factor",
)  # fmt: skip


class WorkdirError(ValueError):
    """A work directory that cannot be used for this run."""


def claim_workdir(workdir: epath.Path, config: Config) -> None:
    """Creates the run directory and saves the resolved configuration in it, or checks the one it holds.

    What changes nothing that is computed (`FREE_SETTINGS`) may differ, and is saved anew.

    Raises:
      WorkdirError: when it holds a different configuration (naming the fields), or is not a directory one can write to.
    """
    saved, wanted = check_workdir(workdir, config), to_dict(config)
    with _writing(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        if saved != wanted:
            write_json(workdir / CONFIG_NAME, wanted)


def save_tokenizer(workdir: epath.Path, tokenizer: Tokenizer) -> None:
    """Saves the run's tokenizer, unless it is there.

    Raises:
      WorkdirError: when it cannot be written.
    """
    directory = workdir / TOKENIZER_NAME
    with _writing(workdir):
        paths = {directory / name: content for name, content in tokenizer.files.items()}
        if not all(path.exists() and path.read_bytes() == content for path, content in paths.items()):
            tokenizer.save(directory)


@contextlib.contextmanager
def _writing(workdir: epath.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WorkdirError(f"{workdir} cannot be written to: {error.strerror or error}.") from error


def lock_workdir(workdir: epath.Path) -> contextlib.AbstractContextManager[Any]:
    """Keeps other runs out of a directory on disk until the result is closed or the process ends, however it ends.

    Raises:
      WorkdirError: when another run has it.
    """
    if is_remote(workdir):
        return contextlib.nullcontext()
    directory = os.open(workdir, os.O_RDONLY)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, directory)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise WorkdirError(
                f"Another process is training in {workdir}; wait until it has ended, or choose another --workdir."
            ) from error
        except OSError:  # a file system without locks
            pass
        return stack.pop_all()


def check_workdir(workdir: epath.Path, config: Config) -> Any:
    """Refuses a directory that holds another run.

    Returns:
      the plain configuration it holds, or None.

    Raises:
      WorkdirError: when it holds a different configuration (naming the fields), or one that cannot be read.
    """
    path = workdir / CONFIG_NAME
    try:
        saved = completed(Config, json.loads(path.read_text())) if path.exists() else None
    except (OSError, ValueError) as error:
        raise WorkdirError(
            f"{path} cannot be read ({error}), so it is not known what run {workdir} holds; choose another --workdir, "
            "or remove it."
        ) from error
    different = [] if saved is None else differences(saved, to_dict(config))
    if different:
        shown = join_some(different, 3)
        raise WorkdirError(
            f"{workdir} already holds a run with another configuration ({shown}): choose another --workdir, or remove "
            "it."
        )
    return saved


def completed(cls: type, saved: Any) -> Any:
    """A saved plain configuration with the defaults of the fields that its version did not have yet."""
    try:
        return to_dict(from_dict(cls, saved))
    except (ConfigError, AttributeError, TypeError):  # not one that this version knows
        return saved


def differences(saved: Any, wanted: Any, name: str = "") -> list[str]:
    """Says of every setting that is not the same, but for `FREE_SETTINGS`, what it is in two plain configurations."""
    if name in FREE_SETTINGS:
        return []
    if isinstance(saved, dict) and isinstance(wanted, dict):
        fields = sorted(saved.keys() | wanted.keys())
        return [
            difference
            for field in fields
            for difference in differences(saved.get(field), wanted.get(field), f"{name}.{field}" if name else field)
        ]
    return [] if saved == wanted else [f"{name} is {saved!r} there and {wanted!r} here"]


def read_run_config(workdir: epath.Path) -> Config:
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
