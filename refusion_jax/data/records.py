"""From objects to examples: prompt and response pairs, conversations, and documents without a prompt."""

from collections.abc import Iterable, Mapping
from typing import Any

from refusion_jax.config import DataConfig
from refusion_jax.data.chat import shorten
from refusion_jax.data.conversations import Conversations
from refusion_jax.data.examples import DataError, Example, ReadCounts
from refusion_jax.data.readers import read_objects

# Names of prompt and response that "auto" knows.
PAIRS = (("query", "response"), ("prompt", "completion"))


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
            source="json",
            train_files=(path,),
            format="pairs",
            prompt_field=prompt_field,
            response_field=response_field,
        )
        more, count = read_entry(config, path)
        examples += more
        counts += count
    return examples, counts


def read_entry(
    config: DataConfig, entry: str, conversations: Conversations | None = None
) -> tuple[list[Example], ReadCounts]:
    """Reads the examples of one file or dataset, in order, as `config.source` and `config.format` say.

    Args:
      config: what objects hold.
      entry: what to read.
      conversations: how conversations become examples; by default in ChatML.

    Raises:
      DataError: when it cannot be read, or an object is not of the format; the message names file and place.
    """
    conversations = conversations or Conversations.of(config, None)
    examples = []
    read = empty_prompt = empty_response = 0
    for place, value in read_objects(config.source, entry):
        read += 1
        for example in to_examples(config, value, place, conversations):
            # A document has no prompt; everywhere else a blank one is a flaw of the data.
            if config.format != "text" and not example.prompt.strip():
                empty_prompt += 1
            elif not example.response.strip():
                empty_response += 1
            else:
                examples.append(example)
    return examples, ReadCounts(read, empty_prompt, empty_response)


def to_examples(config: DataConfig, value: Any, place: str, conversations: Conversations) -> list[Example]:
    """Returns the examples of one object of `config.format`.

    Args:
      config: format and field names.
      value: the object as read.
      place: where it was read, for messages.
      conversations: how conversations become examples.

    Raises:
      DataError: when it is no object of that format.
    """
    if config.format == "text":
        return [Example("", _string(value, config.text_field, place))]
    fields = _fields(config, value, place)
    if len(fields) == 1:
        return conversations.examples(_rows(_field(value, fields[0], place)), place)
    prompt, response = (_rows(_field(value, field, place)) for field in fields)
    if isinstance(prompt, list) and isinstance(response, list) and config.format == "auto":
        return conversations.examples(prompt + response, place, first=len(prompt))
    prompt, response = (_string(value, field, place) for field in fields)
    return [conversations.pair(prompt, response, place)]


def _fields(config: DataConfig, value: Any, place: str) -> tuple[str, ...]:
    """The fields that hold the example: one with a conversation, or two with prompt and response."""
    named = (config.prompt_field, config.response_field)
    if config.format != "auto":
        return named if config.format == "pairs" else (config.messages_field,)
    known = list(dict.fromkeys([named, (config.messages_field,), *PAIRS]))
    if isinstance(value, dict):
        for fields in known:
            if all(field in value for field in fields):
                return fields
        wanted = ", or ".join(" and ".join(map(repr, fields)) for fields in known)
        raise DataError(f"{place}: expected the fields {wanted}, but the fields there are: {_names(value)}.")
    raise DataError(f"{place}: expected a JSON object, but found {shorten(value)}.")


def _rows(value: Any) -> Any:
    """The value, or of a record of lists, as which TFDS gives a list of records, that list."""
    if isinstance(value, Mapping) and all(isinstance(column, list) for column in value.values()):
        return [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
    return value


def _names(value: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, value)) or "none"


def _field(value: Any, field: str, place: str) -> Any:
    if not isinstance(value, dict):
        raise DataError(f"{place}: expected a JSON object with the field {field!r}, but found {shorten(value)}.")
    if field not in value:
        raise DataError(f"{place}: expected the field {field!r}, but the fields there are: {_names(value)}.")
    return value[field]


def _string(value: Any, field: str, place: str) -> str:
    text = _field(value, field, place)
    if not isinstance(text, str):
        raise DataError(f"{place}: expected the field {field!r} to be a string, but found {shorten(text)}.")
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"{place}: expected the field {field!r} to be valid Unicode, but it has half a surrogate pair."
        raise DataError(message) from None
    return text
