"""From text to batches of packed rows: records, synthetic tasks, tokenizers, the packing plan and the pipeline."""

from refusion_jax.data.batches import Batch, Batches
from refusion_jax.data.chat import render_messages
from refusion_jax.data.examples import DataError, Example, ReadCounts
from refusion_jax.data.pipeline import Dataset, iterate, load_dataset, make_batches
from refusion_jax.data.plan import PackingPlan, max_segments, plan_epoch
from refusion_jax.data.records import read_examples
from refusion_jax.data.splits import DataCounts
from refusion_jax.data.tokenized import TokenizeCounts, TokenizedExamples, tokenize
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
    "render_messages",
    "tokenize",
    "train_tokenizer",
]
