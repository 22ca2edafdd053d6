"""From objects to examples: prompt and response pairs, conversations, and documents without a prompt."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from refusion_jax.config import DataConfig
from refusion_jax.data.chat import render_messages
from refusion_jax.data.examples import DataError, Example, ReadCounts
from refusion_jax.data.readers import read_objects


def read_examples(paths: Iterable[str], prompt_field: str, response_field: str) -> tuple[list[Example], ReadCounts]:
    """Reads every prompt and response pair of JSON files, in order; see `read_entry`.

    A file whose first character is `[` is one JSON list of objects; any other holds one JSON object per line, blank
    lines ignored. Both may be gzipped; contents decide, not names. Objects whose prompt or response is empty or only
    white space have nothing to learn from: they are dropped and counted.

    Args:
      paths: files to read, on disk or `gs://`.
      prompt_field: name of the string field that holds the prompt.
      response_field: name of the string field that holds the response.

    Returns:
      The examples, and the counts of what was read and dropped.

    Raises:
      DataError: for a file that cannot be read, malformed JSON, or an object without the two string fields; the
        message names the file and the line (of JSON lines) or item (of a JSON list, from 1).
    """
    examples, counts = [], ReadCounts()
    for path in paths:
        config = DataConfig(
            source="json", train_files=(path,), prompt_field=prompt_field, response_field=response_field
        )
        more, count = read_entry(config, path)
        examples += more
        counts += count
    return examples, counts


def read_entry(config: DataConfig, entry: str) -> tuple[list[Example], ReadCounts]:
    """Reads the examples of one file or dataset, in order, as `config.source` and `config.format` say.

    Raises:
      DataError: when it cannot be read, or an object is not of the format; the message names file and place.
    """
    examples = []
    read = empty_prompt = empty_response = 0
    for place, value in read_objects(config.source, entry):
        read += 1
        for example in to_examples(config, value, place):
            # A document has no prompt; everywhere else a blank one is a flaw of the data.
            if config.format != "text" and not example.prompt.strip():
                empty_prompt += 1
            elif not example.response.strip():
                empty_response += 1
            else:
                examples.append(example)
    return examples, ReadCounts(read, empty_prompt, empty_response)


def to_examples(config: DataConfig, value: Any, place: str) -> list[Example]:
    """Returns the examples of one object of `config.format`.

    Args:
      config: format and field names.
      value: the object as read.
      place: where it was read, for messages.

    Raises:
      DataError: when it is no object of that format.
    """
    if config.format == "text":
        return [Example("", _string(value, config.text_field, place))]
    if config.format == "pairs":
        return [Example(_string(value, config.prompt_field, place), _string(value, config.response_field, place))]
    return render_messages(_messages(value, config.messages_field, place), config.turns, place)


def _messages(value: Any, field: str, place: str) -> list[dict[str, str]]:
    """Returns the turns in a field, each with a role and a content, both text."""
    turns = _field(value, field, place)
    if isinstance(turns, Mapping) and all(isinstance(column, list) for column in turns.values()):
        # TFDS gives the columns of a sequence of records.
        turns = [dict(zip(turns, row, strict=True)) for row in zip(*turns.values(), strict=True)]
    if not isinstance(turns, list):
        raise DataError(f"{place}: expected the field {field!r} to be a list of messages, but found {_shorten(turns)}.")
    return [
        {name: _string(turn, name, f"{place}, message {number}") for name in ("role", "content")}
        for number, turn in enumerate(turns, 1)
    ]


def _field(value: Any, field: str, place: str) -> Any:
    if not isinstance(value, dict):
        raise DataError(f"{place}: expected a JSON object with the field {field!r}, but found {_shorten(value)}.")
    if field not in value:
        there = ", ".join(map(repr, value)) or "none"
        raise DataError(f"{place}: expected the field {field!r}, but the fields there are: {there}.")
    return value[field]


def _string(value: Any, field: str, place: str) -> str:
    text = _field(value, field, place)
    if not isinstance(text, str):
        raise DataError(f"{place}: expected the field {field!r} to be a string, but found {_shorten(text)}.")
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"{place}: expected the field {field!r} to be valid Unicode, but it has half a surrogate pair."
        raise DataError(message) from None
    return text


def _shorten(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."
