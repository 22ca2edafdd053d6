"""Which forwards answers took, for the projection: counted from what each answer tells of its tokens."""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import refusion_jax as rf
from benchmarks.compare_projection import Load


def loads_of(
    settings: dict[str, Any], method: dict[str, Any], prompts: Sequence[int], answers: rf.Generation,
    measured: rf.Statistics, eos_ids: Sequence[int],
) -> list[Load]:  # fmt: skip
    """The forwards of a decode by kind.

    Args:
      settings, method: fields of `DecodeConfig` and of `Method`.
      prompts: tokens of each.
      answers: to them.
      measured: what decoding them counted.
      eos_ids: tokens that end a response.
    """
    length, forwards = settings["gen_length"], sum(answers.forwards)
    match method["name"]:
        case "refusion" if settings["algorithm"] == "self_correcting":
            offsets = (_offsets(*each) for each in zip(prompts, answers.position_ids, strict=True))
            rows = zip(offsets, answers.committed, answers.order, answers.forwards, strict=True)
            return _counted(
                step for row in rows for step in _steps_of_slots(length, settings["slot_size"], *row, eos_ids)
            )
        case "refusion":  # infilling is of a few slots at a time: what its forwards had in the mean
            kept = sum(_keys_read(*each) for each in zip(answers.order, answers.forwards, strict=True))
            return [Load("slots", measured.needed_positions / forwards, kept / forwards, forwards)]
        case "autoregressive":
            return _counted(("causal", 1, kept) for row in answers.forwards for kept in range(row))
        case "block_diffusion":
            prompt_keys = sum(p * f for p, f in zip(prompts, answers.forwards, strict=True))
            kept = measured.cached - prompt_keys
            return [Load("block", measured.needed_positions / forwards, kept / forwards, forwards)]
    if method.get("cache", "none") == "none":
        return [Load("whole", length, 0, forwards)]
    # Every block begins with a forward over everything.
    block = method["block_length"]
    begun = [len({o // block for o in _offsets(*each)}) for each in zip(prompts, answers.position_ids, strict=True)]
    whole, rest = sum(begun), forwards - sum(begun)
    loads = [Load("whole", length, 0, whole)]
    if rest:
        positions = sum(b * (p + length) for b, p in zip(begun, prompts, strict=True))
        prompt_keys = sum((f - b) * p for f, b, p in zip(answers.forwards, begun, prompts, strict=True))
        width, kept = measured.needed_positions - positions, measured.cached - prompt_keys
        loads.append(Load("window" if method["cache"] == "dual" else "rest", width / rest, kept / rest, rest))
    return loads


def _offsets(prompt: int, position_ids: Sequence[int]) -> list[int]:
    return [position - prompt for position in position_ids]


def _counted(steps: Iterable[tuple[str, float, float]]) -> list[Load]:
    return [Load(*step, count) for step, count in sorted(collections.Counter(steps).items())]


def _keys_read(order: Sequence[int], forwards: int) -> int:
    """Keys of a response that its forwards read: those of tokens that earlier forwards committed."""
    return sum(forwards - 1 - each for each in order)


def _steps_of_slots(
    length: int, size: int, offsets: Sequence[int], tokens: Sequence[int], order: Sequence[int], forwards: int,
    eos_ids: Sequence[int],
) -> list[tuple[str, int, int]]:  # fmt: skip
    """(kind, open positions, committed keys) of each forward of a self-correcting decode in one serial block.

    A slot is open up to the forward that commits it; one that never is, up to the first that brings an EOS before it.
    """
    committed, dropped = {}, dict.fromkeys(range(length // size), forwards - 1)
    for offset, token, forward in zip(offsets, tokens, order, strict=True):
        committed[offset // size] = forward
        if token in eos_ids:
            for slot in range(offset // size, length // size):
                dropped[slot] = min(dropped[slot], forward)
    closed = [committed.get(slot, dropped[slot]) for slot in range(length // size)]
    return [
        ("slots", size * sum(until >= forward for until in closed), sum(each < forward for each in order))
        for forward in range(forwards)
    ]
