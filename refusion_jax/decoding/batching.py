"""From lists of prompts and settings to static-shape batches, and back to one result per prompt.

Batch, prompt length and response length are rounded up to a few buckets, so that a second call in the same buckets
compiles nothing. Prompts are decoded in batches of at most `batch_size`; rows that fill a batch up are finished from
the start.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from refusion_jax.config import ConfigError, DecodeConfig, ModelConfig
from refusion_jax.decoding.refusion import DecodeState, Request, decode_loop, prefill
from refusion_jax.modeling import Transformer

MIN_PROMPT_BUCKET = 32
MIN_RESPONSE_BUCKET = 128
MIN_WIDTH = 16


@dataclasses.dataclass(frozen=True)
class Generation:
    """One list entry per prompt, in input order.

    Attributes:
      tokens: response token IDs up to and including the first EOS.
      text: the decoded response; None without a tokenizer.
      committed: every committed response token in position order. After an EOS that an earlier slot brought late there
        can be more.
      order: for each committed token, which of the row's forwards committed it, from 0.
      forwards: forwards the row took part in; the first draft counts, the prefill does not.
      finish_reason: "eos" or "length".
      tpf: the authors' tokens-per-forward for algorithm "paper" (a mean over acceptances), committed tokens per forward
        otherwise.
    """

    tokens: list[list[int]]
    text: list[str] | None
    committed: list[list[int]]
    order: list[list[int]]
    forwards: list[int]
    finish_reason: list[str]
    tpf: list[float]


def bucket(size: int, minimum: int) -> int:
    """The smallest power-of-two multiple of `minimum` that holds `size`."""
    while minimum < size:
        minimum *= 2
    return minimum


def check_request(prompt: Sequence[int], config: DecodeConfig, model: ModelConfig) -> None:
    """Refuses a prompt that cannot be decoded.

    Raises:
      ConfigError: for an empty prompt, a token outside the vocabulary, or one too long for the model.
    """
    if len(prompt) == 0:
        raise ConfigError("The prompt is empty; give at least one token.")
    outside = [token for token in prompt if not 0 <= token < model.vocab_size]
    if outside:
        raise ConfigError(f"Prompt token {outside[0]} lies outside the vocabulary of {model.vocab_size} tokens.")
    total = len(prompt) + config.rounded_length
    if total > model.max_position_embeddings:
        raise ConfigError(
            f"The prompt has {len(prompt)} tokens, with gen_length {config.rounded_length} that makes {total}, beyond "
            f"the model's maximum of {model.max_position_embeddings}; shorten the prompt or lower gen_length."
        )


def decode_prompts(
    module: Transformer,
    params: Any,
    prompts: Sequence[Sequence[int]],
    configs: Sequence[DecodeConfig],
    seed: int = 0,
    batch_size: int = 32,
    on_batch: Callable[[int], None] | None = None,
) -> Generation:
    """Decodes token prompts of any number and lengths, each with its own settings.

    Args:
      module, params: the model.
      prompts: token IDs.
      configs: one per prompt.
      seed: with a prompt's index in the list, all that its random draws depend on.
      batch_size: rows decoded at once.
      on_batch: called with the number of prompts finished so far.

    Raises:
      ConfigError: naming the first prompt that cannot be decoded.
    """
    for index, (prompt, config) in enumerate(zip(prompts, configs, strict=True)):
        try:
            check_request(prompt, config, module.config)
        except ConfigError as error:
            raise ConfigError(f"Prompt {index}: {error}") from error
    result = Generation([], None, [], [], [], [], [])
    root = jax.random.key(seed)
    for start in range(0, len(prompts), batch_size):
        rows = slice(start, start + batch_size)
        indices = np.arange(start, start + bucket(len(prompts[rows]), 1))
        keys = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(root, i)))(indices)
        state = _decode_batch(module, params, prompts[rows], configs[rows], np.asarray(keys))
        _collect(result, jax.device_get(state.replace(cache=None)), configs[rows], module.config)
        if on_batch is not None:
            on_batch(min(start + batch_size, len(prompts)))
    return result


def _decode_batch(
    module: Transformer,
    params: Any,
    prompts: Sequence[Sequence[int]],
    configs: Sequence[DecodeConfig],
    keys: np.ndarray,
) -> DecodeState:
    batch = bucket(len(prompts), 1)
    capacity = bucket(max(config.rounded_length for config in configs), MIN_RESPONSE_BUCKET)
    prompt_length = bucket(max(map(len, prompts)), MIN_PROMPT_BUCKET)
    request = make_request(prompts, configs, keys, batch, capacity, module.config)
    tokens = np.full((batch, prompt_length), module.config.pad_token_id, np.int32)
    lengths = np.zeros(batch, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        lengths[row] = len(prompt)
    widths = tuple(MIN_WIDTH * 2**i for i in range((capacity // MIN_WIDTH).bit_length()))
    state = prefill(module, params, tokens, lengths, request, prompt_length + capacity)
    return decode_loop(module, params, request, state, widths)


def make_request(
    prompts: Sequence[Sequence[int]],
    configs: Sequence[DecodeConfig],
    keys: np.ndarray,
    batch: int,
    capacity: int,
    model: ModelConfig,
) -> Request:
    """Lays out settings as arrays: rows beyond the prompts are finished from the start."""
    rows = len(prompts)
    offsets: Any = np.arange(capacity, dtype=np.int32)

    def per_row(values: list[Any], dtype: Any, idle: Any) -> Any:
        return np.array(values + [idle] * (batch - rows), dtype)

    sizes = per_row([c.slot_size for c in configs], np.int32, 1)
    block_lengths = per_row([c.block_length for c in configs], np.int32, 1)
    lengths = per_row([c.rounded_length for c in configs], np.int32, 0)
    starts = per_row([len(prompt) for prompt in prompts], np.int32, 0)
    all_keys: Any = np.zeros((batch, *keys.shape[1:]), np.uint32)
    all_keys[:rows] = keys[:rows]
    special = [model.pad_token_id, model.mask_token_id]
    nothing = [model.vocab_size] * len(special)
    return Request(
        position_ids=starts[:, None] + offsets,
        slot_starts=offsets // sizes[:, None] * sizes[:, None],
        blocks=offsets // block_lengths[:, None],
        is_response=offsets < lengths[:, None],
        self_correcting=per_row([c.algorithm == "self_correcting" for c in configs], np.bool_, True),
        redraft=per_row([c.redraft for c in configs], np.bool_, False),
        slot_thresholds=per_row([c.slot_threshold for c in configs], np.float32, 0),
        token_thresholds=per_row([c.token_threshold for c in configs], np.float32, 0),
        temperatures=per_row([c.temperature for c in configs], np.float32, 0),
        keys=all_keys,
        eos_ids=per_row([model.eos_token_ids] * rows, np.int32, model.eos_token_ids),
        suppressed_ids=per_row([special if c.suppress_special else nothing for c in configs], np.int32, nothing),
    )


def _collect(result: Generation, state: DecodeState, configs: Sequence[DecodeConfig], model: ModelConfig) -> None:
    for row, config in enumerate(configs):
        committed = state.tokens[row][state.committed[row]].tolist()
        forwards = int(state.forwards[row])
        ends = [index for index, token in enumerate(committed) if token in model.eos_token_ids]
        result.committed.append(committed)
        result.tokens.append(committed[: ends[0] + 1] if ends else committed)
        result.order.append(state.commit_forwards[row][state.committed[row]].tolist())
        result.forwards.append(forwards)
        result.finish_reason.append("eos" if ends else "length")
        if config.algorithm == "paper":
            result.tpf.append(_authors_tpf(state.accepted[row], int(state.events[row]), config.slot_size))
        else:
            result.tpf.append(len(committed) / forwards)


def _authors_tpf(accepted: Any, events: int, slot_size: int) -> float:
    """The mean over acceptances of `slot_size * slots / (2 * rounds)` (their tokens-per-forward)."""
    rounds = np.arange(1, len(accepted))
    return float(slot_size * np.sum(accepted[1:] / rounds) / (2 * events))
