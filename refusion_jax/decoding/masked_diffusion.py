"""Decoding by masked diffusion, as LLaDA and Dream do it and Fast-dLLM speeds it up: one compiled loop over a batch.

The prompt is followed by masks, and every token sees all others, in both directions. In each step one forward predicts
every mask, and some masks of the row's current block become tokens (`revealing`); the masks of later blocks are seen
like everything else. LLaDA reads the prediction of a mask at its own position, Dream at the position before it.

With a cache, a block begins with a forward over everything, which reveals tokens as any other and whose keys and values
are kept, of what is before the block ("prefix") or all around it ("dual"). The block's further forwards compute only
the *window*, which is the rest. Dream's window begins a token earlier, where the block's first token is predicted.
Rows then begin their blocks together, and a row whose block is done waits for those whose block is not.

Attention knows order from position IDs alone, so a forward over everything lays a row's tokens out as suits the cache:
what is kept first, then the window, then padding.
"""

import dataclasses
import functools
from typing import Any

import flax
import jax
import jax.numpy as jnp

from refusion_jax.decoding.kv_cache import full_cache
from refusion_jax.decoding.revealing import propose, quota_of_step, reveal
from refusion_jax.decoding.rows import Responses, Rows
from refusion_jax.methods import Method
from refusion_jax.modeling import KVCache, Transformer, Visibility

NARROWEST = 64  # tokens of a window; fewer gain nothing


@dataclasses.dataclass(frozen=True)
class Program:
    """What the loop is compiled for; all else that a method says is data.

    Attributes:
      module: the model.
      capacity: the longest response.
      width: tokens whose predictions are read of a forward: the longest block with a cache, else the capacity.
      windows: query lengths of the forwards over a window, shortest first; the first that holds all rows' is taken.
      shift: how many positions before a token it is predicted, 0 or 1.
      ordering, cache: the method's.
      unconditional: the method's; "" without guidance.
      sampling: whether any row may have a temperature.
    """

    module: Transformer
    capacity: int
    width: int
    windows: tuple[int, ...]
    shift: int
    ordering: str
    cache: str
    unconditional: str
    sampling: bool

    @property
    def forwards(self) -> int:
        """How many forwards a step is: guidance takes two."""
        return 2 if self.unconditional else 1


class _State(flax.struct.PyTreeNode):
    """The loop's carry.

    Attributes:
      responses: so far.
      running: (batch,) bool, rows with a mask before their first EOS.
      blocks, steps: (batch,) int32, the current block and how many steps of it are done.
    """

    responses: Responses
    running: jax.Array
    blocks: jax.Array
    steps: jax.Array


class _Window(flax.struct.PyTreeNode):
    """(batch,) int32 each: the positions [begin, end) of a row that are computed again, and the row's tokens."""

    begin: jax.Array
    end: jax.Array
    total: jax.Array

    @property
    def kept(self) -> jax.Array:
        """(batch,) int32, how many tokens are outside of it."""
        return self.total - (self.end - self.begin)


def decode_masked(
    module: Transformer, params: Any, rows: Rows, method: Method, capacity: int, sampling: bool
) -> Responses:
    """Decodes rows with `llada` or `dream`.

    Draws are keyed by the number of the row's forward. With guidance a step is two forwards and has the number of the
    second one.

    Args:
      module, params: the model.
      rows: the prompts and what each is asked for.
      method: how. What it says of numbers is taken from `rows`; with a cache, `block_length` bounds theirs, too.
      capacity: the longest response there is room for.
      sampling: whether any row may have a temperature.
    """
    width = min(method.block_length or capacity, capacity) if method.cache != "none" else capacity
    shift = 1 if method.name == "dream" else 0
    windows = [capacity + shift if method.cache == "prefix" else width + shift]
    while (half := -(-windows[0] // 2)) >= max(NARROWEST, width + shift):
        windows.insert(0, half)
    program = Program(
        module=module,
        capacity=capacity,
        width=width,
        windows=tuple(windows),
        shift=shift,
        ordering=method.scores,
        cache=method.cache,
        unconditional=method.unconditional,
        sampling=sampling,
    )
    return decode_loop(program, params, rows)


@functools.partial(jax.jit, static_argnames="program")
def decode_loop(program: Program, params: Any, rows: Rows) -> Responses:
    """Decodes until every row has ended, without a transfer to the host.

    Args:
      program: what is compiled.
      params: the model's.
      rows: the prompts and what each is asked for.
    """
    begin = functools.partial(_begin_block if program.cache != "none" else _step, program, params, rows)
    state = jax.lax.while_loop(lambda state: jnp.any(state.running), begin, _empty_state(program, rows))
    return state.responses


def _empty_state(program: Program, rows: Rows) -> _State:
    batch = len(rows.lengths)
    none = jnp.zeros(batch, jnp.int32)
    responses = Responses.none(batch, program.capacity, program.module.config.mask_token_id)
    return _State(responses, running=rows.lengths > 0, blocks=none, steps=none)


# ---- steps ---------------------------------------------------------------------------------------------------------


def _step(program: Program, params: Any, rows: Rows, state: _State) -> _State:
    """A step of every running row, without a cache."""
    total = rows.prompt_lengths + rows.lengths
    logits, needed, _ = _full_forward(program, params, rows, state, _Window(total, total, total))
    return _revealed(program, rows, state, state.running, logits, needed, jnp.zeros_like(needed))


def _begin_block(program: Program, params: Any, rows: Rows, state: _State) -> _State:
    """The next block of every running row: a step that computes everything, then those that compute the window."""
    blocks, total = state.blocks, rows.prompt_lengths + rows.lengths
    starts = rows.prompt_lengths + blocks * rows.block_lengths
    ends = total if program.cache == "prefix" else jnp.minimum(starts + rows.block_lengths, total)
    window = _Window(jnp.minimum(starts, total) - program.shift, ends, total)
    logits, needed, cache = _full_forward(program, params, rows, state, window)
    assert cache is not None
    state = _revealed(program, rows, state, state.running, logits, needed, jnp.zeros_like(needed))

    def in_block(state: _State) -> jax.Array:
        return state.running & (state.blocks == blocks)

    def step(state: _State) -> _State:
        active = in_block(state)
        needed = jnp.where(active, window.end - window.begin, 0)
        which = jnp.sum(jnp.max(needed) > jnp.array(program.windows[:-1]), dtype=jnp.int32)
        forward = functools.partial(_window_forward, program, params, rows, state, active, window, cache)
        logits = jax.lax.switch(which, [functools.partial(forward, length) for length in program.windows])
        return _revealed(program, rows, state, active, logits, needed, jnp.where(active, window.kept, 0))

    return jax.lax.while_loop(lambda state: jnp.any(in_block(state)), step, state)


def _revealed(
    program: Program,
    rows: Rows,
    state: _State,
    active: jax.Array,
    logits: jax.Array,
    needed: jax.Array,
    cached: jax.Array,
) -> _State:
    """The state after a step of the `active` rows, whose forward predicted `_first_read` and what follows it.

    A row ends when all its masks before an EOS are revealed.

    Args:
      program, rows, state: before the step.
      active: (batch,) bool.
      logits: (batch, width, vocab) float32.
      needed, cached: (batch,) int32, query positions and keys in buffers, to be counted.
    """
    old, offsets = state.responses, jnp.arange(program.capacity, dtype=jnp.int32)
    number = old.forwards + program.forwards - 1
    first = _first_read(program, rows, state)[:, None]
    positions = rows.prompt_lengths[:, None] + first + jnp.arange(program.width, dtype=jnp.int32)
    proposal = propose(logits, rows, positions, number, program.ordering, program.sampling)
    at = jnp.clip(offsets - first, 0, program.width - 1)
    proposal = jax.tree.map(lambda values: jnp.take_along_axis(values, at, axis=1), proposal)

    in_block = offsets // jnp.maximum(rows.block_lengths, 1)[:, None] == state.blocks[:, None]
    masked = active[:, None] & in_block & (offsets < rows.lengths[:, None]) & ~old.committed
    quota = quota_of_step(state.steps, rows.block_lengths, rows.block_steps)
    revealed = reveal(proposal.score, masked, quota, rows.thresholds, rows.factors)
    responses = old.replace(
        tokens=jnp.where(revealed, proposal.choice, old.tokens),
        committed=old.committed | revealed,
        probabilities=jnp.where(revealed, proposal.probability, old.probabilities),
        commit_forwards=jnp.where(revealed, number[:, None], old.commit_forwards),
        forwards=old.forwards + active * program.forwards,
        positions=old.positions + needed,
        cached=old.cached + cached,
    )
    done = active & ~jnp.any(masked & ~revealed, axis=1)
    return _State(
        responses=responses,
        running=responses.running(rows),
        blocks=state.blocks + done,
        steps=jnp.where(done, 0, state.steps + active),
    )


# ---- forwards ------------------------------------------------------------------------------------------------------


class _Query(flax.struct.PyTreeNode):
    """What a forward computes, (batch, length) each but the last.

    Attributes:
      tokens, positions: int32.
      live: bool, False for padding.
      read: (batch, width) int32, at which of the tokens predictions are read.
    """

    tokens: jax.Array
    positions: jax.Array
    live: jax.Array
    read: jax.Array


def _full_forward(
    program: Program, params: Any, rows: Rows, state: _State, window: _Window
) -> tuple[jax.Array, jax.Array, KVCache | None]:
    """A forward over all tokens of the running rows.

    Returns:
      logits (batch, width, vocab) float32 of what follows `_first_read`, mixed with those of the unconditional prompt;
      (batch,) int32 query positions that the rows needed; and with a cache the buffer of what is outside of the window.
    """
    index = jnp.arange(rows.prompts.shape[1] + program.capacity, dtype=jnp.int32)
    begin, end, kept = window.begin[:, None], window.end[:, None], window.kept[:, None]
    in_window = jnp.where(index < window.total[:, None], index - kept + begin, index)
    positions = jnp.where(index < begin, index, jnp.where(index < kept, index + end - begin, in_window))
    wanted = _positions_read(program, rows, state)
    outside = jnp.where(wanted < begin, wanted, wanted - end + begin)
    query = _Query(
        tokens=_tokens_at(program, rows, state, positions),
        positions=positions,
        live=state.running[:, None] & (index < window.total[:, None]),
        read=jnp.where((wanted >= begin) & (wanted < end), wanted - begin + kept, outside),
    )
    if not program.unconditional:
        logits, kv = _forward(program, params, query, ())
        cache = full_cache(program.module.config, kv, window.kept) if program.cache != "none" else None
        return logits, jnp.sum(query.live, axis=1), cache
    other = _without_prompt(program, rows, query)
    both = jax.tree.map(lambda *pair: jnp.concatenate(pair), query, other)
    conditional, unconditional = jnp.split(_forward(program, params, both, ())[0], 2)
    guided = unconditional + (rows.guidances[:, None, None] + 1) * (conditional - unconditional)
    return guided, jnp.sum(query.live, axis=1) + jnp.sum(other.live, axis=1), None


def _window_forward(
    program: Program,
    params: Any,
    rows: Rows,
    state: _State,
    active: jax.Array,
    window: _Window,
    cache: KVCache,
    length: int,
) -> jax.Array:
    """The logits as those of `_full_forward`, from the window alone and the buffer; `length` holds active rows'."""
    positions = window.begin[:, None] + jnp.arange(length, dtype=jnp.int32)
    query = _Query(
        tokens=_tokens_at(program, rows, state, positions),
        positions=positions,
        live=active[:, None] & (positions < window.end[:, None]),
        read=_positions_read(program, rows, state) - window.begin[:, None],
    )
    return _forward(program, params, query, (cache,))[0]


def _forward(program: Program, params: Any, query: _Query, caches: tuple[KVCache, ...]) -> tuple[jax.Array, Any]:
    """Logits (batch, width, vocab) float32 read of tokens that see all others; if they are to be kept, also the KV."""
    batch, length = query.tokens.shape
    nothing = jnp.zeros_like(query.tokens)
    visibility = Visibility(segment=query.live.astype(jnp.int32), order=nothing, group=nothing)
    keeps = program.cache != "none" and not caches
    hidden, kv = program.module.apply(
        {"params": params}, query.tokens, query.positions, visibility, caches, keeps, method="encode"
    )
    read = jnp.arange(batch)[:, None] * length + jnp.clip(query.read, 0, length - 1)
    logits = program.module.apply({"params": params}, hidden[read.reshape(-1)], method="unembed")
    return logits.reshape(batch, program.width, -1), kv


def _first_read(program: Program, rows: Rows, state: _State) -> jax.Array:
    """(batch,) int32, the first response offset whose prediction is read: with a cache the current block's."""
    return state.blocks * rows.block_lengths * (program.cache != "none")


def _positions_read(program: Program, rows: Rows, state: _State) -> jax.Array:
    """(batch, width) int32, the positions at which predictions are read."""
    first = rows.prompt_lengths + _first_read(program, rows, state) - program.shift
    return first[:, None] + jnp.arange(program.width, dtype=jnp.int32)


def _tokens_at(program: Program, rows: Rows, state: _State, positions: jax.Array) -> jax.Array:
    """The prompt's tokens, the response's and its masks at positions (batch, n); anything beyond a row's end."""
    responses, prompt_lengths = state.responses, rows.prompt_lengths[:, None]
    line = jnp.concatenate([rows.prompts, responses.tokens], axis=1)  # masks stand where nothing is decided
    gap = jnp.where(positions < prompt_lengths, 0, rows.prompts.shape[1] - prompt_lengths)
    return jnp.take_along_axis(line, jnp.clip(positions + gap, 0, line.shape[1] - 1), axis=1)


def _without_prompt(program: Program, rows: Rows, query: _Query) -> _Query:
    """The query of all tokens with the unconditional prompt: masks, or none but the one that predicts the response."""
    in_prompt = query.positions < rows.prompt_lengths[:, None]
    left = query.positions >= rows.prompt_lengths[:, None] - program.shift
    return query.replace(
        tokens=jnp.where(in_prompt, program.module.config.mask_token_id, query.tokens),
        live=query.live & (left | (program.unconditional == "mask")),
    )
