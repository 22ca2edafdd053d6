"""Tokens per second that an 8B model would reach on a chip, from what decoding takes at small scale.

A forward takes as long as the slower of two things: moving its bytes (the weights, the keys and values it reads and
those it writes) at the chip's memory bandwidth, or computing its FLOPs at the chip's peak. This is batch 1, a prompt of
512 tokens and a response of 512, in bfloat16. It is a bound, with no overhead of any kind, the same for every system.

A mean forward stands for all of a system's. Where bandwidth limits some and arithmetic others, they take longer
together than as many mean ones.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

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


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a mean forward at small scale computed and read, split by what it belonged to.

    Attributes:
      gen_length: response tokens that were asked for.
      prompt_length: tokens of the prompts, a mean weighted by forwards.
      prompt_width, response_width: query positions.
      prompt_cached, response_cached: keys read from a buffer.
    """

    gen_length: int
    prompt_length: float
    prompt_width: float
    response_width: float
    prompt_cached: float
    response_cached: float

    @classmethod
    def of(
        cls,
        gen_length: int,
        prompt_lengths: Sequence[int],
        forwards: Sequence[int],
        positions: Sequence[int],
        cached: Sequence[int],
        whole: Sequence[int],
    ) -> "Measured":
        """The means over all forwards of all rows.

        Args:
          gen_length: response tokens that were asked for.
          prompt_lengths: each row's prompt tokens.
          forwards: each row's forwards, without those over a prompt alone.
          positions, cached: each row's query positions and keys read, summed over its forwards.
          whole: how many of a row's forwards computed prompt and response. The others read the prompt from the buffer:
            all of a system with an exact one, none of a system without any, and with an approximate one those that do
            not begin a block.

        Raises:
          ConfigError: when there is no forward.
        """
        total = sum(forwards)
        if not total:
            raise ConfigError("No row has a forward, so there is no mean one; decode at least one prompt.")
        prompts, counts, computed = (np.asarray(values, float) for values in (prompt_lengths, forwards, whole))
        prompt_width = float(prompts @ computed) / total
        prompt_cached = float(prompts @ (counts - computed)) / total
        return cls(
            gen_length=gen_length,
            prompt_length=prompt_width + prompt_cached,
            prompt_width=prompt_width,
            response_width=sum(positions) / total - prompt_width,
            prompt_cached=prompt_cached,
            response_cached=sum(cached) / total - prompt_cached,
        )


SYSTEMS = ("autoregressive", "masked_diffusion", "cached_masked_diffusion", "refusion", "block_diffusion")


def scaled(
    system: str, measured: Measured, prompt_length: int = PROMPT_LENGTH, response_length: int = RESPONSE_LENGTH
) -> Forward:
    """The mean forward with a prompt and a response of these lengths, at the same tokens per forward.

    What depends on the response's length grows with it, by `r = response_length / gen_length`; the prompt is computed,
    or read, whole or not at all.

      autoregressive            computes 1 position and reads the prompt and `r` times the response keys.
      masked_diffusion          computes prompt and response, and reads nothing.
      cached_masked_diffusion   as measured, prompt parts by `prompt_length / measured.prompt_length` and response parts
                                by `r`: as many blocks, each longer, and the same share of forwards over everything.
      refusion                  computes `r` times the positions, for the masked slots are those of the whole response;
                                reads the prompt and `r` times the response keys.
      block_diffusion           computes the positions measured, for blocks keep their length; reads as refusion does.

    Args:
      system: one of `SYSTEMS`.
      measured: at small scale.
      prompt_length, response_length: tokens.

    Raises:
      ConfigError: for another system.
    """
    r = response_length / measured.gen_length
    kept = prompt_length + r * measured.response_cached
    match system:
        case "autoregressive":
            return Forward(1.0, kept)
        case "masked_diffusion":
            return Forward(float(prompt_length + response_length), 0.0)
        case "cached_masked_diffusion":
            p = prompt_length / measured.prompt_length
            width = p * measured.prompt_width + r * measured.response_width
            return Forward(width, p * measured.prompt_cached + r * measured.response_cached)
        case "refusion":
            return Forward(r * (measured.prompt_width + measured.response_width), kept)
        case "block_diffusion":
            return Forward(measured.prompt_width + measured.response_width, kept)
    raise ConfigError(f"There is no system {system!r} to project.{nearest(system, SYSTEMS)}")


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
    chip: Accelerator, forward: Forward, tokens_per_forward: float, model: ModelConfig = MODEL
) -> float:
    """Tokens per second of one response at so many tokens per forward."""
    return tokens_per_forward / forward_seconds(chip, forward, model)
