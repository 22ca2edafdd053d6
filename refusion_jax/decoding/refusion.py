"""ReFusion decoding of a batch as one compiled loop: the published algorithm and the self-correcting one.

Every forward has one layout, the training layout: the drafts of the *chosen* slots first, in original order, then mask
tokens for the open slots *ahead* of them, all causal in buffer order behind the KV buffer. Its chosen part verifies the
drafts, its mask part is the next draft. A row with nothing chosen yet is simply drafting. So both algorithms are one
step,

    forward -> settled prefix of the chosen drafts -> commit -> choose again, repair, or (paper) infill,

and the published algorithm adds a second pair of forwards, infilling, in which each chosen slot sees the buffer and
itself only. Rows are each in a phase of their own; all state is per row and per response offset, and everything a
caller can set is an array, so one compiled loop serves any mixture of settings.

Slots, serial blocks and position IDs are labels of response offsets (`Request`). Serial blocks need no state: the
current block is that of the first open slot, and an EOS drops every open slot at or after its own.
"""

import functools
from typing import Any

import flax
import jax
import jax.numpy as jnp

from refusion_jax.decoding.kv_cache import commit, empty_cache
from refusion_jax.decoding.sampling import Reading, gumbel_noise, read_logits
from refusion_jax.modeling import KVCache, Transformer, Visibility

STEP, INFILL_DRAFT, INFILL_VERIFY = 0, 1, 2


class Request(flax.struct.PyTreeNode):
    """What each row is asked for. `capacity` is the number of response offsets.

    Attributes:
      position_ids: (batch, capacity) int32, a response token's position ID.
      slot_starts: (batch, capacity) int32, the offset at which its slot begins.
      blocks: (batch, capacity) int32, its serial block.
      is_response: (batch, capacity) bool, False beyond the row's own length.
      self_correcting: (batch,) bool, which of the two algorithms.
      redraft: (batch,) bool.
      slot_thresholds, token_thresholds, temperatures: (batch,) float32.
      keys: (batch, 2) uint32, the row's random key data.
      eos_ids: (batch, n) int32.
      suppressed_ids: (batch, n) int32 token IDs never proposed; an ID beyond the vocabulary stands for none.
    """

    position_ids: jax.Array
    slot_starts: jax.Array
    blocks: jax.Array
    is_response: jax.Array
    self_correcting: jax.Array
    redraft: jax.Array
    slot_thresholds: jax.Array
    token_thresholds: jax.Array
    temperatures: jax.Array
    keys: jax.Array
    eos_ids: jax.Array
    suppressed_ids: jax.Array


class DecodeState(flax.struct.PyTreeNode):
    """The loop's carry.

    Attributes:
      tokens: (batch, capacity) int32, committed tokens and current drafts.
      committed: (batch, capacity) bool.
      open: (batch, capacity) bool, slots neither committed nor dropped.
      chosen: (batch, capacity) bool, slots whose drafts are being verified or infilled; a subset of `open`.
      passed: (batch, capacity) bool, infilling's marks.
      phases: (batch,) int32, STEP, INFILL_DRAFT or INFILL_VERIFY.
      rounds, num_chosen: (batch,) int32, rounds done and slots chosen in the infilling under way.
      forwards: (batch,) int32, forwards the row took part in.
      commit_forwards: (batch, capacity) int32, which of the row's forwards committed a token, from 0.
      accepted: (batch, capacity + 1) int32, slots accepted after so many infill rounds; 1 is from the front.
      events: (batch,) int32, acceptances; with `accepted` it gives the authors' tokens-per-forward.
      cache: the KV buffer, or None where it is kept aside.
    """

    tokens: jax.Array
    committed: jax.Array
    open: jax.Array
    chosen: jax.Array
    passed: jax.Array
    phases: jax.Array
    rounds: jax.Array
    num_chosen: jax.Array
    forwards: jax.Array
    commit_forwards: jax.Array
    accepted: jax.Array
    events: jax.Array
    cache: KVCache | None


# ---- small helpers over offsets; a missing offset is `capacity` ----------------------------------------------------


def _offsets(request: Request) -> jax.Array:
    return jnp.arange(request.position_ids.shape[1], dtype=jnp.int32)


def _first(condition: jax.Array) -> jax.Array:
    """(batch, 1): the first offset at which `condition` (batch, capacity) holds, else capacity."""
    index = jnp.arange(condition.shape[1], dtype=jnp.int32)
    return jnp.min(jnp.where(condition, index, condition.shape[1]), axis=1, keepdims=True)


def _slot_of(request: Request, offset: jax.Array) -> jax.Array:
    """(batch, 1): start of the slot that holds `offset` (batch, 1); capacity for a missing offset."""
    capacity = request.position_ids.shape[1]
    starts = jnp.pad(request.slot_starts, ((0, 0), (0, 1)), constant_values=capacity)
    return jnp.take_along_axis(starts, offset, axis=1)


def _any(condition: jax.Array) -> jax.Array:
    return jnp.any(condition, axis=1, keepdims=True)


def _slot_prefix(request: Request, passes: jax.Array) -> jax.Array:
    """Cumulative product of `passes` inside every slot; the first token of a slot always passes."""
    failures = jnp.cumsum(~passes, axis=1)
    return failures == jnp.take_along_axis(failures, request.slot_starts, axis=1)


def _is_eos(request: Request, tokens: jax.Array) -> jax.Array:
    return jnp.any(tokens[..., None] == request.eos_ids[:, None], axis=-1)


def _starts(request: Request) -> jax.Array:
    return request.slot_starts == _offsets(request)


# ---- one forward ---------------------------------------------------------------------------------------------------


def _ahead(request: Request, state: DecodeState) -> jax.Array:
    """Open slots that ride along as mask tokens: the unchosen ones of the first serial block that has any."""
    unchosen = state.open & ~state.chosen & (state.phases == STEP)[:, None]
    no_block = jnp.iinfo(jnp.int32).max
    block = jnp.min(jnp.where(unchosen, request.blocks, no_block), axis=1, keepdims=True)
    return unchosen & (request.blocks == block)


def query_lengths(request: Request, state: DecodeState) -> jax.Array:
    """(batch,) int32: query tokens each row needs in its next forward; 0 when the row is finished."""
    return jnp.sum(state.chosen | _ahead(request, state), axis=1)


def _forward(
    module: Transformer, params: Any, request: Request, state: DecodeState, width: int
) -> tuple[Reading, jax.Array, tuple[jax.Array, jax.Array]]:
    """Runs the rows' next forward at query width `width`.

    Returns:
      what the forward says about every offset it predicts, (batch, capacity); the offsets that were ahead; and the
      query's KV, whose first entries are those of the chosen tokens in order.
    """
    config = module.config
    batch, capacity = state.tokens.shape
    rows = jnp.arange(batch)[:, None]
    ahead = _ahead(request, state)
    in_query = state.chosen | ahead
    infilling = (state.phases != STEP)[:, None]
    masked = ahead | (state.chosen & ~state.passed & (state.phases == INFILL_DRAFT)[:, None])

    count = jnp.sum(state.chosen, axis=1, keepdims=True)
    place = jnp.where(state.chosen, jnp.cumsum(state.chosen, axis=1), count + jnp.cumsum(ahead, axis=1)) - 1
    at = jnp.where(in_query, place, width)
    offsets = jnp.zeros((batch, width), jnp.int32).at[rows, at].set(_offsets(request), mode="drop")
    live = jnp.arange(width) < jnp.sum(in_query, axis=1, keepdims=True)

    def in_layout(values: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values, offsets, axis=1)

    visibility = Visibility(
        segment=live.astype(jnp.int32),
        order=jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width)),
        group=jnp.where(infilling, in_layout(request.slot_starts) + 1, 0),
    )
    tokens = in_layout(jnp.where(masked, config.mask_token_id, state.tokens))
    hidden, kv = module.apply(
        {"params": params}, tokens, in_layout(request.position_ids), visibility, state.cache, True, method="encode"
    )
    logits = module.apply({"params": params}, hidden, method="unembed").reshape(batch, width, -1)

    # As in training, a mask predicts its own position and any other token the next one.
    target = jnp.where(in_layout(masked), offsets, jnp.minimum(offsets + 1, capacity - 1))
    noise = _noise(request, state, target, config.vocab_size)
    reading = read_logits(logits, jnp.take_along_axis(state.tokens, target, axis=1), noise, request.suppressed_ids)
    source = jnp.where(masked, place, jnp.pad(place, ((0, 0), (1, 0)))[:, :-1])
    source = jnp.clip(source, 0, width - 1)
    return jax.tree.map(lambda values: jnp.take_along_axis(values, source, axis=1), reading), ahead, kv


def _noise(request: Request, state: DecodeState, target: jax.Array, vocab_size: int) -> jax.Array:
    """Scaled Gumbel noise (batch, width, vocab), zeros when no row samples.

    The published algorithm draws anew in each forward and infills greedily; ours keeps each position's noise fixed, so
    that a repaired draft converges to one sample.
    """
    temperature = jnp.where(state.phases == STEP, request.temperatures, 0.0)
    draws = jnp.where(request.self_correcting, 0, state.forwards)

    def sampled() -> jax.Array:
        positions = jnp.take_along_axis(request.position_ids, target, axis=1)
        noise = gumbel_noise(request.keys, draws, positions, vocab_size)
        return temperature[:, None, None] * noise

    return jax.lax.cond(jnp.any(temperature > 0), sampled, lambda: jnp.zeros((*target.shape, vocab_size), jnp.float32))


# ---- what a forward leads to ---------------------------------------------------------------------------------------


def _choose(request: Request, ahead: jax.Array, reading: Reading) -> jax.Array:
    """Slots among `ahead` whose first token is sure; the single most probable one when none is (paper section 3)."""
    first = ahead & _starts(request)
    sure = first & (reading.choice_probability > request.slot_thresholds[:, None])
    best = jnp.argmax(jnp.where(first, reading.choice_probability, -1.0), axis=1, keepdims=True)
    picked = jnp.where(_any(sure), sure, first & (_offsets(request) == best))
    return ahead & jnp.take_along_axis(picked, request.slot_starts, axis=1)


def _record(state: DecodeState, happened: jax.Array, slots: jax.Array, rounds: jax.Array) -> DecodeState:
    """Books an acceptance event of `slots` slots after `rounds` rounds, for the authors' tokens-per-forward."""
    rows = jnp.arange(happened.shape[0])
    accepted = state.accepted.at[rows, rounds].add(jnp.where(happened, slots, 0))
    return state.replace(accepted=accepted, events=state.events + happened)


def _after_step(
    request: Request, state: DecodeState, reading: Reading, ahead: jax.Array
) -> tuple[DecodeState, jax.Array]:
    """Verify from the front; then choose again, repair the drafts (self-correcting) or start to infill (paper).

    Returns the next state and the offsets to commit, (batch, capacity) bool.
    """
    ours = request.self_correcting[:, None]
    chosen, starts = state.chosen, _starts(request)
    passes = starts | (reading.token_probability > request.token_thresholds[:, None])
    passes |= ours & (state.tokens == reading.choice)
    settled = chosen & (_offsets(request) < _first(chosen & ~passes))
    eos = _first(settled & _is_eos(request, state.tokens))
    found = eos < chosen.shape[1]
    whole = chosen & (request.slot_starts < _slot_of(request, _first(chosen & ~settled)))
    accepted = jnp.where(found, chosen & (_offsets(request) <= eos), whole)
    still_open = state.open & ~accepted & (request.slot_starts < _slot_of(request, eos))

    left = chosen & ~accepted
    complete = ~_any(left)
    give_back = ~complete & (found | (_any(accepted) & (~ours | request.redraft[:, None])))
    repair = ~complete & ~give_back & ours
    infill = ~complete & ~give_back & ~ours

    ahead &= still_open
    next_chosen = jnp.where(complete, _choose(request, ahead, reading), left & ~give_back)
    rewritten = (complete & ahead) | (repair & left & ~settled & ~starts)
    slots = jnp.sum(accepted & starts, axis=1)
    state = _record(state, slots > 0, slots, jnp.ones_like(slots))
    state = state.replace(
        tokens=jnp.where(rewritten, reading.choice, state.tokens),
        open=still_open,
        chosen=next_chosen,
        passed=chosen & _slot_prefix(request, passes),
        phases=jnp.where(infill[:, 0], INFILL_DRAFT, STEP),
        rounds=jnp.zeros_like(state.rounds),
        num_chosen=jnp.sum(chosen & starts, axis=1),
    )
    return state, accepted


def _after_infill_draft(state: DecodeState, reading: Reading) -> DecodeState:
    tokens = jnp.where(state.chosen & ~state.passed, reading.choice, state.tokens)
    return state.replace(tokens=tokens, phases=jnp.full_like(state.phases, INFILL_VERIFY))


def _after_infill_verify(request: Request, state: DecodeState, reading: Reading) -> tuple[DecodeState, jax.Array]:
    """Marks what passed, each slot for itself; commits all chosen slots once every token has (paper section 3)."""
    before = jnp.pad(state.passed, ((0, 0), (1, 0)))[:, :-1]
    passes = _starts(request) | before | (reading.token_probability > request.token_thresholds[:, None])
    passed = state.chosen & _slot_prefix(request, passes)
    eos_slot = _slot_of(request, _first(passed & _is_eos(request, state.tokens)))
    chosen = state.chosen & (request.slot_starts <= eos_slot)
    passed |= chosen & (request.slot_starts == eos_slot)
    # The slots at or after an EOS close at once; those chosen are still being filled and close when they are committed.
    still_open = (state.open & (request.slot_starts < eos_slot)) | chosen

    done = ~_any(chosen & ~passed)
    accepted = done & chosen & (_offsets(request) <= _first(chosen & _is_eos(request, state.tokens)))
    rounds = state.rounds + 1
    # The authors also count the loop entry that finds nothing left to do.
    state = _record(state, done[:, 0], state.num_chosen, rounds + 1)
    state = state.replace(
        open=still_open & ~(done & chosen),
        chosen=chosen & ~done,
        passed=passed,
        phases=jnp.where(done[:, 0], STEP, INFILL_DRAFT),
        rounds=rounds,
    )
    return state, accepted


def _iterate(module: Transformer, params: Any, request: Request, state: DecodeState, width: int) -> DecodeState:
    """One forward for every unfinished row, each in its own phase."""
    reading, ahead, kv = _forward(module, params, request, state, width)
    cache, phases, running = state.cache, state.phases, _any(state.open)
    assert cache is not None
    bare = state.replace(cache=None)
    nothing = jnp.zeros_like(state.open)
    outcomes = (
        _after_step(request, bare, reading, ahead),
        (_after_infill_draft(bare, reading), nothing),
        _after_infill_verify(request, bare, reading),
    )

    def by_phase(step: jax.Array, infill_draft: jax.Array, infill_verify: jax.Array) -> jax.Array:
        phase = phases.reshape(-1, *[1] * (step.ndim - 1))
        return jnp.where(phase == STEP, step, jnp.where(phase == INFILL_DRAFT, infill_draft, infill_verify))

    state, accepted = jax.tree.map(by_phase, *outcomes)
    return state.replace(
        committed=state.committed | accepted,
        commit_forwards=jnp.where(accepted, state.forwards[:, None], state.commit_forwards),
        forwards=state.forwards + running[:, 0],
        cache=commit(cache, kv, jnp.sum(accepted, axis=1)),
    )


# ---- the compiled functions ----------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("module", "buffer_length"))
def prefill(
    module: Transformer, params: Any, prompts: jax.Array, lengths: jax.Array, request: Request, buffer_length: int
) -> DecodeState:
    """Computes the prompts' KV and the state a decode starts from.

    Args:
      module, params: the model.
      prompts: (batch, prompt_length) int32, padded at the end. lengths: (batch,) int32.
      request: what the rows are asked for.
      buffer_length: KV entries per row, at least prompt plus response.
    """
    batch, prompt_length = prompts.shape
    position_ids = jnp.broadcast_to(jnp.arange(prompt_length, dtype=jnp.int32), prompts.shape)
    visibility = Visibility.causal(batch, prompt_length)
    _, kv = module.apply({"params": params}, prompts, position_ids, visibility, None, True, method="encode")
    zeros = jnp.zeros_like(request.position_ids)
    nothing = jnp.zeros_like(request.is_response)
    counts = jnp.zeros(batch, jnp.int32)
    return DecodeState(
        tokens=zeros,
        committed=nothing,
        open=request.is_response,
        chosen=nothing,
        passed=nothing,
        phases=jnp.full_like(counts, STEP),
        rounds=counts,
        num_chosen=counts,
        forwards=counts,
        commit_forwards=zeros,
        accepted=jnp.zeros((batch, zeros.shape[1] + 1), jnp.int32),
        events=counts,
        cache=commit(empty_cache(module.config, batch, buffer_length), kv, lengths),
    )


@functools.partial(jax.jit, static_argnames=("module", "widths"), donate_argnames=("state",))
def decode_loop(
    module: Transformer, params: Any, request: Request, state: DecodeState, widths: tuple[int, ...]
) -> DecodeState:
    """Decodes until every row is finished: one `while_loop`, no transfer to the host.

    Args:
      module, params: the model.
      request: what the rows are asked for.
      state: from `prefill`; its buffers are donated.
      widths: ascending query widths to compile; every forward takes the narrowest that holds all rows. The last must
        hold any query, which never exceeds the response.
    """

    def needed(state: DecodeState) -> jax.Array:
        return jnp.max(query_lengths(request, state))

    def at_every_width(state: DecodeState) -> DecodeState:
        # One inner loop per width, rather than a conditional on the width, so that the KV buffer stays in place.
        for narrower, width in zip((0, *widths), widths, strict=False):
            fits = functools.partial(lambda low, high, s: (low < needed(s)) & (needed(s) <= high), narrower, width)
            step = functools.partial(_iterate, module, params, request, width=width)
            state = jax.lax.while_loop(fits, step, state)
        return state

    return jax.lax.while_loop(lambda state: needed(state) > 0, at_every_width, state)
