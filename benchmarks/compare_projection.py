"""Tokens per second that an 8B model would reach on a chip, from what decoding takes at small scale.

A forward takes as long as the slower of two things: moving its bytes (the weights, the keys and values it reads and
those it writes) at the chip's memory bandwidth, or computing its FLOPs at the chip's peak. This is batch 1, a prompt of
512 tokens and a response of 512, in bfloat16, with no overhead of any kind. Forwards of different kinds are projected
each by itself, for a mean one would be faster than they are together. Systems that keep the prompt's keys and values
compute them once per response; the others compute the prompt again and again, and that is counted there.
"""

import dataclasses
from collections.abc import Sequence

from refusion_jax.compilation.topologies import CHIPS
from refusion_jax.config import ConfigError, ModelConfig, nearest
from refusion_jax.modeling.sizes import qwen3
from refusion_jax.training.flops import PEAK_FLOPS, encoding_flops_per_token, forward_flops_per_token

MODEL = qwen3("8B")
PROMPT_LENGTH = RESPONSE_LENGTH = 512
_BYTES = 2  # of a number in bfloat16


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One chip as its maker states it: bfloat16 FLOP/s, and bytes/s of its memory."""

    flops: float
    bandwidth: float


ACCELERATORS = {name: Accelerator(chip.flops, chip.bandwidth) for name, chip in CHIPS.items()}
ACCELERATORS["H200"] = Accelerator(PEAK_FLOPS["H200"], 4.8e12)


@dataclasses.dataclass(frozen=True)
class Forward:
    """A mean forward of one response: query positions computed, and keys read that earlier forwards kept."""

    width: float
    cached: float


KINDS = ("causal", "whole", "rest", "window", "slots", "block")


@dataclasses.dataclass(frozen=True)
class Load:
    """Forwards of one kind at small scale, of which `count` were alike.

    Attributes:
      kind: one of `KINDS`, see `scaled`.
      width: query positions in the response. cached: keys of the response read from a buffer.
      count: how many.
    """

    kind: str
    width: float
    cached: float
    count: int


def scaled(
    load: Load, gen_length: int, prompt_length: int = PROMPT_LENGTH, response_length: int = RESPONSE_LENGTH
) -> Forward:
    """Such a forward with a prompt and a response of these lengths, at the same tokens per forward.

    What grows with the response does so by `r = response_length / gen_length`; blocks of any kind keep their length.

      causal   computes 1 position, and reads the prompt and `r` times the response's keys.
      whole    computes prompt and response, and reads nothing.
      rest     computes `r` times the positions: a block and all behind it; reads the prompt and `r` times the keys.
      window   computes the positions of a block, and reads all others' keys.
      slots    computes `r` times the positions: the open slots; reads the prompt and `r` times the keys.
      block    computes the positions of a block or two, and reads the prompt and `r` times the keys.

    Args:
      load: at small scale.
      gen_length: response tokens that were asked for there.
      prompt_length, response_length: tokens.

    Raises:
      ConfigError: for another kind.
    """
    r = response_length / gen_length
    kept = prompt_length + r * load.cached
    match load.kind:
        case "causal":
            return Forward(1.0, kept)
        case "whole":
            return Forward(float(prompt_length + response_length), 0.0)
        case "rest" | "slots":
            return Forward(r * load.width, kept)
        case "window":
            return Forward(load.width, prompt_length + response_length - load.width)
        case "block":
            return Forward(load.width, kept)
    raise ConfigError(f"There is no kind {load.kind!r} of forwards to project.{nearest(load.kind, KINDS)}")


def forward_bytes(forward: Forward, model: ModelConfig = MODEL) -> float:
    """Bytes that a forward moves: all matrices of the layers, the output embedding, the embedding rows looked up, the
    keys and values read, and those written."""
    matrices = encoding_flops_per_token(model, 0) / 2 + model.hidden_size * model.vocab_size
    entry = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim
    return _BYTES * (matrices + model.hidden_size * forward.width + entry * (forward.cached + forward.width))


def forward_flops(forward: Forward, model: ModelConfig = MODEL) -> float:
    """FLOPs of a forward, the output embedding of every position included; each attends to all keys there are."""
    return forward.width * forward_flops_per_token(model, forward.cached + forward.width)


def forward_seconds(chip: Accelerator, forward: Forward, model: ModelConfig = MODEL) -> float:
    """Seconds that a chip needs at least for a forward."""
    return max(forward_bytes(forward, model) / chip.bandwidth, forward_flops(forward, model) / chip.flops)


def projected_tokens_per_second(
    chip: Accelerator,
    loads: Sequence[Load],
    gen_length: int,
    tokens_per_forward: float,
    model: ModelConfig = MODEL,
) -> float:
    """Tokens per second of one response, from the kinds of forwards in the shares they had at small scale.

    Raises:
      ConfigError: when there is no forward.
    """
    total = sum(load.count for load in loads)
    if not total:
        raise ConfigError("No row has a forward, so there is nothing to project; decode at least one prompt.")
    forwards = (load.count / total * forward_seconds(chip, scaled(load, gen_length), model) for load in loads)
    seconds = RESPONSE_LENGTH / tokens_per_forward * sum(forwards)
    if any(load.kind not in ("whole", "rest", "window") for load in loads):
        seconds += forward_seconds(chip, Forward(PROMPT_LENGTH, 0.0), model)
    return RESPONSE_LENGTH / seconds


def mean_forward(loads: Sequence[Load], gen_length: int) -> Forward:
    """The mean of what is projected, to be shown."""
    total = sum(load.count for load in loads)
    each = [(load.count / total, scaled(load, gen_length)) for load in loads]
    return Forward(sum(share * f.width for share, f in each), sum(share * f.cached for share, f in each))
