"""Directories on disk: files of them that stay inside, JSON objects, and new ones that appear only when complete."""

import contextlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from refusion_jax.files import is_remote
from refusion_jax.huggingface.errors import CheckpointError

_MOST_REMOVALS, _REMOVAL_SECONDS = 20, 0.1


def on_disk(directory: os.PathLike[str] | str) -> Path:
    """`directory` as a path of this machine.

    Raises:
      CheckpointError: for one in object storage.
    """
    if is_remote(directory):
        raise CheckpointError(
            f"{os.fspath(directory)} is in object storage; copy the Hugging Face directory to a disk and give that."
        )
    return Path(directory)


def file_inside(directory: Path, name: str) -> Path:
    """The path of a directory's file, which need not exist.

    The files of a snapshot in the Hub's cache, models--ORG--NAME/snapshots/REVISION, are links into models--ORG--NAME.

    Raises:
      CheckpointError: for a name or a link that leads out of the directory.
    """
    root = directory.resolve()
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        root = root.parent.parent
    path = directory / name
    try:
        inside = path.resolve().is_relative_to(root)
    except (OSError, ValueError, RuntimeError) as error:  # a name with a null byte, a loop of links
        raise CheckpointError(f"{directory} names the file {name!r}, which cannot be found: {error}.") from error
    if not inside:
        raise CheckpointError(f"{path} leads out of {directory}; put the file itself there.")
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path} is not a file, but a directory or a device; put the file itself there.")
    return path


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
      CheckpointError: when it cannot be read, or is something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not JSON (line {error.lineno}): {error.msg}.") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    return values


@contextlib.contextmanager
def new_directory(path: os.PathLike[str] | str) -> Iterator[Path]:
    """Yields a temporary directory beside `path`, which gets that name when the block has ended well.

    Raises:
      CheckpointError: when `path` exists and is not an empty directory, or cannot be written.
    """
    target = on_disk(path)
    check_new(target)
    blocking = next((parent for parent in target.absolute().parents if parent.exists()), None)
    if blocking is not None and not blocking.is_dir():
        raise CheckpointError(f"{target} cannot be written: {blocking} is not a directory.")
    try:
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".tmp", dir=target.absolute().parent))
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written ({error.strerror}).") from error
    try:
        temporary.chmod(0o755)
        yield temporary
        os.replace(temporary, target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written ({error.strerror or error}).") from error
    finally:
        _remove(temporary)


def _remove(directory: Path) -> None:
    """Removes a directory that threads of a write which failed may still write to."""
    for _ in range(_MOST_REMOVALS):
        if not directory.exists():
            return
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(_REMOVAL_SECONDS)


def check_new(target: Path) -> None:
    """Refuses a directory that holds something.

    Raises:
      CheckpointError: when `target` exists and is not an empty directory.
    """
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target} exists already and is no empty directory; name a new one, or remove it.")
