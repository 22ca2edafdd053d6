"""From examples to batches of packed rows: a tokenized cache, a packing plan per epoch, and random access by step."""

import dataclasses
import functools
import sys
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

import numpy as np

from refusion_jax.data.records import DataError, Example
from refusion_jax.data.tokenizers import Tokenizer

# Examples that the packer looks at together, and the most rows that it keeps open. With 256, 98 % of all positions are
# filled; more fills hardly more.
_WINDOW = 256

# Plans kept: readers a few steps apart may be on either side of an epoch's end.
_CACHED_PLANS = 2

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class TokenizedExamples:
    """Tokenized examples one after another in one flat array.

    Attributes:
      tokens: (total,) int32, for each example its prompt, its response and EOS.
      offsets: (examples + 1,) int64; example `i` is `tokens[offsets[i]:offsets[i + 1]]`.
      prompt_lengths: (examples,) int32, how many of an example's tokens are its prompt.
      source_ids: (examples,) int32, the example's index in the list that was tokenized.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    prompt_lengths: np.ndarray
    source_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """(examples,) int32: tokens of each example, prompt and response and EOS."""
        return np.diff(self.offsets).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class TokenizeCounts:
    """What `tokenize` did with the examples: `kept`, dropped as `too_long`, dropped as `empty` (no tokens)."""

    kept: int = 0
    too_long: int = 0
    empty: int = 0


def tokenize(
    examples: Sequence[Example], tokenizer: Tokenizer, max_length: int
) -> tuple[TokenizedExamples, TokenizeCounts]:
    """Tokenizes examples; a response is its tokens and EOS.

    An example whose prompt, response and EOS together exceed `max_length` tokens is dropped, never cut; so is one whose
    prompt or response has no tokens. Both are counted. No examples give an empty result.

    Raises:
      DataError: when there were examples and every one was dropped.
    """
    prompts = tokenizer.encode_batch([example.prompt for example in examples])
    responses = tokenizer.encode_batch([example.response for example in examples])
    prompt_lengths = np.fromiter(map(len, prompts), np.int32, len(prompts))
    response_lengths = np.fromiter(map(len, responses), np.int32, len(responses))
    lengths = prompt_lengths + response_lengths + 1
    empty = (prompt_lengths == 0) | (response_lengths == 0)
    too_long = ~empty & (lengths > max_length)
    kept = np.flatnonzero(~empty & ~too_long)
    counts = TokenizeCounts(len(kept), int(too_long.sum()), int(empty.sum()))
    if len(examples) and not counts.kept:
        raise DataError(
            f"None of the {len(examples)} examples can be used: {counts.too_long} are longer than {max_length} tokens "
            f"(the shortest has {lengths.min()}; raise max_length), {counts.empty} have an empty prompt or response."
        )
    offsets = np.concatenate([[0], np.cumsum(lengths[kept], dtype=np.int64)])
    eos = [tokenizer.eos_token_id]
    flat = (token for i in kept for part in (prompts[i], responses[i], eos) for token in part)
    tokens = np.fromiter(flat, np.int32, int(offsets[-1]))
    return TokenizedExamples(tokens, offsets, prompt_lengths[kept], kept.astype(np.int32)), counts


def max_segments(max_length: int, pack: bool) -> int:
    """Returns the most examples that share a row: a bound that keeps batch shapes static, 1 when not packing.

    Rows stay partly empty when examples are on average shorter than `max_length / max_segments(max_length, True)`.
    """
    return min(max(max_length // 8, 1), 64) if pack else 1


@dataclasses.dataclass(frozen=True)
class PackingPlan:
    """Which examples lie in which row during one epoch.

    Attributes:
      rows: (rows, segments) int32, example IDs in the order they lie in the row, -1 where there is none. The number of
        rows is a multiple of the batch size; empty rows fill up the last batch.
    """

    rows: np.ndarray


def plan_epoch(
    lengths: np.ndarray, *, seed: int, epoch: int, max_length: int, batch_size: int, pack: bool
) -> PackingPlan:
    """Plans one epoch: a pure function of its arguments. Every example has exactly one place.

    Examples are shuffled and packed by best fit within a window that moves over them; then the rows are shuffled, so
    that short and long examples, and full and less full rows, come at any time of the epoch.

    Args:
      lengths: (examples,) int, tokens of each example, none more than `max_length`.
      seed: the data seed.
      epoch: which pass over the examples, from 0.
      max_length: tokens in a row.
      batch_size: rows in a batch.
      pack: whether examples share rows; otherwise each has its own.
    """
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    order = _permutation(bits, len(lengths))
    segments = max_segments(max_length, pack)
    rows = _pack(order, lengths, max_length, segments) if pack else [[example] for example in order.tolist()]
    table = np.full((-(-len(rows) // batch_size) * batch_size, segments), -1, np.int32)
    for target, source in enumerate(_permutation(bits, len(rows)).tolist()):
        table[target, : len(rows[source])] = rows[source]
    return PackingPlan(table)


def _permutation(bits: np.random.Philox, count: int) -> np.ndarray:
    """Returns a random permutation of `range(count)`."""
    # From raw bits, since NumPy may change what its Generator makes of them.
    return np.argsort(bits.random_raw(count), kind="stable")


def _pack(order: np.ndarray, lengths: np.ndarray, max_length: int, segments: int) -> list[list[int]]:
    """Packs examples window by window, longest first, each into the fullest open row that it fits.

    A row closes when it holds `segments` examples, when nothing fits any more, or, when too many are open, as the
    fullest. Returns the rows, each a list of example IDs, in order of closing.
    """
    windows = np.arange(len(order)) // _WINDOW
    order = order[np.lexsort((-lengths[order], windows))]
    shortest = int(lengths.min())
    closed: list[list[int]] = []
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (free tokens, index in `rows`), sorted
    for example, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        place = bisect_left(open_rows, (length, 0))
        if place < len(open_rows):
            free, row = open_rows.pop(place)
            rows[row].append(example)
        else:
            free, row = max_length, len(rows)
            rows.append([example])
        if free - length < shortest or len(rows[row]) == segments:
            closed.append(rows[row])
            continue
        insort(open_rows, (free - length, row))
        if len(open_rows) > _WINDOW:
            closed.append(rows[open_rows.pop(0)[1]])
    return closed + [rows[row] for _, row in open_rows]


class Batches:
    """Random access to the batch of any step, epoch after epoch without end.

    `batches[step]` is a pure function of the arguments and `step`: a dictionary of arrays whose shapes never change,
    with `L = max_length` and `S = max_segments(max_length, pack)`. The examples of a row are its segments, in order.

      tokens:           (rows, L) int32, 0 in empty places
      segment_ids:      (rows, L) int32, 1 for the tokens of a row's first example, 2 for the next, 0 in empty places
      position_ids:     (rows, L) int32, index within the example; in empty places, within the row
      prompt_lengths:   (rows, S) int32, tokens of each segment's prompt, 0 where there is no such segment
      response_lengths: (rows, S) int32, tokens of each segment's response and its EOS, 0 where there is none
      example_ids:      (rows, S) int32, index in `examples`, -1 where there is none
      epochs:           (rows, S) int32, the epoch, everywhere the same

    Safe to use from several threads. Going to a far step plans each epoch before it once; only plans of the latest
    epochs are kept.

    Args:
      examples: what to batch.
      seed: seed of every shuffle.
      batch_size: rows in a batch.
      max_length: tokens in a row.
      pack: whether examples share rows.

    Raises:
      DataError: when there are no examples or one is longer than a row.
    """

    def __init__(self, examples: TokenizedExamples, *, seed: int, batch_size: int, max_length: int, pack: bool):
        if not len(examples):
            raise DataError("There are no examples to make batches of.")
        if examples.lengths.max() > max_length:
            raise DataError(f"An example of {examples.lengths.max()} tokens does not fit a row of {max_length} tokens.")
        self.examples = examples
        self.batch_size = batch_size
        self.max_length = max_length
        plan = functools.partial(
            plan_epoch, examples.lengths, seed=seed, max_length=max_length, batch_size=batch_size, pack=pack
        )
        self._plan = functools.lru_cache(_CACHED_PLANS)(lambda epoch: plan(epoch=epoch))
        self._epoch_ends: list[int] = []  # steps before the end of epoch 0, 1, ..., as far as known
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """The most that Python allows: there is always another epoch."""
        return sys.maxsize

    def __getitem__(self, step: int) -> Batch:
        epoch, batch = self.locate(step)
        with self._lock:
            plan = self._plan(epoch)
        return self._assemble(plan.rows[batch * self.batch_size :][: self.batch_size], epoch)

    def locate(self, step: int) -> tuple[int, int]:
        """Returns (epoch, batch within that epoch) of a step.

        Raises:
          IndexError: for a negative step.
        """
        if step < 0:
            raise IndexError(f"Step {step} is negative; steps count from 0.")
        with self._lock:
            while not self._epoch_ends or self._epoch_ends[-1] <= step:
                self._add_epoch_end()
            epoch = bisect_right(self._epoch_ends, step)
            return epoch, step - (self._epoch_ends[epoch - 1] if epoch else 0)

    def batches_in_epoch(self, epoch: int) -> int:
        """Returns how many batches an epoch has; packing makes the number differ a little between epochs."""
        with self._lock:
            while len(self._epoch_ends) <= epoch:
                self._add_epoch_end()
            return self._epoch_ends[epoch] - (self._epoch_ends[epoch - 1] if epoch else 0)

    def _add_epoch_end(self) -> None:
        rows = len(self._plan(len(self._epoch_ends)).rows)
        self._epoch_ends.append((self._epoch_ends[-1] if self._epoch_ends else 0) + rows // self.batch_size)

    def _assemble(self, example_ids: np.ndarray, epoch: int) -> Batch:
        """Lays out the tokens of the examples `example_ids` (rows, S)."""
        examples, shape = self.examples, (len(example_ids), self.max_length)
        there = example_ids >= 0
        lengths = np.where(there, examples.lengths[example_ids], 0)
        prompt_lengths = np.where(there, examples.prompt_lengths[example_ids], 0)
        row_of_segment, index_of_segment = np.nonzero(there)
        starts = (np.cumsum(lengths, axis=1) - lengths)[there] + row_of_segment * self.max_length
        position = _ranges(lengths[there])
        places = np.repeat(starts, lengths[there]) + position
        sources = np.repeat(examples.offsets[example_ids[there]], lengths[there]) + position

        tokens, segment_ids = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        position_ids = np.tile(np.arange(self.max_length, dtype=np.int32), (len(example_ids), 1))
        tokens.reshape(-1)[places] = examples.tokens[sources]
        segment_ids.reshape(-1)[places] = np.repeat(index_of_segment + 1, lengths[there])
        position_ids.reshape(-1)[places] = position
        return {
            "tokens": tokens,
            "segment_ids": segment_ids,
            "position_ids": position_ids,
            "prompt_lengths": prompt_lengths,
            "response_lengths": lengths - prompt_lengths,
            "example_ids": example_ids.copy(),
            "epochs": np.full_like(example_ids, epoch),
        }


def _ranges(lengths: np.ndarray) -> np.ndarray:
    """Returns `range(length)` for each length, one after another."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
