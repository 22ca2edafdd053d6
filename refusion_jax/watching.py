"""Being told what happens while responses are decoded, and ending them early."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from refusion_jax.config import ConfigError
from refusion_jax.decoding import Answer, Job, Stream
from refusion_jax.decoding.batching import NO_LIMIT
from refusion_jax.decoding.events import Beginning, PrefixEvent, SlotEvent, beginnings, new_slots
from refusion_jax.decoding.generation import Row
from refusion_jax.prompts import brief, is_whole
from refusion_jax.responses import Detokenizer


@dataclasses.dataclass(frozen=True)
class Watch:
    """What to be told while responses are decoded. A callback that returns False cancels the response it is told of.

    Attributes:
      on_slot: called with every committed slot; they do not come left to right.
      on_prefix: called when more of a response's beginning is final.
      every: forwards between two looks at the device; responses with stop texts are looked at as often.
    """

    on_slot: Callable[[SlotEvent], bool | None] | None = None
    on_prefix: Callable[[PrefixEvent], bool | None] | None = None
    every: int = 8

    def __post_init__(self) -> None:
        for name in ("on_slot", "on_prefix"):
            callback = getattr(self, name)
            if callback is not None and not callable(callback):
                raise ConfigError(f"{name} is {brief(callback)}; give a function.")
        if not is_whole(self.every) or self.every < 1:
            raise ConfigError(f"every is {self.every!r}; look at least every forward, 1.")


class Observer:
    """Tells callbacks what happened since the last look, and ends responses that are cancelled or met a stop text.

    Args:
      stream: what decodes.
      watch: the callbacks.
      eos_token_ids: the model's.
      detokenizer: None without a tokenizer.
    """

    def __init__(self, stream: Stream, watch: Watch, eos_token_ids: tuple[int, ...], detokenizer: Detokenizer | None):
        self._stream, self._watch = stream, watch
        self._eos_token_ids, self._detokenizer = eos_token_ids, detokenizer
        self._seen: dict[tuple[int, int], Any] = {}
        self._prefixes: dict[tuple[int, int], int] = {}
        self._listening = watch.on_slot is not None or watch.on_prefix is not None

    def most_iterations(self) -> int:
        """How far the compiled loop may go before the next look."""
        return self._watch.every if self._listening or self._stream.has_stops else NO_LIMIT

    def __call__(self, job: Job, row: Row) -> None:
        goes_on = True
        if self._watch.on_slot is not None:
            seen = self._seen.get(job.name, np.zeros_like(row.committed))
            for slot in new_slots(job, row, seen):
                if self._detokenizer is not None:
                    slot = dataclasses.replace(slot, text=self._detokenizer.decode_part(slot.tokens))
                goes_on &= _goes_on(self._watch.on_slot(slot))
            self._seen[job.name] = row.committed
        if self._watch.on_prefix is not None or job.config.stop:
            holes = beginnings(job, row, self._eos_token_ids)
            if self._watch.on_prefix is not None:
                goes_on &= self._tell_prefix(self._watch.on_prefix, job, holes)
            # A stop text ends its hole only, so there is nothing to gain from noticing it early in a template.
            if job.layout.num_holes == 1 and self._has_stopped(job, holes):
                self._stream.cancel(job.name, "stop")
        if not goes_on:
            self._stream.cancel(job.name)

    def _tell_prefix(
        self, on_prefix: Callable[[PrefixEvent], bool | None], job: Job, holes: Sequence[Beginning]
    ) -> bool:
        """Tells of a beginning that has grown; returns whether the response goes on."""
        shown: list[tuple[list[int], str]] = [(hole.tokens, "") for hole in holes]
        if self._detokenizer is not None:
            shown = [self._detokenizer.show(hole, job.config.stop) for hole in holes]
        tokens = [token for each, _ in shown for token in each]
        if len(tokens) <= self._prefixes.get(job.name, 0):
            return True
        self._prefixes[job.name] = len(tokens)
        text = None if self._detokenizer is None else "".join(text for _, text in shown)
        return _goes_on(on_prefix(PrefixEvent(*job.name, tokens, text)))

    def _has_stopped(self, job: Job, holes: Sequence[Beginning]) -> bool:
        return self._detokenizer is not None and self._detokenizer.cut(holes[0], job.config.stop) is not None

    def forget(self, answer: Answer) -> None:
        """Drops what was remembered of a finished response."""
        self._seen.pop((answer.index, answer.sample), None)
        self._prefixes.pop((answer.index, answer.sample), None)


def _goes_on(said: Any) -> bool:
    return bool(said) or not isinstance(said, bool | np.bool_)  # NumPy's False counts, an empty text does not
