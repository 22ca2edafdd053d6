"""What can be told of a response before it is finished: its slots, as they are committed, and its beginning."""

import dataclasses

import numpy as np

from refusion_jax.decoding.batching import Job
from refusion_jax.decoding.generation import Row


@dataclasses.dataclass(frozen=True)
class SlotEvent:
    """A slot was committed; slots do not come left to right.

    Attributes:
      index, sample: the prompt's index and which of its samples this is.
      hole, start: the hole the slot is in and where in that hole it begins, in tokens.
      tokens: its tokens, fewer than the slot size where an EOS cuts it.
      text: decoded, without characters of which only a part is in this slot; None without a tokenizer.
    """

    index: int
    sample: int
    hole: int
    start: int
    tokens: list[int]
    text: str | None = None


@dataclasses.dataclass(frozen=True)
class PrefixEvent:
    """More of a response's beginning will not change any more.

    Attributes:
      index, sample: the prompt's index and which of its samples this is.
      tokens: the response's tokens from its start, through the first EOS or the end of a stop text at most; holes
        joined.
      text: decoded, without EOS and stop text; None without a tokenizer. It begins with the text of the event before.
        Only what is sure is there: no part of a character, and no end that a stop text may begin with. That of the last
        event is complete: the answer's `hole_texts` joined.
    """

    index: int
    sample: int
    tokens: list[int]
    text: str | None = None


def new_slots(job: Job, row: Row, seen: np.ndarray) -> list[SlotEvent]:
    """The slots that have been committed since `seen` (capacity,) bool, in position order."""
    layout = job.layout
    offsets = np.flatnonzero(row.committed & ~seen)
    events = []
    for start in np.unique(layout.slot_starts[offsets]):
        tokens = row.tokens[offsets[layout.slot_starts[offsets] == start]].tolist()
        hole = int(layout.holes[start])
        in_hole = int(start - np.argmax(layout.holes == hole))
        events.append(SlotEvent(job.index, job.sample, hole, in_hole, tokens))
    return events


@dataclasses.dataclass(frozen=True)
class Beginning:
    """The leading tokens of a hole that are final, through its first EOS, and whether they are all it will have."""

    tokens: list[int]
    is_finished: bool


def beginnings(job: Job, row: Row, eos_ids: tuple[int, ...]) -> list[Beginning]:
    """What is final of a response from its start: its holes up to the first that is still to be filled."""
    found = []
    for offsets in job.layout.by_hole(np.arange(job.layout.response_length)):
        gaps = np.flatnonzero(~row.committed[offsets])
        leading = row.tokens[offsets][: gaps[0] if len(gaps) else len(offsets)]
        ends = np.flatnonzero(np.isin(leading, eos_ids))
        tokens = leading[: ends[0] + 1 if len(ends) else len(leading)].tolist()
        found.append(Beginning(tokens, not len(gaps) or len(ends) > 0))
        if not found[-1].is_finished:
            break
    return found
