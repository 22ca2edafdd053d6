"""The training and held-out examples of a configuration, read source by source and tokenized."""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from refusion_jax.config import DataConfig
from refusion_jax.data import synthetic
from refusion_jax.data.conversations import Conversations
from refusion_jax.data.examples import DataError, Example, ReadCounts
from refusion_jax.data.records import read_entry
from refusion_jax.data.tokenized import (
    TokenizeCounts,
    TokenizedExamples,
    concatenate,
    require_some,
    tokenize_some,
)
from refusion_jax.data.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class DataCounts:
    """What became of the examples. Without files to read, `read` and `read_held_out` count nothing."""

    read: ReadCounts
    read_held_out: ReadCounts
    train: TokenizeCounts
    held_out: TokenizeCounts


@dataclasses.dataclass(frozen=True)
class Splits:
    """Tokenized examples of both splits. `held_out_examples[i]` is the text of `held_out` example `i`, for documents
    the whole document."""

    train: TokenizedExamples
    held_out: TokenizedExamples
    held_out_examples: list[Example]
    counts: DataCounts


class Corpus:
    """The texts of a configuration. One source is in memory at a time, and the one read last stays there.

    Args:
      config: what to read.
      seed: seed of the synthetic tasks.
      tokenizer: whose chat template writes conversations; None writes them in ChatML.
    """

    def __init__(self, config: DataConfig, seed: int, tokenizer: Tokenizer | None):
        self._config, self._seed = config, seed
        self._conversations = Conversations.of(config, tokenizer)
        self._read = functools.lru_cache(1)(functools.partial(read_entry, config, conversations=self._conversations))

    def train(self) -> Iterator[tuple[list[Example], list[Example], ReadCounts]]:
        """Yields (training examples, examples held out of them, counts of reading) of each source.

        Raises:
          DataError: for a source that cannot be read, and when no example is left to train on.
        """
        config = self._config
        if config.source == "synthetic":
            made = synthetic.train_examples(self._seed, config.synthetic_examples, config.synthetic_tasks)
            yield self._pairs(made), [], ReadCounts()
            return
        total = ReadCounts()
        some = False
        for entry, held_out in zip(config.train_files, self._held_out_counts, strict=True):
            examples, counts = self._read(entry)
            total += counts
            rest = len(examples) - held_out
            some = some or rest > 0
            yield examples[:rest], examples[rest:], counts
        if not some:
            raise DataError(
                f"{', '.join(config.train_files)}: no example to train on; of {total.read} read, {total.empty_prompt} "
                f"have an empty prompt and {total.empty_response} an empty response."
            )

    def held_out(self) -> Iterator[tuple[list[Example], ReadCounts]]:
        """Yields the examples of each of `eval_files`, or the synthetic ones."""
        config = self._config
        if config.source == "synthetic":
            made = synthetic.held_out_examples(self._seed, config.eval_examples, config.synthetic_tasks)
            yield self._pairs(made), ReadCounts()
            return
        for entry in config.eval_files:
            yield self._read(entry)

    def _pairs(self, made: list[Example]) -> list[Example]:
        return [self._conversations.pair(pair.prompt, pair.response, "data.source 'synthetic'") for pair in made]

    @functools.cached_property
    def _held_out_counts(self) -> list[int]:
        """How many of each source's last examples are held out: `eval_examples` in proportion to the sizes."""
        config = self._config
        if config.eval_files or not config.eval_examples:
            return [0] * len(config.train_files)
        sizes = np.array([len(self._read(entry)[0]) for entry in config.train_files])
        if 0 < sizes.sum() <= config.eval_examples:
            raise DataError(
                f"data.eval_examples is {config.eval_examples}, but the training files have {sizes.sum()} examples, so "
                "none would remain for training: lower it, or name data.eval_files."
            )
        shares = config.eval_examples * sizes / max(sizes.sum(), 1)
        counts = np.floor(shares).astype(int)
        missing = min(config.eval_examples, int(sizes.sum())) - int(counts.sum())
        counts[np.argsort(counts - shares, kind="stable")[:missing]] += 1  # largest remainders
        return counts.tolist()


def tokenize_corpus(config: DataConfig, corpus: Corpus, tokenizer: Tokenizer) -> Splits:
    """Tokenizes both splits.

    Raises:
      DataError: for data that cannot be read, and when of the training examples, of the held-out ones or of a source
        with a weight none can be used.
    """
    train, held_out = _Collected(config, tokenizer), _Collected(config, tokenizer)
    for examples, last, counts in corpus.train():
        train.add(examples, counts)
        held_out.add(last, ReadCounts())
    require_some(train.counts, train.examples, config.max_length)
    for examples, counts in corpus.held_out():
        held_out.add(examples, counts)
    try:
        require_some(held_out.counts, held_out.examples, config.max_length)
    except DataError as error:
        raise DataError(f"Held-out data: {error}") from error
    for entry, weight, part in zip(config.train_files, config.weights, train.parts, strict=False):
        if not len(part):
            raise DataError(f"{entry}: no example can be used, but data.weights gives it {weight}: leave the file out.")
    return Splits(
        concatenate(train.parts),
        dataclasses.replace(concatenate(held_out.parts), source_sizes=()),
        held_out.texts,
        DataCounts(train.read, held_out.read, train.counts, held_out.counts),
    )


class _Collected:
    """The tokenized sources of one split."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer):
        self._tokenize = functools.partial(
            tokenize_some,
            tokenizer=tokenizer,
            max_length=config.max_length,
            documents=config.format == "text",
            pad_responses=config.pad_responses,
        )
        self.parts: list[TokenizedExamples] = []
        self.texts: list[Example] = []
        self.counts, self.read, self.examples = TokenizeCounts(), ReadCounts(), 0

    def add(self, examples: list[Example], read: ReadCounts) -> None:
        part, counts = self._tokenize(examples)
        self.parts.append(part)
        self.counts += counts
        self.read += read
        self.examples += len(examples)
        self.texts += [examples[i] for i in part.source_ids]
