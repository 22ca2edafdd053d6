"""Decoding of the comparison: the settings each system is tried with, and what comes of held-out prompts under them."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import refusion_jax as rf
from benchmarks.compare_loads import loads_of
from benchmarks.compare_projection import ACCELERATORS, Load, projected_tokens_per_second
from refusion_jax.data import Example
from refusion_jax.data.synthetic import task_of

CHIP = "v6e"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to decode.

    Attributes:
      decode: fields of `DecodeConfig`. method: fields of `Method`. trained: the system whose weights it takes.
    """

    decode: dict[str, Any]
    method: dict[str, Any]
    trained: str

    @property
    def text(self) -> str:
        """The settings in a few words."""
        parts = {**self.decode, **self.method}
        return ", ".join(f"{name} {value}" for name, value in parts.items() if name not in ("name", "gen_length"))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of some prompts under one setting.

    Attributes:
      prompts: how many.
      exact_match: share of responses equal to the right one. by_task: the same by task.
      tokens_per_forward: response tokens up to the first EOS by forwards.
      loads: the forwards by kind, fields of `compare_projection.Load`.
    """

    prompts: int
    exact_match: float
    by_task: dict[str, float]
    tokens_per_forward: float
    loads: list[dict[str, Any]]


def slot_settings(algorithm: str, gen_length: int = 96) -> list[Setting]:
    """ReFusion's own decoders over slot sizes and thresholds."""
    return [
        Setting(
            {
                "algorithm": algorithm, "gen_length": gen_length, "slot_size": size, "slot_threshold": slot,
                "token_threshold": token,
            },
            {"name": "refusion"}, "refusion",
        )
        for size, (slot, token) in itertools.product((4, 8, 16, 32), ((0.6, 0.3), (0.9, 0.3), (0.9, 0.9)))
    ]  # fmt: skip


def masked_settings(name: str) -> list[Setting]:
    """LLaDA's and Dream's own decoding: one token per step, everything computed anew."""
    return [
        Setting({"gen_length": 72}, {"name": name, "block_length": block, "ordering": ordering}, name)
        for block, ordering in itertools.product((8, 18, 36, 72), ("confidence", "entropy", "margin"))
    ]


def fast_settings(name: str) -> list[Setting]:
    """Fast-dLLM on LLaDA or Dream: several tokens per step, with or without keys and values kept within a block."""
    ways = ({"threshold": 0.9}, {"factor": 1.0})
    return [
        Setting(
            {"gen_length": 72},
            {"name": name, "block_length": block, "ordering": "confidence", "cache": cache} | way,
            name,
        )
        for block, cache, way in itertools.product((18, 72), ("none", "prefix", "dual"), ways)
    ]


def block_settings() -> list[Setting]:
    """Block diffusion, one or several tokens per step."""
    ways: tuple[dict[str, Any], ...] = ({}, {"threshold": 0.7}, {"threshold": 0.9}, {"factor": 1.0})
    return [
        Setting({"gen_length": 80}, {"name": "block_diffusion", "block_length": block} | way, "block_diffusion")
        for block, way in itertools.product((4, 8, 16), ways)
    ]


# Twelve settings for each pair of weights and decoder, but for the one that has nothing to set.
SETTINGS: dict[str, list[Setting]] = {
    "refusion": slot_settings("self_correcting"),
    "refusion_paper_decoding": slot_settings("paper"),
    "autoregressive": [Setting({"gen_length": 72}, {"name": "autoregressive"}, "autoregressive")],
    "llada": masked_settings("llada"),
    "dream": masked_settings("dream"),
    "fast_dllm": [*fast_settings("llada"), *fast_settings("dream")],
    "block_diffusion": block_settings(),
}


def decode(
    model: rf.Model, examples: Sequence[Example], setting: Setting, batch_size: int
) -> tuple[rf.Generation, rf.Statistics]:
    """Answers to the examples' prompts, and what decoding them took."""
    measured = rf.Statistics()
    answers = rf.generate(
        model, [example.prompt for example in examples], rf.DecodeConfig(**setting.decode),
        method=rf.Method(**setting.method), batch_size=batch_size, statistics=measured,
    )  # fmt: skip
    return answers, measured


def encoded(model: rf.Model, example: Example) -> tuple[list[int], list[int]]:
    """Prompt and response with EOS, as token IDs."""
    tokenizer = model.tokenizer
    assert tokenizer is not None  # every run has one
    return tokenizer.encode(example.prompt), [*tokenizer.encode(example.response), tokenizer.eos_token_id]


def outcome(model: rf.Model, examples: Sequence[Example], setting: Setting, batch_size: int) -> Outcome:
    """Decodes the examples' prompts and compares the responses token for token, EOS included."""
    answers, measured = decode(model, examples, setting, batch_size)
    pairs = [encoded(model, example) for example in examples]
    right = [list(tokens) == gold for tokens, (_, gold) in zip(answers.tokens, pairs, strict=True)]
    by_task: dict[str, list[bool]] = {}
    for example, is_right in zip(examples, right, strict=True):
        by_task.setdefault(task_of(example.prompt), []).append(is_right)
    prompts = [len(prompt) for prompt, _ in pairs]
    loads = loads_of(setting.decode, setting.method, prompts, answers, measured, model.config.eos_token_ids)
    return Outcome(
        prompts=len(examples),
        exact_match=statistics.mean(right),
        by_task={task: statistics.mean(values) for task, values in by_task.items()},
        tokens_per_forward=measured.tokens / measured.forwards,
        loads=[dataclasses.asdict(load) for load in loads],
    )


def timing(model: rf.Model, examples: Sequence[Example], setting: Setting, batch_size: int) -> float:
    """Tokens per second, without compiling."""
    _, measured = decode(model, examples, setting, batch_size)
    return measured.tokens / (measured.prefill_seconds + measured.decode_seconds)


def projected(setting: Setting, found: Outcome) -> dict[str, float]:
    """Tokens per second of an 8B model, by chip."""
    loads = [Load(**load) for load in found.loads]
    return {
        name: projected_tokens_per_second(chip, loads, setting.decode["gen_length"], found.tokens_per_forward)
        for name, chip in ACCELERATORS.items()
    }


def choose(tried: Sequence[tuple[Setting, Outcome]]) -> Setting:
    """The fastest, as projected, of the settings whose exact match is within one standard error of the best."""
    best = max((found for _, found in tried), key=lambda found: found.exact_match)
    enough = best.exact_match - math.sqrt(best.exact_match * (1 - best.exact_match) / best.prompts)
    good = [(projected(setting, found)[CHIP], setting) for setting, found in tried if found.exact_match >= enough]
    return max(good, key=lambda each: each[0])[1]
