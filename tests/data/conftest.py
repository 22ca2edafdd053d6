"""Synthetic examples, tokenized."""

import pytest

from refusion_jax.data import synthetic
from refusion_jax.data.sentencepiece_tokenizer import train_tokenizer
from refusion_jax.data.tokenized import tokenize


def texts(examples):
    return [text for example in examples for text in (example.prompt, example.response)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(texts(synthetic.train_examples(0, 200)), "char", 1_000)


@pytest.fixture(scope="module")
def examples(tokenizer):
    return tokenize(synthetic.train_examples(0, 1_000), tokenizer, 128)[0]
