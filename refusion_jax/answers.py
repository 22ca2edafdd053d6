"""The answers of a long run: written as they finish, in a file that an interrupted run continues.

Beside the file lies its journal, `FILE.journal`: JSON lines, of which the first says what run the file belongs to and
each other one describes the next answer in the file:

    {"identity": {"checkpoint": "/runs/demo", "slot_size": 8, ...}}
    {"line": 7, "bytes": 154, "crc32": 2774391437, "tokens": 64, "error": false}
    {"complete": true}

An answer goes to the file first and to the journal second, so a process that is killed in between leaves bytes that the
journal does not know; they are cut off. Checksums tell whether the file is the one that the journal describes. The one
time both change, when answers are put into input order, the file goes first: a journal whose answers, sorted by line,
are what the file holds is as good as one in the file's own order.

Where several processes answer one input, the first has the file itself and process 3, say, `FILE.p3` with a journal of
its own, until the first process gathers them.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import zlib
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from refusion_jax.config import ConfigError
from refusion_jax.files import replace_file

UNANSWERED, ANSWERED, FAILED = range(3)

_COMPLETE = {"complete": True}
_KINDS = {"line": int, "bytes": int, "crc32": int, "tokens": int, "error": bool}


class Index:
    """What a file of answers holds, in the file's order; some thirty bytes per answer.

    Attributes:
      lines, sizes, checksums, tokens: of each answer the number of its input line, its bytes, their CRC-32, and the
        response tokens in it.
      states: by line number UNANSWERED, ANSWERED or FAILED; lines beyond its end are unanswered.
      total_size: bytes of all answers.
    """

    def __init__(self) -> None:
        self.lines, self.sizes, self.checksums, self.tokens = array("Q"), array("Q"), array("I"), array("Q")
        self.states = bytearray()
        self.total_size = 0

    def add(self, line: int, size: int, checksum: int, tokens: int, failed: bool) -> None:
        """Adds the next answer."""
        for column, value in zip(self._columns, (line, size, checksum, tokens), strict=True):
            column.append(value)
        self.states.extend(bytes(max(line + 1 - len(self.states), 0)))
        self.states[line] = FAILED if failed else ANSWERED
        self.total_size += size

    @property
    def _columns(self) -> tuple[array, array, array, array]:
        return self.lines, self.sizes, self.checksums, self.tokens

    def __len__(self) -> int:
        return len(self.lines)

    def state(self, line: int) -> int:
        """UNANSWERED, ANSWERED or FAILED."""
        return self.states[line] if line < len(self.states) else UNANSWERED

    @property
    def failed(self) -> int:
        """How many lines have an error for an answer."""
        return self.states.count(FAILED)

    def entries(self) -> Iterator[tuple[int, int, int, int, bool]]:
        """The arguments of every `add`, in order."""
        for line, size, checksum, tokens in zip(*self._columns, strict=True):
            yield line, size, checksum, tokens, self.states[line] == FAILED

    def pick(self, places: np.ndarray) -> "Index":
        """The answers at these places of this index."""
        picked = Index()
        for column, ours in zip(picked._columns, self._columns, strict=True):
            column.frombytes(np.asarray(ours)[places].tobytes())
        lines = np.asarray(picked.lines)
        states = np.zeros(len(self.states), np.uint8)
        states[lines] = np.frombuffer(self.states, np.uint8)[lines]
        picked.states = bytearray(states.tobytes())
        picked.total_size = sum(picked.sizes)
        return picked

    def by_line(self) -> np.ndarray:
        """The places of this index in the order of input lines."""
        return np.argsort(np.asarray(self.lines), kind="stable")


def journal_path(path: Path) -> Path:
    """Where the journal of an answer file lies."""
    return path.with_name(path.name + ".journal")


def part_path(path: Path, process: int) -> Path:
    """Where a process other than the first writes its share."""
    return path.with_name(f"{path.name}.p{process}")


def find_parts(path: Path) -> list[Path]:
    """The shares of other processes that lie beside an answer file, known by their journals."""
    pattern = re.compile(re.escape(path.name) + r"\.p(\d+)\.journal")
    matches = [match for name in os.listdir(path.parent) if (match := pattern.fullmatch(name))]
    return [part_path(path, process) for process in sorted(int(match[1]) for match in matches)]


def remove_part(path: Path) -> None:
    """Removes a share that was gathered."""
    path.unlink(missing_ok=True)  # first: a journal without answers is nothing, answers without one are in the way
    journal_path(path).unlink(missing_ok=True)


def check_free(path: Path, flag: str) -> None:
    """Refuses a path that no run could write or continue, whatever its settings; for before any work is spent on it.

    Raises:
      ConfigError: when `path` is no file, its directory cannot be written to, or it holds something without a journal.
    """
    where = f"{flag} {path} cannot be written: "
    if path.is_dir():
        raise ConfigError(where + "it is a directory.")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(where + f"{path.parent} is not a directory one can write to.")
    if path.exists() and not path.is_file():
        raise ConfigError(where + "it is not a regular file, which alone can be continued after an interruption.")
    if _size(path) and not journal_path(path).exists():
        raise _no_journal(path, flag)


def read_answers(path: Path, identity: Mapping[str, Any], flag: str) -> Index:
    """What an answer file and its journal hold, both left as they are; other processes may be writing.

    Raises:
      ConfigError: when they belong to another run (naming the difference) or do not belong together.
    """
    with _explained(path, flag, "read"):
        return _read(path, identity, flag).index


class Answers:
    """An answer file, open to be continued; use it in a `with` block.

    Opening it cuts off what an interrupted run left unfinished. A missing or empty file is started.

    Args:
      path: the file.
      identity: JSON object of all that its answers depend on.
      flag: what messages call it.

    Attributes:
      index: what it holds.

    Raises:
      ConfigError: from here and every method, when the file cannot be written; here also when it is another run's
        (naming the difference), was changed by something else, or is being written by another process.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], flag: str = "--output"):
        self.path, self._identity, self._flag = path, identity, flag
        check_free(path, flag)
        with self._explained():
            self._journal = self._open_journal()
            try:
                found = _read(path, identity, flag)
                self.index, self._is_complete = found.index, found.is_complete
                if not self.index:
                    self._journal.truncate(0)
                    self._write_header(self._journal)
                elif found.is_sorted:
                    self._sort_journal()
                else:
                    self._journal.truncate(found.journal_end)
                self._data = path.open("ab", buffering=0)
                self._data.truncate(self.index.total_size)
            except BaseException:
                self._journal.close()
                raise

    def _explained(self) -> contextlib.AbstractContextManager[None]:
        return _explained(self.path, self._flag)

    def _open_journal(self) -> Any:
        journal = journal_path(self.path).open("ab", buffering=0)
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            journal.close()
            raise ConfigError(
                f"{self._flag} {self.path} is being written by another run; wait for it, stop it, or choose another "
                f"{self._flag}."
            ) from None
        except OSError:
            pass  # a file system without locks
        return journal

    def _write_header(self, file: Any) -> None:
        _write(file, _json_line({"identity": self._identity}))

    def __enter__(self) -> "Answers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def append(self, line: int, answer: bytes, tokens: int, failed: bool = False) -> None:
        """Writes the answer to an input line: one or more whole lines of text."""
        entry = (line, len(answer), zlib.crc32(answer), tokens, failed)
        self._is_complete = False
        with self._explained():
            _write(self._data, answer)
            _write(self._journal, _entry_line(entry))
        self.index.add(*entry)

    def gather(self, part: Path) -> None:
        """Appends the answers of another process's share, except those that are here already."""
        index = read_answers(part, self._identity, self._flag)
        if not index:
            return
        with self._explained(), part.open("rb") as file:
            for line, size, _, tokens, failed in index.entries():
                answer = file.read(size)
                if self.index.state(line) == UNANSWERED:
                    self.append(line, answer, tokens, failed)

    def sort(self) -> None:
        """Puts the answers into the order of their input lines. Killed at any point, it has happened or not."""
        order = self.index.by_line()
        if np.array_equal(order, np.arange(len(order))):
            return
        sizes = np.asarray(self.index.sizes)
        starts = np.cumsum(sizes) - sizes
        with self._explained():
            with self.path.open("rb") as source, replace_file(self.path) as target:
                for start, size in zip(starts[order].tolist(), sizes[order].tolist(), strict=True):
                    source.seek(start)
                    target.write(source.read(size))
            self._data.close()
            self._data = self.path.open("ab", buffering=0)
            self._sort_journal()

    def _sort_journal(self) -> None:
        """Follows the file into the order of input lines."""
        self.index, self._is_complete = self.index.pick(self.index.by_line()), False
        with replace_file(journal_path(self.path)) as file:
            self._write_header(file)
            file.writelines(map(_entry_line, self.index.entries()))
        self._journal.close()
        self._journal = self._open_journal()

    def complete(self) -> None:
        """Marks the file as having an answer to every line."""
        with self._explained():
            os.fsync(self._data.fileno())
            if not self._is_complete:
                _write(self._journal, _json_line(_COMPLETE))
        self._is_complete = True

    def close(self) -> None:
        """Closes the file and cuts off half an answer that an interruption left."""
        if self._data.closed:
            return
        with contextlib.suppress(OSError):  # then the next run cuts it off
            self._data.truncate(self.index.total_size)
        self._data.close()
        self._journal.close()


@contextlib.contextmanager
def _explained(path: Path, flag: str, verb: str = "written") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be {verb}: {error.strerror or error}.") from error


def _write(file: Any, content: bytes) -> None:
    rest = memoryview(content)
    while rest:  # an unbuffered file may take less than all
        rest = rest[file.write(rest) :]


def _json_line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _entry_line(entry: tuple[int, int, int, int, bool]) -> bytes:
    return _json_line(dict(zip(_KINDS, entry, strict=True)))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _no_journal(path: Path, flag: str) -> ConfigError:
    return ConfigError(
        f"{flag} {path} was not written by an unfinished run, or its journal {journal_path(path).name} is gone; delete "
        f"it, or choose another {flag}."
    )


def _damaged(path: Path, flag: str) -> ConfigError:
    return ConfigError(
        f"{flag} {path} cannot be continued: its journal {journal_path(path).name} is damaged; delete both to "
        "start over."
    )


@dataclasses.dataclass(frozen=True)
class _Found:
    """What is there: where the part of the journal ends that `index` describes, and whether the file has the answers
    sorted by line, unlike the journal."""

    index: Index
    journal_end: int = 0
    is_sorted: bool = False
    is_complete: bool = False


def _read(path: Path, identity: Mapping[str, Any], flag: str) -> _Found:
    index, ends = Index(), array("Q")
    if not _size(path):
        return _Found(index)
    objects = _journal_objects(path, flag)
    journal_end, header = next(objects, (0, None))
    if not isinstance(header, dict) or not isinstance(header.get("identity"), dict):
        raise _no_journal(path, flag)
    _check_identity(header["identity"], identity, path, flag)
    is_complete = False
    for journal_end, value in objects:
        is_complete = value == _COMPLETE
        if not is_complete:
            if not isinstance(value, dict) or {name: type(each) for name, each in value.items()} != _KINDS:
                raise _damaged(path, flag)
            try:
                index.add(*(value[name] for name in _KINDS))
            except OverflowError:
                raise _damaged(path, flag) from None
            ends.append(journal_end)
    with path.open("rb") as file:
        count, differs = _count_matching(file, index)
        if not differs and count == len(index):
            return _Found(index, journal_end, False, is_complete)
        if not differs:
            # What the journal knows beyond the file's end was lost with the machine.
            return _Found(index.pick(np.arange(count)), ends[count - 1])
        by_line = index.pick(index.by_line())
        if os.fstat(file.fileno()).st_size == index.total_size and _count_matching(file, by_line) == (
            len(index),
            False,
        ):
            return _Found(index, journal_end, True, is_complete)
    raise ConfigError(
        f"{flag} {path} was changed after it was written, at its answer {count + 1}; restore it, or delete it and "
        f"{journal_path(path).name} to start over."
    )


def _count_matching(file: BinaryIO, index: Index) -> tuple[int, bool]:
    """(how many answers the file has as the index says, whether something else follows rather than nothing)."""
    file.seek(0)
    for count, (size, checksum) in enumerate(zip(index.sizes, index.checksums, strict=True)):
        answer = file.read(size)
        if len(answer) < size:
            return count, count == 0 and len(answer) > 0  # nothing vouches for a file that has not one whole answer
        if zlib.crc32(answer) != checksum:
            return count, True
    return len(index), False


def _check_identity(theirs: Mapping[str, Any], ours: Mapping[str, Any], path: Path, flag: str) -> None:
    for name in [*ours, *theirs]:
        if theirs.get(name) != ours.get(name):
            if name in ("input_bytes", "input_sha256"):
                raise ConfigError(
                    f"{flag} {path} belongs to another input, or the input was changed since ({name} "
                    f"{_shortened(theirs.get(name))}, not {_shortened(ours.get(name))}); delete it and "
                    f"{journal_path(path).name}, or choose another {flag}."
                )
            raise ConfigError(
                f"{flag} {path} belongs to a run with {name} {_shortened(theirs.get(name))}, not "
                f"{_shortened(ours.get(name))}; delete it and {journal_path(path).name}, or choose another {flag}."
            )


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _journal_objects(path: Path, flag: str) -> Iterator[tuple[int, Any]]:
    """(offset of its end, value) of every whole line of the journal; the last may be cut short."""
    journal, end = journal_path(path), 0
    if not journal.exists():
        return
    with journal.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                yield end, json.loads(line)
            except ValueError:
                raise _damaged(path, flag) from None
