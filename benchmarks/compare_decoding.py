"""Decoding of the comparison: the settings each system is tried with, and what comes of held-out prompts under them."""

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.compare_projection import (
    ACCELERATORS,
    Measured,
    projected_tokens_per_second,
    scaled,
)

import refusion_jax as rf
from refusion_jax.data import Example
from refusion_jax.data.synthetic import task_of

CHIP = "v6e"
# Settings as good as the best but for so much of exact match compete by speed: the noise of a validation set.
TOLERANCE = 0.01


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to decode.

    Attributes:
      decode: fields of `DecodeConfig`. method: fields of `Method`. trained: the system whose weights it takes.
      projected: which of `compare_projection.SYSTEMS` its forwards are.
    """

    decode: dict[str, Any]
    method: dict[str, Any]
    trained: str
    projected: str

    @property
    def text(self) -> str:
        """The settings in a few words."""
        parts = {**self.decode, **self.method}
        parts.pop("name", None)
        parts.pop("gen_length", None)
        return ", ".join(f"{name} {value}" for name, value in parts.items())


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of some prompts under one setting.

    Attributes:
      exact_match: share of responses equal to the right one. by_task: the same by task.
      tokens_per_forward: response tokens up to the first EOS by forwards.
      forward: the mean forward of an 8B model's decoding that was projected from these.
      projected: tokens/s by chip.
      tokens_per_second: measured here, without compiling, of batches; tokens_per_second_alone: of single responses.
    """

    exact_match: float
    by_task: dict[str, float]
    tokens_per_forward: float
    forward: dict[str, float]
    projected: dict[str, float]
    tokens_per_second: float
    tokens_per_second_alone: float = 0.0


def slot_settings(algorithm: str, gen_length: int = 96) -> list[Setting]:
    """ReFusion's own decoders over slot sizes and thresholds."""
    return [
        Setting(
            {
                "algorithm": algorithm, "gen_length": gen_length, "slot_size": size, "slot_threshold": slot,
                "token_threshold": token,
            },
            {"name": "refusion"}, "refusion", "refusion",
        )
        for size, (slot, token) in itertools.product((4, 8, 16, 32), ((0.6, 0.3), (0.9, 0.3), (0.9, 0.9)))
    ]  # fmt: skip


def masked_settings(name: str) -> list[Setting]:
    """LLaDA's and Dream's own decoding: one token per step, everything computed anew."""
    return [
        Setting({"gen_length": 72}, {"name": name, "block_length": block, "ordering": ordering}, name,
                "masked_diffusion")
        for block, ordering in itertools.product((8, 18, 36, 72), ("confidence", "entropy", "margin"))
    ]  # fmt: skip


def fast_settings(name: str) -> list[Setting]:
    """Fast-dLLM on LLaDA or Dream: several tokens per step, keys and values kept within a block."""
    ways = ({"threshold": 0.7}, {"threshold": 0.9}, {"factor": 1.0})
    return [
        Setting({"gen_length": 72},
                {"name": name, "block_length": block, "ordering": "confidence", "cache": cache} | way,
                name, "cached_masked_diffusion")
        for block, cache, way in itertools.product((8, 18), ("prefix", "dual"), ways)
    ]  # fmt: skip


def block_settings() -> list[Setting]:
    """Block diffusion, one or several tokens per step."""
    ways: tuple[dict[str, Any], ...] = ({}, {"threshold": 0.7}, {"threshold": 0.9}, {"factor": 1.0})
    return [
        Setting({"gen_length": 80}, {"name": "block_diffusion", "block_length": block} | way, "block_diffusion",
                "block_diffusion")
        for block, way in itertools.product((4, 8, 16), ways)
    ]  # fmt: skip


# Twelve settings for each pair of weights and decoder, but for the one that has nothing to set.
SETTINGS: dict[str, list[Setting]] = {
    "refusion": slot_settings("self_correcting"),
    "refusion_paper_decoding": slot_settings("paper"),
    "autoregressive": [Setting({"gen_length": 72}, {"name": "autoregressive"}, "autoregressive", "autoregressive")],
    "llada": masked_settings("llada"),
    "dream": masked_settings("dream"),
    "fast_dllm": [*fast_settings("llada"), *fast_settings("dream")],
    "block_diffusion": block_settings(),
}


def outcome(model: rf.Model, examples: Sequence[Example], setting: Setting, batch_size: int) -> Outcome:
    """Decodes the examples' prompts and compares the responses token for token, EOS included."""
    assert model.tokenizer is not None
    measured = rf.Statistics()
    config = rf.DecodeConfig(**setting.decode)
    answers = rf.generate(
        model, [example.prompt for example in examples], config, method=rf.Method(**setting.method),
        batch_size=batch_size, statistics=measured,
    )  # fmt: skip
    golds = [[*model.tokenizer.encode(each.response), model.tokenizer.eos_token_id] for each in examples]
    right = [list(tokens) == gold for tokens, gold in zip(answers.tokens, golds, strict=True)]
    prompts = [len(model.tokenizer.encode(example.prompt)) for example in examples]
    per_forward = measured.tokens / measured.forwards
    mean = scaled(setting.projected, _mean_forward(setting, prompts, answers, measured))
    by_task: dict[str, list[bool]] = {}
    for example, is_right in zip(examples, right, strict=True):
        by_task.setdefault(task_of(example.prompt), []).append(is_right)
    return Outcome(
        exact_match=statistics.mean(right),
        by_task={task: statistics.mean(values) for task, values in by_task.items()},
        tokens_per_forward=per_forward,
        forward=dataclasses.asdict(mean),
        projected={name: projected_tokens_per_second(chip, mean, per_forward) for name, chip in ACCELERATORS.items()},
        tokens_per_second=measured.tokens / (measured.prefill_seconds + measured.decode_seconds),
    )


def _mean_forward(
    setting: Setting, prompts: Sequence[int], answers: rf.Generation, measured: rf.Statistics
) -> Measured:
    kept, whole = measured.cached, [0] * len(prompts)
    if setting.projected == "refusion":
        kept = sum(map(_keys_read, prompts, answers.order, answers.forwards))
    elif setting.projected == "masked_diffusion":
        whole = answers.forwards
    elif setting.projected == "cached_masked_diffusion":
        length = setting.method["block_length"]  # every block begins with a forward over everything
        whole = [
            len({(position - prompt) // length for position in positions})
            for prompt, positions in zip(prompts, answers.position_ids, strict=True)
        ]
    return Measured.of(
        setting.decode["gen_length"], prompts, answers.forwards, [measured.needed_positions], [kept], whole
    )


def _keys_read(prompt: int, order: Sequence[int], forwards: int) -> int:
    """Keys that a row's forwards read: the prompt's, and those of tokens that earlier forwards committed."""
    return forwards * prompt + sum(forwards - 1 - each for each in order)


def choose(tried: Sequence[tuple[Setting, Outcome]]) -> Setting:
    """The fastest, as projected, of the settings that are within `TOLERANCE` of the best exact match."""
    best = max(found.exact_match for _, found in tried)
    good = [(found.projected[CHIP], setting) for setting, found in tried if found.exact_match >= best - TOLERANCE]
    return max(good, key=lambda each: each[0])[1]
