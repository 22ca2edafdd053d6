"""Checkpoints that are whole: a list of every file's size and checksum, and what becomes of those that are damaged."""

import contextlib
import itertools
import json
import os
import sys
import zlib
from collections.abc import Iterator

import jax
from etils import epath
from jax.experimental import multihost_utils

from refusion_jax.files import is_remote, write_json

FILES_NAME = "files.json"
_BLOCK = 1 << 20


def absolute(workdir: os.PathLike[str]) -> epath.Path:
    """What Orbax wants; a path in object storage is absolute already."""
    return epath.Path(workdir if is_remote(workdir) else os.path.abspath(workdir))


def finished_steps(directory: epath.Path) -> list[int]:
    """The steps of finished checkpoints."""
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal()) if directory.exists() else []


def _contents(checkpoint: epath.Path) -> Iterator[tuple[str, epath.Path]]:
    """(name, path) of every file of a checkpoint but its list of files."""
    folders = [checkpoint]
    while folders:
        for path in folders.pop().iterdir():
            name = str(path)[len(str(checkpoint)) + 1 :]
            if path.is_dir():
                folders.append(path)
            elif name != FILES_NAME:
                yield name, path


def _checksum(path: epath.Path) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return size, checksum


def seal_all(directory: epath.Path) -> None:
    """Writes the list of files of every checkpoint that has none; all of them are finished."""
    for step in finished_steps(directory):
        checkpoint = directory / str(step)
        # One that is deleted meanwhile needs no list; one that cannot be written goes without.
        with contextlib.suppress(OSError):
            if not (checkpoint / FILES_NAME).exists():
                write_json(checkpoint / FILES_NAME, {name: _checksum(path) for name, path in _contents(checkpoint)})


def _damage(checkpoint: epath.Path) -> str | None:
    """What is wrong with a checkpoint's files, if anything is; one without a list of files is believed."""
    try:
        listed = json.loads((checkpoint / FILES_NAME).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return f"{FILES_NAME} cannot be read"
    unlisted = sorted(name for name, _ in _contents(checkpoint) if name not in listed)
    if unlisted:
        return f"its file {unlisted[0]} is not listed"
    for name, (size, checksum) in listed.items():
        try:
            found = _checksum(checkpoint / name)
        except OSError:
            return f"its file {name} is missing"
        if found[0] != size:
            return f"its file {name} has {found[0]:,} bytes, not {size:,}"
        if found[1] != checksum:
            return f"its file {name} has changed"
    return None


def reported_damage(directory: epath.Path, step: int) -> bool:
    """Whether a checkpoint is damaged, which is said."""
    problem = _damage(directory / str(step))
    if problem is not None:
        warn(f"Checkpoint {step} of {directory} is damaged ({problem}) and is passed over.")
    return problem is not None


def set_damaged_aside(directory: epath.Path, damaged: epath.Path) -> None:
    """Moves damaged checkpoints away, newest first until a whole one is met, and says so."""
    if jax.process_index() == 0:
        for step in reversed(finished_steps(directory)):
            if not reported_damage(directory, step):
                break
            set_aside(directory, damaged, step)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("refusion_jax.checkpoints")


def set_aside(directory: epath.Path, damaged: epath.Path, step: int) -> None:
    """Moves a checkpoint to `damaged`, under its step and, where that is taken, a number."""
    if jax.process_index() == 0:
        damaged.mkdir(parents=True, exist_ok=True)
        taken = {path.name for path in damaged.iterdir()}
        names = (f"{step}" if number == 0 else f"{step}-{number}" for number in itertools.count())
        (directory / str(step)).rename(damaged / next(name for name in names if name not in taken))


def warn(line: str) -> None:
    """Prints a warning, on process 0 alone."""
    if jax.process_index() == 0:
        print(f"Warning: {line}", file=sys.stderr, flush=True)
