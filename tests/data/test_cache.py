from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from refusion_jax.data import cache
from refusion_jax.data.cache import cached
from refusion_jax.data.examples import DataError, Example, ReadCounts
from refusion_jax.data.splits import DataCounts, Splits
from refusion_jax.data.tokenized import TokenizeCounts, TokenizedExamples


def splits():
    train = TokenizedExamples(
        np.arange(9, dtype=np.int32),
        np.array([0, 4, 9]),
        np.array([2, 0], np.int32),
        np.array([0, 1], np.int32),
        (1, 1),
    )
    empty = TokenizedExamples(np.zeros(0, np.int32), np.zeros(1, int), np.zeros(0, np.int32), np.zeros(0, np.int32))
    counts = DataCounts(ReadCounts(3, 1, 0), ReadCounts(), TokenizeCounts(2, 1, 0, 30), TokenizeCounts())
    return Splits(train, empty, [Example("p\u2028", "r"), Example("", "d"), Example("", "d")], counts)


def equal(one, other):
    for split in ("train", "held_out"):
        for name in ("tokens", "offsets", "prompt_lengths", "source_ids"):
            first, second = (getattr(getattr(each, split), name) for each in (one, other))
            if first.dtype != second.dtype or not np.array_equal(first, second):
                return False
        if getattr(one, split).source_sizes != getattr(other, split).source_sizes:
            return False
    return one.counts == other.counts and one.held_out_examples == other.held_out_examples


def never():
    raise AssertionError("the entry is there")


def test_without_a_directory_nothing_is_kept():
    made = splits()
    assert cached("", "name", lambda: made) is made


def test_an_entry_is_made_once_and_memory_mapped(tmp_path):
    first = cached(str(tmp_path / "deep" / "cache"), "name", splits)
    again = cached(str(tmp_path / "deep" / "cache"), "name", never)
    assert equal(first, splits()) and equal(again, splits())
    assert isinstance(first.train.tokens, np.memmap) and isinstance(again.train.tokens, np.memmap)
    assert not list(tmp_path.rglob("*.tmp"))
    with pytest.raises(AssertionError, match="the entry is there"):
        cached(str(tmp_path / "deep" / "cache"), "other", never)


def damaged(content, kind):
    if kind == "cut":
        return content[: len(content) // 2]
    if kind == "changed":
        return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
    return b""


@pytest.mark.parametrize("kind", ["cut", "changed", "empty", "gone"])
@pytest.mark.parametrize("file", ["entry.json", "train.tokens.npy", "train.offsets.npy", "held_out.source_ids.npy"])
def test_a_damaged_entry_is_noticed_and_made_anew(tmp_path, file, kind):
    cached(str(tmp_path), "name", splits)
    path = tmp_path / "name" / file
    if kind == "gone":
        path.unlink()
    else:
        path.write_bytes(damaged(path.read_bytes(), kind))
    made = []
    assert equal(cached(str(tmp_path), "name", lambda: made.append(1) or splits()), splits())
    assert made == [1]
    assert equal(cached(str(tmp_path), "name", never), splits())


def test_a_failed_write_leaves_no_entry(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(cache.np, "save", fail)
        with pytest.raises(DataError, match=r"data.cache_dir cannot be used \(disk full\)"):
            cached(str(tmp_path), "name", splits)
    assert not list((tmp_path / "name").iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file: data\.cache_dir cannot be used"):
        cached(str(tmp_path / "file"), "name", splits)


def test_makers_of_one_entry_at_once_agree(tmp_path):
    def make(_):
        found = cached(str(tmp_path), "name", splits)
        cache._save(cache.epath.Path(tmp_path) / "name", splits())
        return equal(found, splits()) and equal(cached(str(tmp_path), "name", splits), splits())

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(make, range(60)))
    assert not list(tmp_path.rglob("*.tmp"))
