"""Left-to-right decoding of a batch: one token per forward, on the same KV buffer as ReFusion's.

The logits at a token predict the one after it, so any autoregressive model will do, and a ReFusion model is one too.
"""

import functools
from typing import Any

import flax
import jax
import jax.numpy as jnp

from refusion_jax.decoding.kv_cache import empty_cache
from refusion_jax.decoding.placement import commit_anywhere
from refusion_jax.decoding.revealing import propose
from refusion_jax.decoding.rows import Responses, Rows
from refusion_jax.modeling import KVCache, Transformer, Visibility


class State(flax.struct.PyTreeNode):
    """The loop's carry.

    Attributes:
      responses: the tokens so far; as many forwards made them.
      last: (batch,) int32, the newest token: the next forward takes it in, and only then is it in the buffer.
      cache: the KV buffer, which holds everything before `last`.
    """

    responses: Responses
    last: jax.Array
    cache: KVCache


def encode_causal(
    module: Transformer, params: Any, tokens: jax.Array, position_ids: jax.Array, cache: KVCache | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Hidden states and KV of tokens that see the buffer and, causally, each other."""
    visibility = Visibility.causal(*tokens.shape)
    caches = () if cache is None else (cache,)
    return module.apply({"params": params}, tokens, position_ids, visibility, caches, True, method="encode")


def prompt_cache(module: Transformer, params: Any, prompts: jax.Array, lengths: jax.Array, capacity: int) -> KVCache:
    """A buffer with the KV of the first `lengths` tokens of each prompt, and with room for `capacity` more.

    Args:
      module, params: the model.
      prompts: (batch, prompt_length) int32. lengths: (batch,) int32.
    """
    position_ids = jnp.broadcast_to(jnp.arange(prompts.shape[1], dtype=jnp.int32), prompts.shape)
    _, kv = encode_causal(module, params, prompts, position_ids, None)
    return commit_anywhere(empty_cache(module.config, prompts.shape[0], prompts.shape[1] + capacity), kv, lengths)


@functools.partial(jax.jit, static_argnames=("module", "capacity"))
def prefill(module: Transformer, params: Any, rows: Rows, capacity: int) -> State:
    """Computes the prompts' KV and the state a decode starts from; `capacity` is the longest response.

    All of a prompt but its last token: the first of the response comes from the loop, like any other.
    """
    batch = len(rows.lengths)
    before_last = jnp.maximum(rows.prompt_lengths - 1, 0)
    return State(
        responses=Responses.none(batch, capacity, module.config.pad_token_id),
        last=jnp.take_along_axis(rows.prompts, before_last[:, None], axis=1)[:, 0],
        cache=prompt_cache(module, params, rows.prompts, before_last, capacity),
    )


@functools.partial(jax.jit, static_argnames=("module", "sampling"), donate_argnames="state")
def decode_loop(module: Transformer, params: Any, rows: Rows, state: State, sampling: bool) -> State:
    """Continues every row until its first EOS or its own length: one `while_loop`, no transfer to the host.

    A row that samples keeps the noise of each position, whatever the order of decoding.

    Args:
      module, params: the model.
      rows: prompts and settings.
      state: from `prefill`; its buffers are donated.
      sampling: whether any row may have a temperature.
    """

    def step(state: State) -> State:
        return _step(module, params, rows, state, sampling)

    return jax.lax.while_loop(lambda state: jnp.any(state.responses.running(rows)), step, state)


def _step(module: Transformer, params: Any, rows: Rows, state: State, sampling: bool) -> State:
    """One forward, one more token for every unfinished row."""
    found, positions = state.responses, state.cache.lengths[:, None]
    running = found.running(rows)
    batch, capacity = found.tokens.shape
    hidden, kv = encode_causal(module, params, state.last[:, None], positions, state.cache)
    logits = module.apply({"params": params}, hidden, method="unembed")
    same_draw = jnp.zeros(batch, jnp.int32)
    proposal = propose(logits[:, None], rows, positions + 1, same_draw, "confidence", sampling)
    choice, at = proposal.choice[:, 0], (jnp.arange(batch), jnp.where(running, found.forwards, capacity))
    return State(
        responses=Responses(
            tokens=found.tokens.at[at].set(choice, mode="drop"),
            committed=found.committed.at[at].set(True, mode="drop"),
            probabilities=found.probabilities.at[at].set(proposal.probability[:, 0], mode="drop"),
            commit_forwards=found.commit_forwards.at[at].set(found.forwards, mode="drop"),
            forwards=found.forwards + running,
            positions=found.positions + running,
            cached=found.cached + jnp.where(running, state.cache.lengths, 0),
        ),
        last=jnp.where(running, choice, state.last),
        cache=commit_anywhere(state.cache, kv, running.astype(jnp.int32)),
    )
