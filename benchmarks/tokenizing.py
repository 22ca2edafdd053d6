"""Seconds from 10,000 conversations to token IDs, through a chat template.

    python benchmarks/tokenizing.py --data=PATH/gsm8k/train.jsonl

The examples are GSM8K's, each a user's and an assistant's turn, repeated up to the number asked for. Qwen3's template
writes each twice, up to the response and whole, and a byte-level BPE of 16,384 tokens, trained on the examples, encodes
both; that the token IDs of the one begin those of the other is checked. Beside it a sentencepiece model, for which
ChatML is written up to the response. Training the tokenizers is not timed.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from absl import flags

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a script finds its own directory only

from benchmarks import common
from benchmarks.common import of, spread
from refusion_jax import ConfigError, command_line
from refusion_jax.config import DataConfig
from refusion_jax.data import HuggingFaceTokenizer, Tokenizer, tokenize, train_tokenizer
from refusion_jax.data.conversations import Conversations
from refusion_jax.data.readers import read_objects
from refusion_jax.files import write_json
from tests import byte_level

FLAGS = flags.FlagValues()
flags.DEFINE_string("data", "../shared/data/gsm8k/train.jsonl", "GSM8K's training file.", flag_values=FLAGS)
flags.DEFINE_integer("examples", 10_000, "Conversations.", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("rounds", 3, "Rounds to measure.", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_string("output", None, "Default: benchmarks/results/tokenizing_BACKEND.json.", flag_values=FLAGS)

VOCAB_SIZE = 16_384
MAX_LENGTH = 2_048

Conversation = list[dict[str, str]]


def read_conversations(path: str, count: int) -> list[Conversation]:
    """The first `count` conversations of a file, over and over if it has fewer."""
    pairs = [(value["question"], value["answer"]) for _, value in read_objects("json", path)]
    if not pairs:
        raise ConfigError(f"--data is {path}, which has no examples.")
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]
    return list(itertools.islice(itertools.cycle(turns), count))


def train_byte_level(texts: Sequence[str]) -> HuggingFaceTokenizer:
    """A tokenizer like Qwen3's, with its chat template."""
    tokenizer = byte_level.train(texts, VOCAB_SIZE, plain=())
    config = {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": (byte_level.TEMPLATES / "qwen3.jinja").read_text(),
    }
    return HuggingFaceTokenizer(
        {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    )


def measure(conversations: Sequence[Conversation], tokenizer: Tokenizer) -> dict[str, float]:
    """Seconds of rendering and of tokenizing, and how many tokens that made."""
    writer = Conversations.of(DataConfig(), tokenizer)
    began = time.perf_counter()
    examples = [example for turns in conversations for example in writer.examples(turns, "conversation")]
    rendered = time.perf_counter()
    tokenized, counts = tokenize(examples, tokenizer, MAX_LENGTH)
    ended = time.perf_counter()
    assert counts.kept == len(conversations)
    return {
        "render_seconds": rendered - began,
        "tokenize_seconds": ended - rendered,
        "seconds": ended - began,
        "tokens": len(tokenized.tokens),
    }


def summarise(rounds: Sequence[dict[str, float]], examples: int) -> dict[str, Any]:
    """Spreads of a tokenizer's rounds."""
    names = ("render_seconds", "tokenize_seconds", "seconds")
    return {name: spread([each[name] for each in rounds]) for name in names} | {
        "examples_per_second": spread([examples / each["seconds"] for each in rounds]),
        "tokens": int(statistics.median(each["tokens"] for each in rounds)),
    }


def main(args: flags.FlagValues) -> None:
    """Trains the tokenizers, measures, prints and writes the result."""
    output = common.result_path(args.output, "tokenizing")
    conversations = read_conversations(args.data, args.examples)
    texts = [turn["content"] for turns in conversations for turn in turns]
    known = {
        "byte-level BPE, whole by Qwen3's template": train_byte_level(texts),
        "sentencepiece BPE, ChatML up to the response": train_tokenizer(texts, "bpe", VOCAB_SIZE),
    }
    on = common.machine()
    common.warn_if_busy(on)
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in known}
    for _ in range(args.rounds):
        for name, tokenizer in known.items():
            measured[name].append(measure(conversations, tokenizer))
    summaries = {name: summarise(rounds, len(conversations)) for name, rounds in measured.items()}
    header = ["tokenizer", "rendering, s", "tokenizing, s", "together, s", "examples/s", "tokens"]
    rows = [
        (
            name,
            of(summary["render_seconds"], ".2f"),
            of(summary["tokenize_seconds"], ".2f"),
            of(summary["seconds"], ".2f"),
            of(summary["examples_per_second"], ",.0f"),
            f"{summary['tokens']:,}",
        )
        for name, summary in summaries.items()
    ]
    print(f"{len(conversations):,} conversations; median (least to greatest) of {args.rounds} rounds:\n")
    print(common.table(header, rows))
    versions = common.versions() | {"tokenizers": tokenizers.__version__}
    about = {"commit": common.commit(), "machine": on, "versions": versions, "examples": len(conversations)}
    write_json(output, about | {"rounds": args.rounds, "tokenizers": summaries})
    print(f"\nWritten to {output}.")


if __name__ == "__main__":
    command_line.run(main, FLAGS)
