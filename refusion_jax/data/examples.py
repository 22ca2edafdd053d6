"""Examples as text, the counts of reading them, and what is raised when they cannot be used."""

import dataclasses


class DataError(ValueError):
    """Data that cannot be used; the message says where it is, what was expected and what was found."""


@dataclasses.dataclass(frozen=True)
class Example:
    """One training pair as text. A document to learn whole has an empty prompt.

    Attributes:
      prompt: what the response follows.
      response: what is learnt; of a conversation the words of the assistant's turn.
      rendered: prompt and response as one text, by a chat template, to be tokenized as one; "" when prompt and response
        are tokenized by themselves.
      place: where it was read, for messages.
    """

    prompt: str
    response: str
    rendered: str = ""
    place: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True)
class ReadCounts:
    """What was found: objects `read`, and examples dropped for a blank prompt or, else, a blank response."""

    read: int = 0
    empty_prompt: int = 0
    empty_response: int = 0

    def __add__(self, other: "ReadCounts") -> "ReadCounts":
        return ReadCounts(*map(sum, zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))
