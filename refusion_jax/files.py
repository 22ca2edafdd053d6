"""Files that are whole or not there, long files read in bounded memory, and what tells files apart cheaply."""

import contextlib
import hashlib
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from etils import epath

from refusion_jax.config import ConfigError

# Of larger files a fingerprint reads this many blocks: weights trained on differ nearly everywhere.
_SAMPLED_BLOCKS = 64
_BLOCK = 16 * 1024


def is_remote(path: os.PathLike[str] | str) -> bool:
    """Whether a path is in object storage, gs://bucket/name, rather than on disk."""
    return "://" in os.fspath(path)


@contextlib.contextmanager
def replace_file(path: os.PathLike[str]) -> Iterator[BinaryIO]:
    """Writes a file under a temporary name in the same directory and renames it: readers never meet half a file.

    The bytes are on disk before the name is. When the block raises, the temporary file goes and `path` stays as it was.
    A path such as gs://bucket/name is written in one piece, which there appears as a whole.

    Raises:
      OSError: when it cannot be written.
    """
    if is_remote(path):
        buffer = io.BytesIO()
        yield buffer
        epath.Path(path).write_bytes(buffer.getvalue())
        return
    target = Path(os.path.realpath(path))  # a link stays a link
    temporary = target.with_name(target.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_lines(file: BinaryIO, limit: int, digest: Any = None) -> Iterator[tuple[int, bytes | None]]:
    """Yields (number from 1, line) of every line, which ends at a line feed alone.

    Args:
      file: opened for reading bytes.
      limit: most bytes of a line, its line feed not counted; of a longer one None is yielded, and never more of it
        is in memory.
      digest: a hash that is updated with all bytes.
    """
    number = 0
    while line := file.readline(limit + 1):
        number += 1
        rest, is_long = line, len(line) > limit and not line.endswith(b"\n")
        while rest:
            if digest is not None:
                digest.update(rest)
            rest = file.readline(limit + 1) if not rest.endswith(b"\n") else b""
        yield number, None if is_long else line


def fingerprint(paths: Iterable[Path], root: Path, whole: int = _SAMPLED_BLOCKS * _BLOCK) -> str:
    """A hash over files below `root`: their names, their sizes, and their content, of large files a sample.

    Args:
      paths: files; those of `etils.epath` may lie on `gs://`.
      root: directory that all are in.
      whole: most bytes of a file that is read whole.

    Raises:
      OSError: when one cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted(paths):
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            digest.update(f"{path.relative_to(root).as_posix()}\n{size}\n".encode("utf-8", "surrogateescape"))
            if size <= max(whole, _SAMPLED_BLOCKS * _BLOCK):
                while block := file.read(64 * _BLOCK):
                    digest.update(block)
                continue
            for number in range(_SAMPLED_BLOCKS):
                file.seek((size - _BLOCK) * number // (_SAMPLED_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def write_json(path: os.PathLike[str], value: Any) -> None:
    """Writes `value` under a temporary name, then renames: a reader never meets half a file."""
    with replace_file(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


@contextlib.contextmanager
def writing_out() -> Iterator[None]:
    """Says in one sentence why standard output cannot be written; that nobody reads it any more is no fault.

    Raises:
      ConfigError: when it is closed, or its disk is full.
    """
    if sys.stdout is None:
        raise ConfigError("Standard output is closed, so that there is nowhere to write to.")
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"Standard output cannot be written ({error.strerror}).") from error
