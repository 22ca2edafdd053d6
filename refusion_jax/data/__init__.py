"""From text to batches of packed rows: records, synthetic tasks, tokenizers, the packing plan and the pipeline."""

from refusion_jax.data.pipeline import DataCounts, Dataset, iterate, load_dataset, make_batches
from refusion_jax.data.plan import (
    Batch,
    Batches,
    PackingPlan,
    TokenizeCounts,
    TokenizedExamples,
    max_segments,
    plan_epoch,
    tokenize,
)
from refusion_jax.data.records import DataError, Example, ReadCounts, read_examples
from refusion_jax.data.tokenizers import Tokenizer, train_tokenizer

__all__ = [
    "Batch",
    "Batches",
    "DataCounts",
    "DataError",
    "Dataset",
    "Example",
    "PackingPlan",
    "ReadCounts",
    "TokenizeCounts",
    "TokenizedExamples",
    "Tokenizer",
    "iterate",
    "load_dataset",
    "make_batches",
    "max_segments",
    "plan_epoch",
    "read_examples",
    "tokenize",
    "train_tokenizer",
]
