"""Conversations: what they must be, and their text in the ChatML form that Qwen uses."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from refusion_jax.data.examples import DataError

ROLES = ("system", "user", "assistant", "tool")
# `render_chatml` for other programs.
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def check_messages(messages: Any, place: str = "messages") -> list[dict[str, Any]]:
    """Returns the turns of a conversation as plain JSON, without fields that are null.

    Args:
      messages: a list of objects, each with a "role" and a text "content". A system turn may only come first. Other
        fields, such as "reasoning_content", are for the chat template.
      place: where the conversation comes from, for messages.

    Raises:
      DataError: when it is no such list; the message says which turn is wrong, and what.
    """
    if not isinstance(messages, list | tuple):
        raise DataError(f"{place}: expected a list of messages, but found {shorten(messages)}.")
    if not messages:
        raise DataError(f"{place}: the list of messages is empty; a conversation has at least one.")
    return [_check_message(message, number, f"{place}, message {number}") for number, message in enumerate(messages, 1)]


def _check_message(message: Any, number: int, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"{place}: expected an object with a role and a content, but found {shorten(message)}.")
    for field in ("role", "content"):
        if field not in message:
            there = ", ".join(map(repr, message)) or "none"
            raise DataError(f"{place}: expected the field {field!r}, but the fields there are: {there}.")
        if not isinstance(message[field], str):
            found = shorten(message[field])
            raise DataError(f"{place}: expected the field {field!r} to be a string, but found {found}.")
    if message["role"] not in ROLES:
        raise DataError(f"{place}: the role is {shorten(message['role'])}, not one of {', '.join(ROLES)}.")
    if message["role"] == "system" and number > 1:
        raise DataError(f"{place}: a system message must be the conversation's first.")
    return {field: _plain(value, field, place) for field, value in message.items() if value is not None}


def _plain(value: Any, field: Any, place: str) -> Any:
    """The value itself where it is text, or a copy of plain JSON: a template can call methods of what it is given."""
    try:
        if type(value) is str:
            value.encode()
            return value
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
        return json.loads(text)
    except UnicodeEncodeError:
        problem = "valid Unicode, but it has half a surrogate pair"
    except (TypeError, ValueError, RecursionError):
        problem = f"JSON, but found {shorten(value)}"
    raise DataError(f"{place}: expected the field {field!r} to be {problem}.")


def shorten(value: Any) -> str:
    """A value as JSON for a message, of a long one the beginning."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def render_chatml(messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
    r"""Returns a conversation as text: each turn is `<|im_start|>role\ncontent<|im_end|>\n`.

    Args:
      messages: turns that `check_messages` has returned.
      add_generation_prompt: whether to end with `<|im_start|>assistant\n`.

    Raises:
      DataError: for a tool's turn, for which a chat template is needed.
    """
    for number, message in enumerate(messages, 1):
        if message["role"] == "tool":
            raise DataError(
                f"Message {number} is from a tool, but the tokenizer has no chat template that says how to write it."
            )
    turns = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
    return "".join(turns) + ("<|im_start|>assistant\n" if add_generation_prompt else "")
