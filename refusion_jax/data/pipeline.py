"""The way from a `DataConfig` to batches, and the Grain pipeline that reads batches ahead of the training loop."""

import dataclasses
from collections.abc import Iterable

import grain

from refusion_jax.config import DataConfig
from refusion_jax.data import synthetic
from refusion_jax.data.plan import Batch, Batches, TokenizeCounts, TokenizedExamples, tokenize
from refusion_jax.data.records import DataError, Example, ReadCounts, read_examples
from refusion_jax.data.tokenizers import Tokenizer, train_tokenizer


@dataclasses.dataclass(frozen=True)
class DataCounts:
    """What became of the examples. Without files to read, `read` and `read_held_out` count nothing."""

    read: ReadCounts
    read_held_out: ReadCounts
    train: TokenizeCounts
    held_out: TokenizeCounts


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Everything a run reads. `held_out_examples[i]` is the text of `held_out` example `i`, without those dropped."""

    tokenizer: Tokenizer
    train: TokenizedExamples
    held_out: TokenizedExamples
    held_out_examples: list[Example]
    counts: DataCounts


def load_dataset(config: DataConfig, *, seed: int, tokenizer: Tokenizer | None = None) -> Dataset:
    """Reads or generates the examples and tokenizes them.

    Args:
      config: where examples and tokenizer come from.
      seed: seed of the synthetic tasks; files do not depend on it.
      tokenizer: what to use instead of the configured one, such as that of a run which continues.

    Raises:
      DataError: for files or a tokenizer that cannot be used, or when no example is left to train on.
    """
    train, held_out, read, read_held_out = _examples(config, seed)
    if tokenizer is None:
        tokenizer = Tokenizer.load(config.tokenizer) if config.tokenizer else _train_tokenizer(config, train)
    tokenized_train, train_counts = tokenize(train, tokenizer, config.max_length)
    try:
        tokenized_held_out, held_out_counts = tokenize(held_out, tokenizer, config.max_length)
    except DataError as error:
        raise DataError(f"Held-out data: {error}") from error
    kept = [held_out[i] for i in tokenized_held_out.source_ids]
    counts = DataCounts(read, read_held_out, train_counts, held_out_counts)
    return Dataset(tokenizer, tokenized_train, tokenized_held_out, kept, counts)


def _examples(config: DataConfig, seed: int) -> tuple[list[Example], list[Example], ReadCounts, ReadCounts]:
    """Returns training and held-out examples, and the counts of reading the files of either."""
    if config.source == "synthetic":
        train = synthetic.train_examples(seed, config.synthetic_examples)
        return train, synthetic.held_out_examples(seed, config.eval_examples), ReadCounts(), ReadCounts()
    train, read = read_examples(config.train_files, config.prompt_field, config.response_field)
    if not train:
        raise DataError(
            f"{', '.join(config.train_files)}: no example to train on; of {read.read} read, {read.empty_prompt} have "
            f"an empty prompt and {read.empty_response} an empty response."
        )
    if config.eval_files:
        held_out, read_held_out = read_examples(config.eval_files, config.prompt_field, config.response_field)
        return train, held_out, read, read_held_out
    rest = len(train) - config.eval_examples
    if rest <= 0:
        raise DataError(
            f"data.eval_examples is {config.eval_examples}, but the training files have {len(train)} examples, so none "
            "would remain for training: lower it, or name data.eval_files."
        )
    return train[:rest], train[rest:], read, ReadCounts()


def _train_tokenizer(config: DataConfig, examples: Iterable[Example]) -> Tokenizer:
    texts = (text for example in examples for text in (example.prompt, example.response))
    return train_tokenizer(texts, config.tokenizer_type, config.tokenizer_vocab_size)


def make_batches(config: DataConfig, examples: TokenizedExamples, *, seed: int, batch_size: int) -> Batches:
    """Returns the endless batches of examples, in rows of `config.max_length`, packed if `config.pack`.

    Raises:
      DataError: when there are no examples.
    """
    return Batches(examples, seed=seed, batch_size=batch_size, max_length=config.max_length, pack=config.pack)


def iterate(
    batches: grain.sources.RandomAccessDataSource[Batch], start_step: int, *, read_threads: int, prefetch: int
) -> grain.DatasetIterator[Batch]:
    """Reads batches in order from `start_step`, ahead of their use, in threads that start at once.

    A pipeline that starts at a step continues exactly as one that came to it, so the next step is all its state. Call
    the iterator's `close()` to end its threads early.

    Args:
      batches: random access to the batch of each step, such as `Batches`.
      start_step: the first step to read.
      read_threads: threads that make batches.
      prefetch: how many batches to have ready.
    """
    options = grain.ReadOptions(num_threads=read_threads, prefetch_buffer_size=prefetch)
    dataset = grain.MapDataset.source(batches).slice(slice(start_step, None))
    iterator = iter(dataset.to_iter_dataset(options))
    iterator.start_prefetch()
    return iterator
