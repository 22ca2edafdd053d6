"""Which examples an epoch has and where they lie: mixtures of sources, and packing them into rows."""

import dataclasses
from bisect import bisect_left, insort

import numpy as np

# Examples that the packer looks at together, and the most rows that it keeps open. With 256, 98 % of all positions are
# filled; more fills hardly more.
_WINDOW = 256


def max_segments(max_length: int, pack: bool) -> int:
    """Returns the most examples that share a row: a bound that keeps batch shapes static, 1 when not packing.

    Rows stay partly empty when examples are on average shorter than `max_length / max_segments(max_length, True)`: 8
    tokens in rows of up to 4096.
    """
    return min(max(max_length // 8, 1), 512) if pack else 1


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Sources whose examples lie one after another, and how they are mixed.

    Attributes:
      sizes: examples of each source, not 0 when there are weights.
      weights: proportions of the sources in an epoch, of any sum; empty for every example once an epoch.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...] = ()


def epoch_examples(mixture: Mixture, *, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the examples of one epoch: a pure function of its arguments.

    Without weights, each example comes once. With them, of `N` examples in all, source `i` contributes
    `round(N * weights[i] / sum(weights))`, at least one. They are the next of its own endless sequence, in which each
    pass over the source is a new shuffle: whatever its weight, no example of a source comes again before every other
    one has come, from epoch to epoch.

    Args:
      mixture: the sources.
      seed: the data seed.
      epoch: which epoch, from 0.

    Returns:
      (count,) int32 example IDs, and (count,) int32 which pass over its source each belongs to. An example that comes
      twice in an epoch belongs to different passes, so its random draws differ.
    """
    total = sum(mixture.sizes)
    if not mixture.weights:
        return np.arange(total, dtype=np.int32), np.full(total, epoch, np.int32)
    ids, passes, first = [], [], 0
    for source, (size, weight) in enumerate(zip(mixture.sizes, mixture.weights, strict=True)):
        count = max(1, round(total * weight / sum(mixture.weights)))
        positions = np.arange(epoch * count, (epoch + 1) * count)
        start, stop = epoch * count // size, positions[-1] // size + 1
        # Seeds are below 2**31, so the keys are none of those that plans are made with.
        keys = [np.array([seed + (source + 1 << 32), number], np.uint64) for number in range(start, stop)]
        orders = np.concatenate([_permutation(np.random.Philox(key=key), size) for key in keys])
        ids.append(first + orders[positions - start * size])
        passes.append(positions // size)
        first += size
    return np.concatenate(ids).astype(np.int32), np.concatenate(passes).astype(np.int32)


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
