"""Tokenized examples kept on disk or `gs://`, so that the next run, or the next process, need not make them again.

An entry is a directory named by the hash of everything that its content depends on: `.npy` files, then `entry.json`
with their checksums. The same name always gets the same bytes, and each file appears whole; so processes that make an
entry at once replace files by equal ones, and whatever order that happens in, a reader finds what it expects or, by the
checksums, that it must make the entry itself.
"""

import contextlib
import dataclasses
import io
import json
import logging
import uuid
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
from etils import epath

from refusion_jax.config import from_dict, to_dict
from refusion_jax.data.examples import DataError, Example
from refusion_jax.data.readers import is_remote
from refusion_jax.data.splits import DataCounts, Splits
from refusion_jax.data.tokenized import TokenizedExamples

_ENTRY_NAME = "entry.json"
_ARRAYS = ("tokens", "offsets", "prompt_lengths", "source_ids")


def cached(directory: str, name: str, build: Callable[[], Splits]) -> Splits:
    """Returns the entry `name` of a cache, building it when it is not there or damaged.

    Args:
      directory: where entries are, on disk, from which arrays are memory-mapped, or `gs://`. "" builds without a cache.
      name: hash of all that `build` depends on.
      build: makes the content.

    Raises:
      DataError: when the entry cannot be written; and what `build` raises.
    """
    if not directory:
        return build()
    entry = epath.Path(directory) / name
    with _cache_errors(directory):
        splits = _load(entry)
    if splits is not None:
        return splits
    built = build()
    with _cache_errors(directory):
        _save(entry, built)
        splits = _load(entry)
    if splits is None:
        raise DataError(f"{entry}: data.cache_dir does not give back what was written there.")
    return splits


@contextlib.contextmanager
def _cache_errors(directory: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Remote file systems raise errors of their own kinds, such as for missing credentials.
        if not is_remote(directory) and not isinstance(error, OSError | ImportError):
            raise
        raise DataError(f"{directory}: data.cache_dir cannot be used ({error}).") from None


def _save(entry: epath.Path, splits: Splits) -> None:
    entry.mkdir(parents=True, exist_ok=True)
    checksums = {}
    for split, examples in (("train", splits.train), ("held_out", splits.held_out)):
        for array in _ARRAYS:
            values = getattr(examples, array)
            with _replace(entry / f"{split}.{array}.npy") as file:
                np.save(file, values, allow_pickle=False)
            checksums[f"{split}.{array}"] = _checksum(values)
    # Once each: a document is the text of all its pieces.
    texts = {example: index for index, example in enumerate(dict.fromkeys(splits.held_out_examples))}
    body = {
        "checksums": checksums,
        "train_source_sizes": splits.train.source_sizes,
        "held_out_texts": [dataclasses.astuple(example) for example in texts],
        "held_out_index": [texts[example] for example in splits.held_out_examples],
        "counts": to_dict(splits.counts),
    }
    text = json.dumps(body)
    with _replace(entry / _ENTRY_NAME) as file:
        file.write(json.dumps({"crc32": zlib.crc32(text.encode()), "body": text}).encode())


def _load(entry: epath.Path) -> Splits | None:
    """Returns None for an entry that is not there, not whole or damaged; it is then made anew."""
    try:
        envelope = json.loads((entry / _ENTRY_NAME).read_bytes())
        text = envelope["body"]
        if zlib.crc32(text.encode()) != envelope["crc32"]:
            raise ValueError(f"{_ENTRY_NAME} has changed")
        body = json.loads(text)
        arrays = {name: _load_array(entry / f"{name}.npy", sum_) for name, sum_ in body["checksums"].items()}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, EOFError) as error:
        logging.getLogger(__name__).warning("%s: the cache entry is damaged and is made anew (%s).", entry, error)
        return None
    texts = [Example(*text) for text in body["held_out_texts"]]
    train, held_out = (
        TokenizedExamples(**{array: arrays[f"{split}.{array}"] for array in _ARRAYS}, source_sizes=sizes)
        for split, sizes in (("train", tuple(body["train_source_sizes"])), ("held_out", ()))
    )
    return Splits(
        train,
        held_out,
        [texts[index] for index in body["held_out_index"]],
        from_dict(DataCounts, body["counts"]),
    )


def _load_array(path: epath.Path, checksum: str) -> np.ndarray:
    if is_remote(path):
        array = np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
    else:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    if _checksum(array) != checksum:
        raise ValueError(f"{path.name} has changed")
    return array


def _checksum(array: np.ndarray) -> str:
    return f"{array.dtype} {array.shape} {zlib.crc32(np.ascontiguousarray(array).data)}"


@contextlib.contextmanager
def _replace(path: epath.Path) -> Iterator[BinaryIO]:
    """Writes a file under a name that no other process uses and renames it."""
    temporary: Any = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
