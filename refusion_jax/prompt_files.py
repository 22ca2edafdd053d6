"""Reading a JSON-lines file of prompts in bounded memory: what each line asks for, and what all of them need."""

import dataclasses
import hashlib
import itertools
import json
import os
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import numpy as np

from refusion_jax.api import Model, StreamRequest, prepare
from refusion_jax.config import ConfigError, DecodeConfig, from_dict, to_dict
from refusion_jax.data.chat import shorten
from refusion_jax.decoding.batching import Bounds
from refusion_jax.files import read_lines
from refusion_jax.methods import METHOD_SETTINGS, SLOT_SETTINGS, Method
from refusion_jax.processes import Process, Signals
from refusion_jax.prompts import Prepared, conversation

MAX_LINE_BYTES = 1 << 20
SEED_LIMIT = 2**31


def open_input(path: Path) -> BinaryIO:
    """Opens a file of prompts.

    Raises:
      ConfigError: when it cannot be read, or not twice.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"--input {path} is not a regular file; it is read twice, so save it as one.")
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"--input {path} cannot be read: {error.strerror}.") from error


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of input: its object with "error" where it cannot be answered, and the request where it can."""

    number: int
    record: dict[str, Any]
    request: StreamRequest | None = None


class _Refused(Exception):
    """A line that cannot be answered, and what is known of its object."""

    def __init__(self, error: str, record: Mapping[str, Any]):
        super().__init__(error)
        self.record = record


@dataclasses.dataclass(frozen=True)
class Chat:
    """What is done with conversations.

    Attributes:
      prompts: whether a prompt is one too, of a single message.
      system: content of a system message that is put first where there is none.
      enable_thinking: what the chat template is told, unless the line says otherwise.
    """

    prompts: bool = False
    system: str | None = None
    enable_thinking: bool = True

    def of(self, messages: Any, enable_thinking: Any) -> dict[str, Any]:
        """The prompt of a conversation.

        Raises:
          ConfigError: when it is none that can be answered.
        """
        return conversation(messages, self.system, enable_thinking)

    def of_text(self, text: str, enable_thinking: Any) -> dict[str, Any]:
        """The prompt of a conversation whose only message, or the one after the system's, is the user's."""
        return self.of([{"role": "user", "content": text}], enable_thinking)


@dataclasses.dataclass(frozen=True)
class Reader:
    """Turns lines into requests."""

    model: Model
    config: DecodeConfig
    seed: int
    prompt_field: str
    prefix: str | None
    chat: Chat
    signals: Signals
    method: Method

    def lines(
        self, file: BinaryIO, digest: Any = None, wanted: Callable[[int], bool] = lambda _: True
    ) -> Iterator[Line]:
        """The wanted lines that are not blank."""
        file.seek(0)
        for number, line in read_lines(file, MAX_LINE_BYTES, digest):
            self.signals.check()
            if (line is None or line.strip()) and wanted(number):
                yield self.line(number, line)

    def line(self, number: int, line: bytes | None) -> Line:
        """Reads one line; None is one too long to be read."""
        try:
            record, request = self._read(number, line)
        except _Refused as refused:
            return Line(number, {**refused.record, "line": number, "error": str(refused)})
        return Line(number, record, request)

    def _read(self, number: int, line: bytes | None) -> tuple[dict[str, Any], StreamRequest]:
        if line is None:
            raise _Refused(f"The line has more than {MAX_LINE_BYTES} bytes; shorten it.", {})
        try:
            record = json.loads(line.decode("utf-8-sig"))
            # Escapes can spell half a surrogate pair, and Python reads NaN and 1e400, which nobody else does.
            json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError:
            raise _Refused("A text has half a surrogate pair, which is no Unicode.", {}) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise _Refused(f"Not JSON in UTF-8: {error}.", {}) from None
        except (ValueError, RecursionError):
            raise _Refused("A number is not finite or too long, or objects are nested too deeply.", {}) from None
        if not isinstance(record, dict):
            raise _Refused(f"A JSON object was expected, not {shorten(record)}.", {})
        record = self._without_stale(record)
        try:
            config, seed = self._config(record)
            prepared = prepare(self.model, self._prompt(record), config, self.prefix, self.method)
        except ConfigError as error:
            raise _Refused(str(error), record) from None
        # The first line's index is that of the first prompt of a list.
        return record, StreamRequest(number - 1, prepared, config, seed)

    def _without_stale(self, record: dict[str, Any]) -> dict[str, Any]:
        """An output fed in again must not carry over what was said of it then; other fields may share a name."""
        stale = {"response", "finish_reason"}
        for together in ({"line", "error"}, {"responses", "finish_reasons"}, {"segments", "holes"}):
            stale |= together if together <= record.keys() else set()
        return {name: value for name, value in record.items() if name not in stale - {self.prompt_field, "segments"}}

    def is_template(self, record: Mapping[str, Any]) -> bool:
        """Whether an object has segments rather than a prompt."""
        return "segments" in record and self.prompt_field != "segments"

    def _prompt(self, record: Mapping[str, Any]) -> Any:
        field = self.prompt_field
        given = [name for name in dict.fromkeys((field, "segments", "messages")) if name in record]
        if not given:
            raise ConfigError(
                f"There is no {field!r} here, no 'messages' and no 'segments'; fields: {', '.join(record) or 'none'}."
            )
        if len(given) > 1:
            raise ConfigError(f"There are both {given[0]!r} and {given[1]!r}; give one of them.")
        if not self.chat.prompts and given[0] != "messages" and "enable_thinking" in record:
            raise ConfigError(
                f"'enable_thinking' is for conversations, not for {given[0]!r}; give 'messages' or --chat."
            )
        if self.is_template(record):
            if self.chat.prompts:
                raise ConfigError("'segments' are no conversation; give 'messages', or leave out --chat.")
            return {"segments": record["segments"]}
        prompt, thinking = record[given[0]], record.get("enable_thinking", self.chat.enable_thinking)
        if given[0] == "messages" and not (field == "messages" and _is_prompt(prompt)):
            return self.chat.of(prompt, thinking)
        if self.chat.prompts:
            if not isinstance(prompt, str):
                raise ConfigError(f"{field!r} must be text with --chat, the user's message; or give 'messages'.")
            return self.chat.of_text(prompt, thinking)
        if not _is_prompt(prompt):
            raise ConfigError(f"{field!r} must be text or a list of token IDs, which are whole numbers.")
        return prompt

    def _config(self, record: Mapping[str, Any]) -> tuple[DecodeConfig, int]:
        if "decode" not in record or self.prompt_field == "decode":
            return self.config, self.seed
        settings = record["decode"]
        if not isinstance(settings, dict):
            raise ConfigError(f"'decode' must be an object of settings, not {type(settings).__name__}.")
        seed = settings.get("seed", self.seed)
        if type(seed) is not int or not 0 <= seed < SEED_LIMIT:
            raise ConfigError(f"decode.seed is {seed!r}; it must be a whole number in [0, 2**31).")
        for name in ("method", *METHOD_SETTINGS):
            if name in settings:
                raise ConfigError(f"decode.{name} is about the method, one for all lines; give --{name} instead.")
        for name in SLOT_SETTINGS if self.method.name != "refusion" else ():
            if name in settings:
                raise ConfigError(
                    f"decode.{name} is for slots, which the method {self.method.name!r} does not have; leave it out."
                )
        changed = {name: value for name, value in settings.items() if name != "seed"}
        return from_dict(DecodeConfig, to_dict(self.config) | changed, "decode"), seed


def _is_prompt(value: Any) -> TypeGuard[str | list[int]]:
    return isinstance(value, str) or (isinstance(value, list) and all(type(token) is int for token in value))


@dataclasses.dataclass(frozen=True)
class Scan:
    """What a first reading of the input tells.

    Attributes:
      size, sha256: of the file.
      last: number of the last line that is not blank.
      share: how many that are not blank this process has.
      bounds: what the good ones ask for.
    """

    size: int
    sha256: str
    last: int
    share: int
    bounds: Bounds


def scan_file(file: BinaryIO, reader: Reader, process: Process) -> Scan:
    """Reads a file of prompts once through.

    Raises:
      ConfigError: when two lines have the same "id".
    """
    digest, bounds, ids = hashlib.sha256(), Bounds(), _Ids()
    last = share = 0
    for line in reader.lines(file, digest):
        last = line.number
        share += process.has(line.number)
        ids.add(line)
        if line.request is not None:
            assert isinstance(line.request.prompt, Prepared)
            bounds.include(line.request.prompt.layout, line.request.prompt.config)
    ids.check(file)
    return Scan(os.fstat(file.fileno()).st_size, digest.hexdigest(), last, share, bounds)


class _Ids:
    """Finds lines with the same "id", at sixteen bytes a line."""

    def __init__(self) -> None:
        self._hashes, self._lines = array("Q"), array("Q")

    def add(self, line: Line) -> None:
        """Notes the ID of a line, if it has one."""
        if line.record.get("id") is not None:
            digest = hashlib.blake2b(_canonical(line.record["id"]), digest_size=8).digest()
            self._hashes.append(int.from_bytes(digest, "little"))
            self._lines.append(line.number)

    def check(self, file: BinaryIO) -> None:
        """Refuses IDs that come twice.

        Raises:
          ConfigError: naming the first that does, and both lines.
        """
        hashes, lines = np.asarray(self._hashes), np.asarray(self._lines)
        order = np.argsort(hashes, kind="stable")
        same = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
        pairs = sorted((int(lines[order[i + 1]]), int(lines[order[i]])) for i in same)
        for second, first in pairs:
            found = _ids_at(file, {first, second})
            if _canonical(found[first]) == _canonical(found[second]):  # not just the same hash
                raise ConfigError(
                    f"--input {file.name} has the id {found[first]!r} twice, on lines {first} and {second}; give every "
                    "line an id of its own, or none."
                )


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _ids_at(file: BinaryIO, numbers: set[int]) -> dict[int, Any]:
    file.seek(0)
    lines = itertools.islice(read_lines(file, MAX_LINE_BYTES), max(numbers))
    return {n: json.loads(line.decode("utf-8-sig"))["id"] for n, line in lines if n in numbers and line is not None}
