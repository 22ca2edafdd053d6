"""From text to batches of packed rows: records, synthetic tasks, tokenizers, the packing plan and the pipeline."""

from refusion_jax.data.batches import Batch, Batches
from refusion_jax.data.chat import check_messages
from refusion_jax.data.examples import DataError, Example, ReadCounts
from refusion_jax.data.huggingface_tokenizer import HuggingFaceTokenizer
from refusion_jax.data.pipeline import Dataset, iterate, load_dataset, make_batches
from refusion_jax.data.plan import PackingPlan, max_segments, plan_epoch
from refusion_jax.data.records import read_examples
from refusion_jax.data.sentencepiece_tokenizer import SentencePieceTokenizer, train_tokenizer
from refusion_jax.data.splits import DataCounts
from refusion_jax.data.tokenized import TokenizeCounts, TokenizedExamples, tokenize
from refusion_jax.data.tokenizer_files import find_tokenizer, load_tokenizer
from refusion_jax.data.tokenizers import Tokenizer

__all__ = [
    "Batch",
    "Batches",
    "DataCounts",
    "DataError",
    "Dataset",
    "Example",
    "HuggingFaceTokenizer",
    "PackingPlan",
    "ReadCounts",
    "SentencePieceTokenizer",
    "TokenizeCounts",
    "TokenizedExamples",
    "Tokenizer",
    "check_messages",
    "find_tokenizer",
    "iterate",
    "load_dataset",
    "load_tokenizer",
    "make_batches",
    "max_segments",
    "plan_epoch",
    "read_examples",
    "tokenize",
    "train_tokenizer",
]
