"""Plain left-to-right decoding of a batch: greedy, one token per forward, on the same KV buffer as ReFusion's.

What ReFusion's decoders are measured against. The logits at a token predict the one after it, so any autoregressive
model will do, and a ReFusion model is one too.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

from refusion_jax.config import ConfigError, DecodeConfig
from refusion_jax.decoding import batching
from refusion_jax.decoding.kv_cache import commit, empty_cache
from refusion_jax.decoding.layout import prepare_layout
from refusion_jax.modeling import KVCache, Transformer, Visibility


@dataclasses.dataclass(frozen=True)
class Continuation:
    """One list entry per prompt, in input order.

    Attributes:
      tokens: response token IDs up to and including the first EOS; as many forwards made them.
      finish_reason: "eos" or "length".
    """

    tokens: list[list[int]]
    finish_reason: list[str]


class State(flax.struct.PyTreeNode):
    """The loop's carry. `capacity` is the longest response there is room for.

    Attributes:
      tokens: (batch, capacity) int32, the response so far, zeros after it.
      counts: (batch,) int32, its length.
      lengths: (batch,) int32, the length at which a row stops; 0 for a row that only fills the batch up.
      last: (batch,) int32, the newest token: the next forward takes it in, and only then is it in the buffer.
      ended: (batch,) bool, whether an EOS came.
      cache: the KV buffer, which holds everything before `last`.
    """

    tokens: jax.Array
    counts: jax.Array
    lengths: jax.Array
    last: jax.Array
    ended: jax.Array
    cache: KVCache

    @property
    def running(self) -> jax.Array:
        """(batch,) bool, the rows that want another token."""
        return ~self.ended & (self.counts < self.lengths)


def decode_autoregressive(
    module: Transformer,
    params: Any,
    prompts: Sequence[Sequence[int]],
    lengths: int | Sequence[int],
    batch_size: int = 32,
) -> Continuation:
    """Continues token prompts of any number and lengths, each until its first EOS or its own length.

    Args:
      module, params: the model.
      prompts: token IDs.
      lengths: the most tokens to respond with, for all prompts or one per prompt.
      batch_size: rows decoded at once.

    Raises:
      ConfigError: naming the first prompt that cannot be continued.
    """
    limits = list(lengths) if isinstance(lengths, Sequence) else [lengths] * len(prompts)
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        try:
            config = DecodeConfig(gen_length=limit, slot_size=1)
            prepare_layout(prompt, config, module.config)
        except ConfigError as error:
            raise ConfigError(f"Prompt {index}: {error}") from error
    result = Continuation([], [])
    for start in range(0, len(prompts), batch_size):
        rows = slice(start, start + batch_size)
        state = decode_loop(module, params, prefill(module, params, *make_batch(module, prompts[rows], limits[rows])))
        tokens, counts, ended = jax.device_get((state.tokens, state.counts, state.ended))
        for row in range(len(prompts[rows])):
            result.tokens.append(tokens[row, : counts[row]].tolist())
            result.finish_reason.append("eos" if ended[row] else "length")
    return result


def make_batch(
    module: Transformer, prompts: Sequence[Sequence[int]], lengths: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Lays prompts out in the same buckets as ReFusion's decoders do; returns what `prefill` takes."""
    batch = batching.bucket(len(prompts), 1)
    prompt_length = batching.bucket(max(map(len, prompts)), batching.MIN_PROMPT_BUCKET)
    tokens = np.full((batch, prompt_length), module.config.pad_token_id, np.int32)
    prompt_lengths, limits = np.zeros((2, batch), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        prompt_lengths[row] = len(prompt)
    limits[: len(prompts)] = lengths
    return tokens, prompt_lengths, limits, batching.bucket(max(lengths), batching.MIN_RESPONSE_BUCKET)


def encode_causal(
    module: Transformer, params: Any, tokens: jax.Array, position_ids: jax.Array, cache: KVCache | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Hidden states and KV of tokens that see the buffer and, causally, each other."""
    visibility = Visibility.causal(*tokens.shape)
    caches = () if cache is None else (cache,)
    return module.apply({"params": params}, tokens, position_ids, visibility, caches, True, method="encode")


@functools.partial(jax.jit, static_argnames=("module", "capacity"))
def prefill(
    module: Transformer,
    params: Any,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    lengths: jax.Array,
    capacity: int,
) -> State:
    """Computes the prompts' KV and the state a decode starts from.

    All of a prompt but its last token: the first of the response comes from the loop, like any other.

    Args:
      module, params: the model.
      prompts: (batch, prompt_length) int32, padded at the end. prompt_lengths: (batch,) int32.
      lengths: (batch,) int32, the most tokens each row responds with.
      capacity: the longest response to make room for.
    """
    batch, prompt_length = prompts.shape
    position_ids = jnp.broadcast_to(jnp.arange(prompt_length, dtype=jnp.int32), prompts.shape)
    _, kv = encode_causal(module, params, prompts, position_ids, None)
    before_last = jnp.maximum(prompt_lengths - 1, 0)
    return State(
        tokens=jnp.zeros((batch, capacity), jnp.int32),
        counts=jnp.zeros(batch, jnp.int32),
        lengths=lengths,
        last=jnp.take_along_axis(prompts, before_last[:, None], axis=1)[:, 0],
        ended=jnp.zeros(batch, jnp.bool_),
        cache=commit(empty_cache(module.config, batch, prompt_length + capacity), kv, before_last),
    )


@functools.partial(jax.jit, static_argnames="module", donate_argnames="state")
def decode_loop(module: Transformer, params: Any, state: State) -> State:
    """Decodes until every row is finished: one `while_loop`, no transfer to the host.

    Args:
      module, params: the model.
      state: from `prefill`; its buffers are donated.
    """
    step = functools.partial(_step, module, params)
    return jax.lax.while_loop(lambda state: jnp.any(state.running), step, state)


def _step(module: Transformer, params: Any, state: State) -> State:
    """One forward, one more token for every unfinished row."""
    batch, capacity = state.tokens.shape
    running = state.running
    hidden, kv = encode_causal(module, params, state.last[:, None], state.cache.lengths[:, None], state.cache)
    logits = module.apply({"params": params}, hidden, method="unembed")
    choice = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    at = jnp.where(running, state.counts, capacity)
    return state.replace(
        tokens=state.tokens.at[jnp.arange(batch), at].set(choice, mode="drop"),
        counts=state.counts + running,
        last=jnp.where(running, choice, state.last),
        ended=state.ended | (running & jnp.isin(choice, jnp.array(module.config.eos_token_ids))),
        cache=commit(state.cache, kv, running.astype(jnp.int32)),
    )
