"""Random access to the batch of any step."""

import sys
import threading
from bisect import bisect_right
from typing import Any

import numpy as np

from refusion_jax.data.examples import DataError
from refusion_jax.data.plan import Mixture, epoch_examples, plan_epoch
from refusion_jax.data.tokenized import TokenizedExamples

# Plans kept: readers a few steps apart may be on either side of an epoch's end.
_CACHED_PLANS = 2

Batch = dict[str, np.ndarray]


class Batches:
    """Random access to the batch of any step, epoch after epoch without end.

    `batches[step]` is a pure function of the arguments and `step`: a dictionary of arrays whose shapes never change,
    with `R = batch_size` or `len(rows)`, `L = max_length` and `S = max_segments(max_length, pack)`. The examples of a
    row are its segments, in order.

      tokens:           (R, L) int32, 0 in empty places
      segment_ids:      (R, L) int32, 1 for the tokens of a row's first example, 2 for the next, 0 in empty places
      position_ids:     (R, L) int32, index within the example; in empty places, within the row
      prompt_lengths:   (R, S) int32, tokens of each segment's prompt, 0 in documents and where there is no such segment
      response_lengths: (R, S) int32, tokens of each segment's response and its EOS, 0 where there is none
      example_ids:      (R, S) int32, index in `examples`, -1 where there is none
      epochs:           (R, S) int32, the epoch; in a weighted mixture, the pass over the example's source

    Lengths alone say where padding is: EOS may be the pad token. Safe to use from several threads and to pickle. Going
    to a far step plans each epoch before it once; only plans of the latest epochs are kept.

    Args:
      examples: what to batch.
      seed: seed of every shuffle.
      batch_size: rows in a batch, of all processes together.
      max_length: tokens in a row.
      pack: whether examples share rows.
      weights: proportions of the sources of `examples.source_sizes`; empty for every example once an epoch.
      rows: (R,) int, which rows of each batch are assembled; all by default. Order and content of rows do not depend
        on it, so the parts of several processes make up the same batch however many there are.

    Raises:
      DataError: when there are no examples, one is longer than a row, a source with a weight has none, or `rows` are
        not rows of the batch.
    """

    def __init__(
        self,
        examples: TokenizedExamples,
        *,
        seed: int,
        batch_size: int,
        max_length: int,
        pack: bool,
        weights: tuple[float, ...] = (),
        rows: np.ndarray | None = None,
    ):
        if not len(examples):
            raise DataError("There are no examples to make batches of.")
        if examples.lengths.max() > max_length:
            raise DataError(f"An example of {examples.lengths.max()} tokens does not fit a row of {max_length} tokens.")
        self.examples = examples
        self.batch_size = batch_size
        self.max_length = max_length
        self._seed, self._pack = seed, pack
        self._mixture = _mixture(examples, weights)
        self._rows = _checked_rows(np.arange(batch_size) if rows is None else rows, batch_size)
        self._plans: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # epoch -> example IDs, passes; the latest used last
        self._epoch_ends: list[int] = []  # steps before the end of epoch 0, 1, ..., as far as known
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lock": None, "_plans": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def __len__(self) -> int:
        """The most that Python allows: there is always another epoch."""
        return sys.maxsize

    def __getitem__(self, step: int) -> Batch:
        epoch, batch = self.locate(step)
        with self._lock:
            example_ids, passes = self._plan(epoch)
        rows = batch * self.batch_size + self._rows
        return self._assemble(example_ids[rows], passes[rows])

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
        rows = len(self._plan(len(self._epoch_ends))[0])
        self._epoch_ends.append((self._epoch_ends[-1] if self._epoch_ends else 0) + rows // self.batch_size)

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the example IDs and passes, each (rows, S), of all rows of an epoch."""
        plan = self._plans.pop(epoch, None)
        if plan is None:
            ids, passes = epoch_examples(self._mixture, seed=self._seed, epoch=epoch)
            rows = plan_epoch(
                self.examples.lengths[ids],
                seed=self._seed,
                epoch=epoch,
                max_length=self.max_length,
                batch_size=self.batch_size,
                pack=self._pack,
            ).rows
            plan = np.where(rows >= 0, ids[rows], -1), np.where(rows >= 0, passes[rows], epoch)
        self._plans[epoch] = plan
        while len(self._plans) > _CACHED_PLANS:
            del self._plans[next(iter(self._plans))]
        return plan

    def _assemble(self, example_ids: np.ndarray, passes: np.ndarray) -> Batch:
        """Lays out the tokens of the examples `example_ids` (R, S), which belong to `passes` (R, S)."""
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
            "example_ids": example_ids,
            "epochs": passes,
        }


def _mixture(examples: TokenizedExamples, weights: tuple[float, ...]) -> Mixture:
    sizes = examples.source_sizes or (len(examples),)
    if weights and len(weights) != len(sizes):
        raise DataError(
            f"There are {len(weights)} weights for the examples of {len(sizes)} sources; give one for each."
        )
    for source, size in enumerate(sizes if weights else (), 1):
        if not size:
            raise DataError(
                f"Source {source} of {len(sizes)} has a weight but no example that can be used: leave it out."
            )
    return Mixture(sizes, weights)


def _checked_rows(rows: np.ndarray, batch_size: int) -> np.ndarray:
    rows = np.asarray(rows)
    if rows.ndim != 1 or rows.dtype.kind not in "iu" or not ((rows >= 0) & (rows < batch_size)).all():
        raise DataError(f"The rows {rows} are not all rows of a batch of {batch_size}; they are numbered from 0.")
    return rows


def _ranges(lengths: np.ndarray) -> np.ndarray:
    """Returns `range(length)` for each length, one after another."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
