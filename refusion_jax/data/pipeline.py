"""The way from a `DataConfig` to batches, and the Grain pipeline that reads batches ahead of the training loop."""

import dataclasses
import functools
import hashlib
import json
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
from absl import flags

from refusion_jax.config import DataConfig
from refusion_jax.data.batches import Batch, Batches
from refusion_jax.data.cache import cached
from refusion_jax.data.examples import Example
from refusion_jax.data.readers import fingerprint_entry
from refusion_jax.data.sentencepiece_tokenizer import train_tokenizer
from refusion_jax.data.splits import Corpus, DataCounts, tokenize_corpus
from refusion_jax.data.tokenized import TokenizedExamples
from refusion_jax.data.tokenizer_files import load_tokenizer
from refusion_jax.data.tokenizers import Tokenizer

if TYPE_CHECKING:
    import grain

# Raised when the same configuration, files and tokenizer give other tokens than before.
_TOKENS_VERSION = 2
_POLL_SECONDS = 1.0
_TOKEN_FIELDS = (
    "source", "format", "prompt_field", "response_field", "messages_field", "turns", "text_field", "template",
    "enable_thinking", "eval_examples", "max_length",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Everything a run reads. `held_out_examples[i]` is the text of `held_out` example `i`, without those dropped.

    `fingerprint` is a hash of all that decides the tokens: files, tokenizer and settings. A run that continues must
    find the same, or examples would be skipped and repeated.
    """

    tokenizer: Tokenizer
    train: TokenizedExamples
    held_out: TokenizedExamples
    held_out_examples: list[Example]
    counts: DataCounts
    fingerprint: str


def load_dataset(config: DataConfig, *, seed: int, tokenizer: Tokenizer | None = None) -> Dataset:
    """Reads or generates the examples and tokenizes them, or takes them from the cache.

    Texts are read one source at a time; training a tokenizer holds those of all sources.

    Args:
      config: where examples and tokenizer come from.
      seed: seed of the synthetic tasks; files do not depend on it.
      tokenizer: what to use instead of the configured one, such as that of a run which continues.

    Raises:
      DataError: for files or a tokenizer that cannot be used, or when no example is left to train on.
    """
    if tokenizer is None and config.tokenizer:
        tokenizer = load_tokenizer(config.tokenizer)
    corpus = Corpus(config, seed, tokenizer)
    if tokenizer is None:
        tokenizer = _train_tokenizer(config, corpus)
    fingerprint = _fingerprint(config, seed, tokenizer)
    splits = cached(config.cache_dir, fingerprint, lambda: tokenize_corpus(config, corpus, tokenizer))
    return Dataset(
        tokenizer, splits.train, splits.held_out, splits.held_out_examples, splits.counts, fingerprint=fingerprint
    )


def _fingerprint(config: DataConfig, seed: int, tokenizer: Tokenizer) -> str:
    parts = {field: getattr(config, field) for field in _TOKEN_FIELDS}
    parts |= {"version": _TOKENS_VERSION, "tokenizer": tokenizer.fingerprint}
    # Settings that came later count when they are used: runs from before them go on.
    if config.pad_responses:
        parts["pad_responses"] = config.pad_responses
    if config.source == "synthetic":
        parts |= {"seed": seed, "synthetic_examples": config.synthetic_examples}
        if config.synthetic_tasks != DataConfig.synthetic_tasks:
            parts["synthetic_tasks"] = config.synthetic_tasks
    else:
        for field in ("train_files", "eval_files"):
            parts[field] = [fingerprint_entry(config.source, entry) for entry in getattr(config, field)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _train_tokenizer(config: DataConfig, corpus: Corpus) -> Tokenizer:
    texts = [
        text
        for examples, _, _ in corpus.train()
        for example in examples
        for text in ([example.rendered] if example.rendered else [example.prompt, example.response])
        if text
    ]
    return train_tokenizer(texts, config.tokenizer_type, config.tokenizer_vocab_size)


def make_batches(
    config: DataConfig,
    examples: TokenizedExamples,
    *,
    seed: int,
    batch_size: int,
    rows: np.ndarray | None = None,
) -> Batches:
    """Returns the endless batches of examples, in rows of `config.max_length`, packed if `config.pack`.

    Training examples are mixed by `config.weights`; held-out ones, which know no sources, come once an epoch.

    Args:
      config: how rows are filled.
      examples: of a `Dataset`.
      seed: seed of every shuffle.
      batch_size: rows in a batch, of all processes together.
      rows: (R,) int, which rows of a batch this process assembles; all by default.

    Raises:
      DataError: when there are no examples, or `rows` are not rows of the batch.
    """
    return Batches(
        examples,
        seed=seed,
        batch_size=batch_size,
        max_length=config.max_length,
        pack=config.pack,
        weights=config.weights if examples.source_sizes else (),
        rows=rows,
    )


def iterate(
    batches: "grain.sources.RandomAccessDataSource[Batch]",
    start_step: int,
    *,
    read_threads: int,
    prefetch: int,
    workers: int = 0,
) -> "grain.DatasetIterator[Batch]":
    """Reads batches in order from `start_step`, ahead of their use, in threads or processes that start at once.

    A pipeline that starts at a step continues exactly as one that came to it, so the next step is all its state; how
    many threads and processes there are changes nothing. Call the iterator's `close()` to end them early.

    Args:
      batches: random access to the batch of each step, such as `Batches`; with `workers` it is pickled.
      start_step: the first step to read.
      read_threads: threads that make batches, in each process that does.
      prefetch: how many batches to have ready, all processes together; at least one in each.
      workers: processes that make batches; 0 makes them in threads of this one.
    """
    import grain

    dataset = grain.MapDataset.source(batches).slice(slice(start_step, None))
    if not workers:
        options = grain.ReadOptions(num_threads=read_threads, prefetch_buffer_size=prefetch)
        iterator = iter(dataset.to_iter_dataset(options))
        iterator.start_prefetch()
        return iterator
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # Grain reads flags of its own; they get their defaults
    share = max(prefetch // workers, 1)
    options = grain.ReadOptions(num_threads=min(read_threads, share), prefetch_buffer_size=share)
    processes = grain.multiprocessing.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=1)
    # Batches come through pipes: Grain's shared memory for arrays leaks when an iterator is closed early.
    no_shared_memory = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
    source = grain.experimental.WithOptionsIterDataset(dataset.to_iter_dataset(options), no_shared_memory)
    iterator = iter(source.mp_prefetch(processes, worker_init_fn=functools.partial(_end_with, os.getpid())))
    iterator.start_prefetch()
    return iterator


def _end_with(parent: int, worker: int, workers: int) -> None:
    """Ends a worker process when the one that reads from it is killed: it would wait for it forever."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that reads, which ends its workers
