"""Infilling the middle of a known text, next to continuing it from the left without seeing what follows.

    python benchmarks/infilling.py

The texts are random letters that are said twice. A stretch of the first saying is missing: the second one, to the right
of it, tells it, and nothing to the left does. So whoever sees the left side only must guess.

The model is trained first, in a few minutes, unless --checkpoint is the run directory of one that has been. Prints the
exact match of the missing stretch over texts that training never saw.
"""

import dataclasses
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a script finds its own directory only

import refusion_jax as rf
from benchmarks import common
from refusion_jax import Config, DecodeConfig, command_line
from refusion_jax.files import write_json
from refusion_jax.host_memory import keep_freed_memory
from refusion_jax.methods import UNKNOWN
from refusion_jax.training.loop import train
from refusion_jax.training.run_directory import CHECKPOINTS_NAME

FLAGS = flags.FlagValues()
flags.DEFINE_string("checkpoint", "runs/infilling", "Run directory; trained there if need be.", flag_values=FLAGS)
flags.DEFINE_integer("steps", 1_000, "Training steps.", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("texts", 200, "Texts to decode.", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("batch_size", 16, "Rows decoded at once.", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_string("output", None, "Default: benchmarks/results/infilling_BACKEND.json.", flag_values=FLAGS)

PROMPT = "T?"
LETTERS, LENGTH = "abcdefghij", 12
HOLE = slice(4, 8)  # of the first saying
TRAINING_TEXTS = 60_000
DECODE = DecodeConfig(gen_length=HOLE.stop - HOLE.start, slot_size=HOLE.stop - HOLE.start)


@dataclasses.dataclass(frozen=True)
class Gap:
    """A text with a stretch missing."""

    left: str
    hole: str
    right: str

    @property
    def template(self) -> dict[str, Any]:
        """What `rf.generate` takes to fill it."""
        return {"segments": [self.left, {"hole": len(self.hole)}, self.right]}


def twice(draws: random.Random) -> str:
    """A response: random letters, said twice."""
    letters = "".join(draws.choice(LETTERS) for _ in range(LENGTH))
    return f"{letters}{letters}."


def make_gaps(count: int) -> list[Gap]:
    """Texts with a gap; their seed is not that of the training texts, and there are 10**12 texts."""
    draws = random.Random("gaps")
    texts = [twice(draws) for _ in range(count)]
    return [Gap(PROMPT + text[: HOLE.start], text[HOLE], text[HOLE.stop :]) for text in texts]


def train_model(directory: Path, steps: int) -> None:
    """Trains the demo's model on texts said twice."""
    directory.mkdir(parents=True, exist_ok=True)
    texts = directory / "texts.jsonl"
    draws = random.Random("training")
    lines = [json.dumps({"query": PROMPT, "response": twice(draws)}) + "\n" for _ in range(TRAINING_TEXTS)]
    texts.write_text("".join(lines))
    overrides = {
        "data.source": "json",
        "data.train_files": str(texts),
        "train.steps": steps,
        "optimizer.warmup_steps": min(100, steps),
        "train.eval_every": 0,
        "train.eval_decode_examples": 0,
    }
    command = ["--config=demo", *(f"--config.{name}={value}" for name, value in overrides.items())]
    train(demo_config(command), directory)


def demo_config(arguments: Sequence[str]) -> Config:
    """The demo's settings, changed as on the command line."""
    values = flags.FlagValues()
    command_line.define_config(values)
    return command_line.parse(arguments, values).config


def exact_match(answers: Sequence[Sequence[int]], golds: Sequence[Sequence[int]]) -> float:
    """The share of answers that are as expected."""
    return sum(list(a) == list(g) for a, g in zip(answers, golds, strict=True)) / len(golds)


def measure(model: rf.Model, gaps: Sequence[Gap], batch_size: int) -> dict[str, float]:
    """Exact match of the missing stretch: with both sides in view, and with the left one only, in two ways."""
    assert model.tokenizer is not None  # every run has one
    golds = [model.tokenizer.encode(gap.hole) for gap in gaps]
    lefts = [gap.left for gap in gaps]
    filled = rf.generate(model, [gap.template for gap in gaps], DECODE, batch_size=batch_size)
    blind = rf.generate(model, lefts, DECODE, batch_size=batch_size)
    plain = rf.generate(
        model,
        lefts,
        DECODE,
        batch_size=batch_size,
        method=rf.Method("autoregressive"),
        allow_objective=model.objective or UNKNOWN,
    )
    return {
        "infilling": exact_match([holes[0] for holes in filled.holes], golds),
        "refusion_without_right_side": exact_match(blind.tokens, golds),
        "left_to_right": exact_match(plain.tokens, golds),
    }


def main(args: flags.FlagValues) -> None:
    """Trains if need be, measures, prints and writes the result."""
    keep_freed_memory()
    output = common.result_path(args.output, "infilling")
    directory = Path(args.checkpoint)
    if not (directory / CHECKPOINTS_NAME).is_dir():
        train_model(directory, args.steps)
    result: dict[str, Any] = {"commit": common.commit(), "machine": common.machine(), "versions": common.versions()}
    gaps = make_gaps(args.texts)
    matches = measure(rf.load(directory), gaps, args.batch_size)
    gap = gaps[0]
    print(f"\n{gap.left}[{gap.hole}]{gap.right}, and {len(gaps) - 1} like it; exact match of the missing stretch:\n")
    rows = [
        ("infilling, both sides in view", f"{matches['infilling']:.3f}"),
        ("ReFusion, left side only", f"{matches['refusion_without_right_side']:.3f}"),
        ("left to right, greedy", f"{matches['left_to_right']:.3f}"),
    ]
    print(common.table(["decoding", "exact match"], rows))
    write_json(output, result | {"texts": len(gaps), "hole_length": len(gap.hole), "exact_match": matches})
    print(f"\nWritten to {output}.")


if __name__ == "__main__":
    command_line.run(main, FLAGS)
