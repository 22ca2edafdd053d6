"""Answering the requests of an evaluation: journaled, timed, shared among processes, on one batch that stays full."""

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from refusion_jax.api import Model, StreamRequest, generate_stream, prepare
from refusion_jax.config import DecodeConfig
from refusion_jax.decoding import Rules, Statistics
from refusion_jax.decoding.batching import Bounds
from refusion_jax.evaluation.journal import Journal
from refusion_jax.likelihood import log_likelihood
from refusion_jax.methods import Method
from refusion_jax.processes import ALONE, Process, Signals, wait_for_all
from refusion_jax.progress import Progress

Record = dict[str, Any]

# Requests scored between two looks at signals and the journal.
_SCORED_AT_ONCE = 64
_GATHERINGS = itertools.count()


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request: a prompt to continue, or with `response` a response to score.

    Attributes:
      key: names it in the journal.
      prompt, response: token IDs.
      cut_tokens: tokens that the prompt lost at its beginning, for lack of room.
      unknown_tokens: tokens that stand for characters the tokenizer does not know.
    """

    key: str
    prompt: list[int]
    response: list[int] = dataclasses.field(default_factory=list)
    cut_tokens: int = 0
    unknown_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Runner:
    """How requests are answered, whatever they are.

    Attributes:
      scored: the model as `log_likelihood` takes it, which may have another objective.
      model, method, allow_objective, rules, seed, batch_size: as of `generate`.
      estimate, num_draws: as of `log_likelihood`.
      journal: what is known already, and where more goes; None to forget it.
      process: which of the processes that share the requests this is.
      signals: those that interrupt between two answers.
    """

    model: Model
    scored: Model
    method: Method
    allow_objective: str | None = None
    rules: Rules = dataclasses.field(default_factory=Rules)
    seed: int = 0
    batch_size: int | str = 32
    estimate: str | None = None
    num_draws: int = 128
    journal: Journal | None = None
    process: Process = ALONE
    signals: Signals = dataclasses.field(default_factory=Signals)

    def generate(
        self, asks: Sequence[Ask], config: DecodeConfig, on_answer: Callable[[int, Record], None] = lambda *_: None
    ) -> list[Record]:
        """The answers to prompts that share their settings: what `speed.generation_speed` reads, and "text".

        Args:
          asks: the prompts; a prompt's place among them is what its random draws depend on.
          config: how they are decoded.
          on_answer: called with the place and record of each as it is answered.

        Raises:
          ConfigError: for a prompt that cannot be decoded, or when the journal cannot be written.
        """

        def answer(places: list[int], statistics: Statistics) -> Iterator[tuple[int, Record]]:
            prepared = {place: prepare(self.model, asks[place].prompt, config, method=self.method) for place in places}
            started, begin, taken = time.time(), time.perf_counter(), {}

            def requests() -> Iterator[StreamRequest]:
                for place in places:
                    taken[place] = time.perf_counter() - statistics.compile_seconds
                    yield StreamRequest(place, prepared[place], config, self.seed)

            for found in generate_stream(
                self.model,
                requests(),
                batch_size=self.batch_size,
                most_requests=len(places),
                rules=self.rules,
                statistics=statistics,
                method=self.method,
                allow_objective=self.allow_objective,
                **dataclasses.asdict(Bounds.of((each.layout, each.config) for each in prepared.values())),
            ):
                now = time.perf_counter()
                yield (
                    found.index,
                    {
                        "text": found.text,
                        "tokens": len(found.tokens),
                        "forwards": found.forwards,
                        "latency": now - statistics.compile_seconds - taken[found.index],
                        "finish_reason": found.finish_reason,
                        "started": started,
                        "elapsed": now - begin,
                        "compiling": statistics.compile_seconds,
                    },
                )

        return self._run(asks, answer, on_answer)

    def score(
        self, asks: Sequence[Ask], slot_size: int | None, on_answer: Callable[[int, Record], None] = lambda *_: None
    ) -> list[Record]:
        """Log-likelihoods of responses, in nats: "value", and "is_greedy"; and what `speed.scoring_speed` reads.

        Args:
          asks: prompts with responses.
          slot_size: tokens per slot, of ReFusion; None for that of the model.
          on_answer: as of `generate`.
        """

        def answer(places: list[int], statistics: Statistics) -> Iterator[tuple[int, Record]]:
            started, begin = time.time(), time.perf_counter()
            # Neighbours are of like length, so that little is padding.
            ordered = sorted(places, key=lambda place: -len(asks[place].prompt) - len(asks[place].response))
            for first in range(0, len(ordered), self._scored_at_once):
                some = ordered[first : first + self._scored_at_once]
                found = log_likelihood(
                    self.scored,
                    [asks[place].prompt for place in some],
                    [asks[place].response for place in some],
                    estimate=self.estimate,
                    slot_size=slot_size,
                    num_draws=self.num_draws,
                    seed=self.seed,
                    batch_size=self.batch_size,
                )
                elapsed = time.perf_counter() - begin
                for place, value, greedy in zip(some, found.values, found.is_greedy, strict=True):
                    record = {"value": value, "is_greedy": greedy, "tokens": len(asks[place].response)}
                    yield place, record | {"started": started, "elapsed": elapsed}

        return self._run(asks, answer, on_answer)

    @property
    def _scored_at_once(self) -> int:
        return _SCORED_AT_ONCE if isinstance(self.batch_size, str) else max(_SCORED_AT_ONCE, 4 * self.batch_size)

    def _run(
        self,
        asks: Sequence[Ask],
        answer: Callable[[list[int], Statistics], Iterator[tuple[int, Record]]],
        on_answer: Callable[[int, Record], None],
    ) -> list[Record]:
        """The records of all, of which this process computes those of its share that are not known."""
        known = {} if self.journal is None else self.journal.records
        share = [place for place in range(len(asks)) if self.process.has(place)]
        records: dict[int, Record] = {place: known[asks[place].key] for place in share if asks[place].key in known}
        places = [place for place in share if place not in records]
        statistics = Statistics()
        progress = Progress(len(records), len(share), statistics)
        self.signals.waiting = True
        try:
            for place, record in answer(places, statistics) if places else ():
                ask = asks[place]
                sizes = {"prompt_tokens": len(ask.prompt), "cut_tokens": ask.cut_tokens}
                whole = {**record, **sizes, "unknown_tokens": ask.unknown_tokens, "process": self.process.id}
                records[place] = whole
                if self.journal is not None:
                    self.journal.add(ask.key, whole, whole["tokens"])
                on_answer(place, whole)
                progress.add(whole["tokens"])
                self.signals.check()
        finally:
            self.signals.waiting = False
            progress.close()
        everyone = _gather(self.process, records)
        return [everyone[place] for place in range(len(asks))]


def _gather(process: Process, records: Mapping[int, Record]) -> dict[int, Record]:
    """The records of all processes, in each of them."""
    if process.count == 1:
        return dict(records)
    from jax.experimental import multihost_utils

    # As long as it takes: a computation gives up on those that are late.
    wait_for_all(process, f"share_{next(_GATHERINGS)}")
    ours = np.frombuffer(json.dumps(list(records.items())).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([len(ours)], np.int32)).reshape(-1)
    everyone = multihost_utils.process_allgather(np.pad(ours, (0, int(sizes.max()) - len(ours))))
    parts = [json.loads(row[:size].tobytes()) for row, size in zip(everyone, sizes, strict=True)]
    return {place: record for part in parts for place, record in part}


def cut_prompt(prompt: list[int], room: int) -> tuple[list[int], int]:
    """The end of a prompt that fits into `room` tokens, and how many tokens were cut off its beginning."""
    cut = max(len(prompt) - room, 0)
    return prompt[cut:], cut
