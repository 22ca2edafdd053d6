"""Decoding of block-diffusion models (BD3-LM, arXiv 2503.09573): block after block, the masks of a block in any order.

The prompt is causal; a token of the response sees the prompt, the blocks before its own, and all of its own block. A
mask predicts the token that it stands for.

A block's keys and values go to the buffer when it is complete, computed of its tokens: together with the first step of
the next block, whose query is

    the complete block (order 0), the masks of the next one (order 1), padding

so no forward is there for them alone. All other steps have the block that is decoded as their query.
"""

import functools
from typing import Any

import flax
import jax
import jax.numpy as jnp

from refusion_jax.decoding.autoregressive import prompt_cache
from refusion_jax.decoding.placement import commit_anywhere
from refusion_jax.decoding.revealing import propose, quota_of_step, reveal
from refusion_jax.decoding.rows import Responses, Rows
from refusion_jax.modeling import KVCache, Transformer, Visibility


class State(flax.struct.PyTreeNode):
    """The loop's carry.

    Attributes:
      responses: what is decided so far; masks stand for the rest.
      starts: (batch,) int32, the offset at which the block that is decoded begins.
      steps: (batch,) int32, forwards that it had.
      cache: the KV buffer: of the prompt and the blocks before; of the last one only after this block's first step.
    """

    responses: Responses
    starts: jax.Array
    steps: jax.Array
    cache: KVCache


class _Query(flax.struct.PyTreeNode):
    """What a forward computes, (batch, width) each: `tokens`, their `positions` and who sees whom; and, (batch, block),
    the `offsets` into the response of the block that is decoded, and their `places` in the query."""

    tokens: jax.Array
    positions: jax.Array
    visibility: Visibility
    offsets: jax.Array
    places: jax.Array


@functools.partial(jax.jit, static_argnames=("module", "capacity"))
def prefill(module: Transformer, params: Any, rows: Rows, capacity: int) -> State:
    """Computes the prompts' KV and the state a decode starts from; `capacity` is the longest response."""
    batch = len(rows.lengths)
    return State(
        responses=Responses.none(batch, capacity, module.config.mask_token_id),
        starts=jnp.zeros(batch, jnp.int32),
        steps=jnp.zeros(batch, jnp.int32),
        cache=prompt_cache(module, params, rows.prompts, rows.prompt_lengths, capacity),
    )


@functools.partial(jax.jit, static_argnames=("module", "block_length", "ordering", "sampling"), donate_argnames="state")
def decode_loop(
    module: Transformer, params: Any, rows: Rows, state: State, block_length: int, ordering: str, sampling: bool
) -> State:
    """Decodes until of every row all up to its first EOS is decided, or all: one `while_loop`, no transfer to the host.

    Args:
      module, params: the model.
      rows: prompts and settings; their lengths are multiples of their block lengths.
      state: from `prefill`; its buffers are donated.
      block_length: of all rows; 0 for rows of one block each.
      ordering: one of `methods.ORDERINGS`.
      sampling: whether any row may have a temperature.
    """

    def step(state: State) -> State:
        return _step(module, params, rows, state, block_length, ordering, sampling)

    return jax.lax.while_loop(lambda state: jnp.any(state.responses.running(rows)), step, state)


def _step(
    module: Transformer, params: Any, rows: Rows, state: State, block_length: int, ordering: str, sampling: bool
) -> State:
    """One forward, which reveals some masks of every unfinished row's block."""
    found, batch = state.responses, len(state.starts)
    row, capacity = jnp.arange(batch)[:, None], found.tokens.shape[1]
    running = found.running(rows)
    completed = jnp.where(running & (state.starts > 0) & (state.steps == 0), rows.block_lengths, 0)
    query = _query(module, rows, state, completed, block_length)
    hidden, kv = module.apply(
        {"params": params}, query.tokens, query.positions, query.visibility, (state.cache,), True, method="encode"
    )
    hidden = hidden.reshape(*query.tokens.shape, -1)[row, query.places]
    logits = module.apply({"params": params}, hidden, method="unembed")
    positions = rows.prompt_lengths[:, None] + query.offsets
    proposal = propose(logits, rows, positions, found.forwards, ordering, sampling)
    offsets = jnp.where(query.offsets < state.starts[:, None] + rows.block_lengths[:, None], query.offsets, capacity)
    masked = ~found.committed.at[row, offsets].get(mode="fill", fill_value=True) & running[:, None]
    quota = quota_of_step(state.steps, rows.block_lengths, rows.block_steps)
    revealed = reveal(proposal.score, masked, quota, rows.thresholds, rows.factors)
    at, left = (row, jnp.where(revealed, offsets, capacity)), jnp.any(masked & ~revealed, axis=1)
    read, needed = state.cache.lengths, completed + rows.block_lengths
    return State(
        responses=Responses(
            tokens=found.tokens.at[at].set(proposal.choice, mode="drop"),
            committed=found.committed.at[at].set(True, mode="drop"),
            probabilities=found.probabilities.at[at].set(proposal.probability, mode="drop"),
            commit_forwards=found.commit_forwards.at[at].set(found.forwards[:, None], mode="drop"),
            forwards=found.forwards + running,
            positions=found.positions + jnp.where(running, needed, 0),
            cached=found.cached + jnp.where(running, read, 0),
        ),
        starts=jnp.where(running & ~left, state.starts + rows.block_lengths, state.starts),
        steps=jnp.where(left, state.steps + 1, 0),
        cache=commit_anywhere(state.cache, kv, completed),
    )


def _query(module: Transformer, rows: Rows, state: State, completed: jax.Array, block_length: int) -> _Query:
    """The complete block of the rows where it is not in the buffer, `completed` tokens of it, and the one decoded."""
    capacity = state.responses.tokens.shape[1]
    block = block_length or capacity
    width = 2 * block_length or capacity  # the only block is never followed by another
    index, within = jnp.arange(width), jnp.arange(block)
    length = completed + rows.block_lengths
    offsets = (state.starts - completed)[:, None] + index
    tokens = jnp.take_along_axis(state.responses.tokens, jnp.minimum(offsets, capacity - 1), axis=1)
    is_live = index < length[:, None]
    visibility = Visibility(
        segment=is_live.astype(jnp.int32),
        order=(index >= completed[:, None]).astype(jnp.int32),
        group=jnp.zeros_like(offsets),
    )
    return _Query(
        tokens=jnp.where(is_live, tokens, module.config.pad_token_id),
        positions=jnp.where(is_live, rows.prompt_lengths[:, None] + offsets, 0),
        visibility=visibility,
        offsets=state.starts[:, None] + within,
        places=jnp.minimum(completed[:, None] + within, width - 1),
    )
