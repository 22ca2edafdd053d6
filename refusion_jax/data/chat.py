"""Conversations as text in the ChatML form that Qwen uses."""

from collections.abc import Mapping, Sequence

from refusion_jax.data.examples import DataError, Example

ROLES = ("system", "user", "assistant")


def render_messages(
    messages: Sequence[Mapping[str, str]], turns: str = "last", place: str = "messages"
) -> list[Example]:
    r"""Renders a conversation; the response is an assistant turn, the prompt everything before it.

    A turn before the response is `<|im_start|>role\ncontent<|im_end|>\n`, and the prompt ends with
    `<|im_start|>assistant\n`. The response is the turn's content alone, as EOS ends it; what follows it is left out.

    Args:
      messages: turns with "role" and "content". A system turn may only come first.
      turns: "last" makes the last assistant turn the response; "all" makes one example for each.
      place: where the conversation comes from, for messages.

    Raises:
      DataError: for a role that is unknown or out of place, or a conversation without an assistant turn.
    """
    examples, prompt = [], ""
    for number, turn in enumerate(messages, 1):
        role, content = turn["role"], turn["content"]
        if role not in ROLES:
            raise DataError(f"{place}, message {number}: the role is {role!r}, not one of {', '.join(ROLES)}.")
        if role == "system" and number > 1:
            raise DataError(f"{place}, message {number}: a system message must be the conversation's first.")
        if role == "assistant":
            examples.append(Example(f"{prompt}<|im_start|>assistant\n", content))
        prompt += f"<|im_start|>{role}\n{content}<|im_end|>\n"
    if not examples:
        raise DataError(f"{place}: none of the {len(messages)} messages is from the assistant.")
    return examples if turns == "all" else examples[-1:]
