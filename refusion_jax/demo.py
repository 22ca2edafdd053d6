"""Puts a model trained on the four synthetic tasks to the test: prompts it never saw, decoded by both algorithms.

    python -m refusion_jax.demo --checkpoint=runs/demo

Prints exact match and tokens per forward, shows a few answers with the forward that committed each character, and adds
the figures to the run's summary.json.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from refusion_jax import command_line
from refusion_jax.api import Model, generate, load
from refusion_jax.config import ConfigError, DecodeConfig
from refusion_jax.data import Example
from refusion_jax.data.synthetic import held_out_examples, task_of
from refusion_jax.decoding import Generation
from refusion_jax.files import write_json
from refusion_jax.host_memory import keep_freed_memory
from refusion_jax.training.loop import SUMMARY_NAME
from refusion_jax.training.run_directory import read_run_config

FLAGS = flags.FlagValues()
flags.DEFINE_string("checkpoint", "runs/demo", "Run directory of a model trained on them.", flag_values=FLAGS)
flags.DEFINE_integer("prompts", 400, "How many held-out prompts to decode.", flag_values=FLAGS)
flags.DEFINE_integer("batch_size", 16, "Prompts decoded at once.", flag_values=FLAGS)

_COLOURS = (32, 36, 33, 35, 34, 31, 92, 96, 93, 95, 94, 91)
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclasses.dataclass(frozen=True)
class Score:
    """How well and how fast one algorithm decodes."""

    exact_match: float
    tokens_per_forward: float
    by_task: dict[str, float]
    seconds: float


def main(args: flags.FlagValues) -> None:
    """Decodes, prints and writes the summary."""
    if args.prompts < 1:
        raise ConfigError(f"--prompts is {args.prompts}; decode at least one.")
    keep_freed_memory()
    run_directory = Path(args.checkpoint)
    run = read_run_config(run_directory)
    if run.data.source != "synthetic":
        raise ConfigError(f"{run_directory} was trained on {run.data.source!r} data; the demo's tasks are 'synthetic'.")
    model = load(run_directory)
    examples = held_out_examples(run.train.seed, args.prompts, run.data.synthetic_tasks)
    paper = dataclasses.replace(run.decode, algorithm="paper", redraft=False)
    ours = dataclasses.replace(run.decode, algorithm="self_correcting")
    print(f"\nDecoding {len(examples)} prompts that training never saw, slots of {ours.slot_size} tokens:")
    result, score = evaluate(model, examples, ours, args.batch_size)
    _, paper_score = evaluate(model, examples, paper, args.batch_size)
    _print_scores({"self_correcting (default)": score, "paper": paper_score})
    _print_answers(examples, result)
    _write_summary(run_directory / SUMMARY_NAME, len(examples), score, paper_score)
    print(f"What to type next:\n  .venv/bin/python decode.py --checkpoint={run_directory} --prompt='S:7+1+7+5?'")
    print(f"  .venv/bin/python decode.py --checkpoint={run_directory} --prompt='A:klmn?' --algorithm=paper")


def evaluate(
    model: Model, examples: Sequence[Example], config: DecodeConfig, batch_size: int
) -> tuple[Generation, Score]:
    """Decodes the examples' prompts and compares with their responses. The time includes compilation."""
    start = time.perf_counter()
    result = generate(model, [example.prompt for example in examples], config, batch_size=batch_size)
    seconds = time.perf_counter() - start
    assert model.tokenizer is not None  # every run has one
    right: dict[str, list[bool]] = {}
    for example, tokens in zip(examples, result.tokens, strict=True):
        gold = [*model.tokenizer.encode(example.response), model.tokenizer.eos_token_id]
        right.setdefault(task_of(example.prompt), []).append(tokens == gold)
    by_task = {task: sum(answers) / len(answers) for task, answers in right.items()}
    exact_match = sum(sum(answers) for answers in right.values()) / len(examples)
    return result, Score(exact_match, sum(map(len, result.tokens)) / sum(result.forwards), by_task, seconds)


def _print_scores(scores: dict[str, Score]) -> None:
    tasks = list(next(iter(scores.values())).by_task)
    print(
        f"\n{'algorithm':<26}{'exact match':>12}{'tokens/forward':>16}{'seconds':>9}"
        + "".join(f"{t:>8}" for t in tasks)
    )
    for name, score in scores.items():
        numbers = f"{score.exact_match:>12.3f}{score.tokens_per_forward:>16.2f}{score.seconds:>9.1f}"
        print(f"{name:<26}{numbers}" + "".join(f"{score.by_task[task]:>8.2f}" for task in tasks))


def _print_answers(examples: Sequence[Example], result: Generation) -> None:
    """One answer per task; below each character the forward that committed it, 0 being the first draft."""
    print("\nSome answers; the line below each tells which forward committed a character (0 is the first draft):")
    assert result.text is not None
    shown = set()
    for example, text, order in zip(examples, result.text, result.order, strict=True):
        task = task_of(example.prompt)
        if task in shown:
            continue
        shown.add(task)
        # One token per character in the demo's vocabulary, and the EOS has none.
        forwards = order[: len(text)]
        print(f"\n  {example.prompt}\n    {_coloured(text, forwards)}\n    {_coloured(_marks(forwards), forwards)}")
    print()


def _marks(forwards: Sequence[int]) -> str:
    return "".join(_DIGITS[forward] if forward < len(_DIGITS) else "+" for forward in forwards)


def _coloured(text: str, forwards: Sequence[int]) -> str:
    if not sys.stdout.isatty():
        return text
    pairs = zip(text, forwards, strict=True)
    return "".join(f"\033[{_COLOURS[forward % len(_COLOURS)]}m{char}" for char, forward in pairs) + "\033[0m"


def _write_summary(path: Path, prompts: int, score: Score, paper: Score) -> None:
    trained: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    decode_seconds = score.seconds + paper.seconds
    summary = trained | {
        "prompts": prompts,
        "exact_match": score.exact_match,
        "tokens_per_forward": score.tokens_per_forward,
        "exact_match_by_task": score.by_task,
        "paper": {"exact_match": paper.exact_match, "tokens_per_forward": paper.tokens_per_forward},
        "decode_seconds": decode_seconds,
        "seconds": trained.get("train_seconds", 0.0) + decode_seconds,
    }
    write_json(path, summary)
    print(f"{path}: {summary['seconds']:.0f} s of training and decoding together.")


if __name__ == "__main__":
    command_line.run(main, FLAGS)
