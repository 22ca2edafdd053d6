"""Reading prompt and response pairs from JSON lists and JSON lines."""

import dataclasses
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

_GZIP_MAGIC = b"\x1f\x8b"


class DataError(ValueError):
    """Data that cannot be used; the message says where it is, what was expected and what was found."""


@dataclasses.dataclass(frozen=True)
class Example:
    """One training pair as text."""

    prompt: str
    response: str


@dataclasses.dataclass(frozen=True)
class ReadCounts:
    """What `read_examples` found: objects `read`, and those dropped for a blank prompt or, else, a blank response."""

    read: int = 0
    empty_prompt: int = 0
    empty_response: int = 0


def read_examples(paths: Iterable[str], prompt_field: str, response_field: str) -> tuple[list[Example], ReadCounts]:
    """Reads every example of `paths`, in order.

    A file whose first character is `[` is one JSON list of objects; any other holds one JSON object per line, blank
    lines ignored. Both may be gzipped; contents decide, not names. Objects whose prompt or response is empty or only
    white space have nothing to learn from: they are dropped and counted.

    Args:
      paths: files to read.
      prompt_field: name of the string field that holds the prompt.
      response_field: name of the string field that holds the response.

    Returns:
      The examples, and the counts of what was read and dropped.

    Raises:
      DataError: for a file that cannot be read, malformed JSON, or an object without the two string fields; the
        message names the file and the line (of JSON lines) or item (of a JSON list, from 1).
    """
    examples = []
    read = empty_prompt = empty_response = 0
    for path in paths:
        for place, value in _objects(path):
            prompt, response = (_string(value, field, place) for field in (prompt_field, response_field))
            read += 1
            if not prompt.strip():
                empty_prompt += 1
            elif not response.strip():
                empty_response += 1
            else:
                examples.append(Example(prompt, response))
    return examples, ReadCounts(read, empty_prompt, empty_response)


def _objects(path: str) -> Iterator[tuple[str, Any]]:
    """Yields (place for messages, parsed value) for every entry of one file."""
    text = _read_text(path)
    if text.lstrip()[:1] == "[":
        for number, value in enumerate(_parse(text, path, first_line=1), 1):
            yield f"{path}, item {number}", value
        return
    # Not str.splitlines: JSON strings may hold its other line separators, such as U+2028, unescaped.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{path}, line {number}", _parse(line, path, first_line=number)


def _read_text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            content = file.read()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected UTF-8 text, but the byte at offset {error.start} is not.") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: the file cannot be read ({error}).") from None


def _parse(text: str, path: str, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise DataError(f"{path}, line {line}: expected JSON, but at column {error.colno}: {error.msg}.") from None
    except RecursionError:
        raise DataError(f"{path}, line {first_line}: expected JSON, but it is nested too deeply.") from None


def _string(value: Any, field: str, place: str) -> str:
    if not isinstance(value, dict):
        raise DataError(f"{place}: expected a JSON object with the field {field!r}, but found {_shortened(value)}.")
    if field not in value:
        there = ", ".join(map(repr, value)) or "none"
        raise DataError(f"{place}: expected the field {field!r}, but the fields there are: {there}.")
    text = value[field]
    if not isinstance(text, str):
        raise DataError(f"{place}: expected the field {field!r} to be a string, but found {_shortened(text)}.")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise DataError(f"{place}: expected the field {field!r} to be valid Unicode, but it has half a surrogate pair.")
    return text


def _shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
