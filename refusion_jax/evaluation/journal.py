"""What an evaluation has computed so far, on disk, so that an interrupted one goes on.

Each process appends to a file of its own, `answers.jsonl` the first and `answers.jsonl.p3`, say, process 3, and reads
those of all at the start: the number of processes may differ from one start to the next. Records are found by their
key, a hash of the request.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from refusion_jax import answers
from refusion_jax.config import ConfigError
from refusion_jax.processes import Process

FILE_NAME = "answers.jsonl"


def request_key(*parts: Any) -> str:
    """A hash of what a request consists of: plain JSON."""
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()


class Journal:
    """The records of an evaluation; use it in a `with` block.

    Args:
      directory: where the files lie; made if it is not there.
      identity: JSON object of all that records depend on besides the requests.
      process: which of the processes this is.

    Attributes:
      records: what is known, by key.

    Raises:
      ConfigError: when the directory cannot be written to, or its files are another evaluation's, naming what differs.
    """

    def __init__(self, directory: Path, identity: Mapping[str, Any], process: Process):
        if directory.exists() and not directory.is_dir():
            raise ConfigError(f"--output {directory} cannot be written: it is a file; name a directory.")
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--output {directory} cannot be written: {error.strerror}.") from error
        path = directory / FILE_NAME
        own = answers.part_path(path, process.id) if process.id else path
        self._answers = answers.Answers(own, identity)
        self.records: dict[str, dict[str, Any]] = {}
        self._read(own, self._answers.index)
        for other in {path, *answers.find_parts(path)} - {own}:
            self._read(other, answers.read_answers(other, identity, "--output"))

    def _read(self, path: Path, index: answers.Index) -> None:
        if not index:
            return
        with path.open("rb") as file:
            for line in file.read(index.total_size).splitlines():  # another process may have written more since
                record = json.loads(line)
                self.records[record.pop("key")] = record

    def add(self, key: str, record: Mapping[str, Any], tokens: int) -> None:
        """Writes down the record of a request.

        Raises:
          ConfigError: when it cannot be written.
        """
        line = json.dumps({"key": key, **record}, ensure_ascii=False).encode("utf-8", "surrogatepass")
        self._answers.append(len(self._answers.index), line + b"\n", tokens)
        self.records[key] = dict(record)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._answers.close()
