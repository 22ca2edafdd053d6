"""What a decode gives back."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from refusion_jax.config import ConfigError, DecodeConfig
from refusion_jax.decoding.layout import Layout


@dataclasses.dataclass(frozen=True)
class Answer:
    """The response to one prompt.

    Attributes:
      index, sample: the prompt's index and which of its samples this is.
      tokens: response token IDs up to and including the first EOS; of a template, those of all holes joined.
      text: the decoded response without EOS and stop text, of a template the whole text with its holes filled; None
        without a tokenizer.
      holes: the tokens of each hole, up to and including its first EOS; a plain prompt has one hole.
      hole_texts: the decoded holes; None without a tokenizer.
      committed: every committed response token in position order. After an EOS that an earlier slot brought late there
        can be more.
      position_ids: the position IDs of `committed`.
      order: for each committed token, which of the row's forwards committed it, from 0.
      probabilities: for each committed token, the probability it was accepted with: that of a slot's first token where
        it was drafted, that of any other after the tokens before it. Always of the unfiltered distribution.
      forwards: forwards the row took part in; the first draft counts, the prefill does not.
      finish_reason: "eos" (of a template: in every hole), "length", "stop" or "cancelled".
      tpf: the authors' tokens-per-forward for algorithm "paper" (a mean over acceptances), committed tokens per forward
        otherwise; of other methods than "refusion" the tokens up to the first EOS, since much behind it may be decided.
    """

    index: int
    sample: int
    tokens: list[int]
    text: str | None
    holes: list[list[int]]
    hole_texts: list[str] | None
    committed: list[int]
    position_ids: list[int]
    order: list[int]
    probabilities: list[float]
    forwards: int
    finish_reason: str
    tpf: float


@dataclasses.dataclass(frozen=True)
class Generation:
    """The answers to a list of prompts: one list entry per prompt and sample, a prompt's samples next to each other.

    The attributes are those of `Answer`; log-probabilities are the logarithms of its `probabilities`.
    """

    tokens: list[list[int]]
    text: list[str] | None
    holes: list[list[list[int]]]
    hole_texts: list[list[str]] | None
    committed: list[list[int]]
    position_ids: list[list[int]]
    order: list[list[int]]
    log_probabilities: list[list[float]]
    forwards: list[int]
    finish_reason: list[str]
    tpf: list[float]

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> "Generation":
        """Puts answers in the order of their index and sample."""
        answers = sorted(answers, key=lambda answer: (answer.index, answer.sample))
        columns: dict[str, Any] = {
            field.name: [getattr(answer, field.name) for answer in answers]
            for field in dataclasses.fields(cls)
            if field.name != "log_probabilities"
        }
        for name in ("text", "hole_texts"):
            columns[name] = None if any(value is None for value in columns[name]) else columns[name]
        with np.errstate(divide="ignore"):
            logs = [np.log(np.asarray(answer.probabilities)).tolist() for answer in answers]
        return cls(log_probabilities=logs, **columns)


@dataclasses.dataclass
class Statistics:
    """What decoding did and how long it took; calls that are given the same object add up.

    Attributes:
      prompts, tokens, forwards: answers, their tokens, and the forwards their rows took part in.
      seconds: from the first prompt to the last answer; of these compile_seconds compiling, prefill_seconds computing
        prompts and decode_seconds in the decode loop, both without compiling.
      iterations: forwards of the whole batch. row_forwards: rows times iterations.
      positions, needed_positions: query positions computed, and those of them that some row needed.
      cached: keys that queries of one row read from its buffer, summed over forwards.
    Of methods other than "refusion" the positions computed are not known, and those needed stand for them; its own
    decoder does not count `cached`.
    """

    prompts: int = 0
    tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0
    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    iterations: int = 0
    row_forwards: int = 0
    positions: int = 0
    needed_positions: int = 0
    cached: int = 0

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds inside to the field `name` and to all, compiling apart."""
        compiling = 0.0

        def listen(event: str, duration_secs: float, **_: Any) -> None:
            nonlocal compiling
            if event.startswith("/jax/core/compile/"):
                compiling += duration_secs

        jax.monitoring.register_event_duration_secs_listener(listen)
        start = time.perf_counter()
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
            passed = time.perf_counter() - start
            self.seconds += passed
            self.compile_seconds += compiling
            setattr(self, name, getattr(self, name) + max(0.0, passed - compiling))


@dataclasses.dataclass(frozen=True)
class Row:
    """The state of one row as it came from the device; arrays are over response offsets, see `DecodeState`."""

    tokens: np.ndarray
    probabilities: np.ndarray
    committed: np.ndarray
    commit_forwards: np.ndarray
    forwards: int
    accepted: np.ndarray
    events: int


def read_row(
    row: Row, layout: Layout, config: DecodeConfig, eos_ids: Sequence[int], index: int, sample: int, reason: str | None
) -> Answer:
    """The answer that a row's state holds, without texts; `reason` where it did not end by itself.

    Raises:
      ConfigError: when a token has no probability.
    """
    offsets = np.flatnonzero(row.committed)
    if np.isnan(row.probabilities[offsets]).any():
        raise ConfigError(
            f"The logits for prompt {index} are not all numbers; look for weights of the checkpoint that are none."
        )
    committed = row.tokens[offsets]
    is_eos = np.isin(row.tokens, list(eos_ids))
    parts = layout.by_hole(np.arange(layout.response_length))
    # What was ended early may have gaps: of each hole its beginning up to the first one is what there is.
    parts = [part[row.committed[part]] if reason is None else _before_gap(part, row.committed) for part in parts]
    holes = [_through_first(row.tokens[part], is_eos[part]) for part in parts]
    ended = bool(holes) and all(hole and hole[-1] in eos_ids for hole in holes)
    return Answer(
        index=index,
        sample=sample,
        tokens=[token for hole in holes for token in hole],
        text=None,
        holes=holes,
        hole_texts=None,
        committed=committed.tolist(),
        position_ids=layout.position_ids[offsets].tolist(),
        order=row.commit_forwards[offsets].tolist(),
        probabilities=row.probabilities[offsets].tolist(),
        forwards=row.forwards,
        finish_reason=reason or ("eos" if ended else "length"),
        tpf=_tokens_per_forward(row, config, len(committed)),
    )


def _before_gap(part: np.ndarray, committed: np.ndarray) -> np.ndarray:
    gaps = np.flatnonzero(~committed[part])
    return part[: gaps[0]] if len(gaps) else part


def _through_first(tokens: np.ndarray, is_eos: np.ndarray) -> list[int]:
    ends = np.flatnonzero(is_eos)
    return tokens[: ends[0] + 1 if len(ends) else len(tokens)].tolist()


def _tokens_per_forward(row: Row, config: DecodeConfig, committed: int) -> float:
    """For the published algorithm the mean over acceptances of `slot_size * slots / (2 * rounds)`, as its authors."""
    if config.algorithm == "paper":
        rounds = np.arange(1, len(row.accepted))
        return float(config.slot_size * np.sum(row.accepted[1:] / rounds) / (2 * max(row.events, 1)))
    return committed / max(row.forwards, 1)
