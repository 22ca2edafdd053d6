"""What is raised for checkpoints that cannot be used, and how it shows what they hold."""

_MOST_CHARACTERS = 100


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names what is missing or misshapen."""


def shown(text: str) -> str:
    """A text from a file for a message, of a long one the beginning."""
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."
