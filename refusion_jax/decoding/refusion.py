"""ReFusion decoding of a batch as one compiled loop: the published algorithm and the self-correcting one.

Every forward has one layout, the training layout: the drafts of the *chosen* slots first, in original order, then mask
tokens for the open slots *ahead* of them, all causal in buffer order behind the KV buffer. Its chosen part verifies the
drafts, its mask part is the next draft. A row with nothing chosen yet is simply drafting. So both algorithms are one
step,

    forward -> settled prefix of the chosen drafts -> commit -> choose again, repair, or (paper) infill,

and the published algorithm adds a second pair of forwards, infilling, in which each chosen slot sees the buffer and
itself only; an infill's verification carries the next draft too. Rows are each in a phase of their own; all state is
per row and per response offset, and everything a caller can set is an array, so one compiled loop serves any mixture
of settings.

Slots, serial blocks, holes and position IDs are labels of response offsets (`Request`). Serial blocks need no state:
the current block is that of the first open slot, and an EOS drops every open slot of its hole at or after its own.
"""

import dataclasses
import functools
from typing import Any

import flax
import jax
import jax.numpy as jnp

from refusion_jax.decoding.kv_cache import commit, empty_cache, full_cache, write_prompts
from refusion_jax.decoding.placement import (
    commit_own,
    hand_over,
    split_heads,
    split_rows,
    split_state,
    write_own_prompts,
)
from refusion_jax.decoding.rules import DEFAULT_RULES, Rules, Verification
from refusion_jax.decoding.sampling import Reading, filter_logits, gumbel_noise, read_logits, suppress
from refusion_jax.modeling import ALL_GROUPS, KVCache, Packing, Transformer, Visibility
from refusion_jax.sharding import constrain_whole

STEP, INFILL_DRAFT, INFILL_VERIFY = 0, 1, 2


class Request(flax.struct.PyTreeNode):
    """What each row is asked for. `capacity` is the number of response offsets.

    Attributes:
      position_ids: (batch, capacity) int32, a response token's position ID.
      slot_starts: (batch, capacity) int32, the offset at which its slot begins.
      blocks: (batch, capacity) int32, its serial block.
      holes: (batch, capacity) int32, its hole; plain prompts have one.
      is_response: (batch, capacity) bool, False beyond the row's own length.
      self_correcting: (batch,) bool, which of the two algorithms.
      redraft: (batch,) bool.
      slot_thresholds, token_thresholds, carry_thresholds, temperatures, top_ps: (batch,) float32.
      top_ks: (batch,) int32, the vocabulary's size for no limit.
      keys: (batch, 2) uint32, the row's random key data.
      eos_ids: (batch, n) int32.
      suppressed_ids: (batch, n) int32 token IDs never proposed; an ID beyond the vocabulary stands for none.
    """

    position_ids: jax.Array
    slot_starts: jax.Array
    blocks: jax.Array
    holes: jax.Array
    is_response: jax.Array
    self_correcting: jax.Array
    redraft: jax.Array
    slot_thresholds: jax.Array
    token_thresholds: jax.Array
    carry_thresholds: jax.Array
    temperatures: jax.Array
    top_ks: jax.Array
    top_ps: jax.Array
    keys: jax.Array
    eos_ids: jax.Array
    suppressed_ids: jax.Array


class DecodeState(flax.struct.PyTreeNode):
    """The loop's carry.

    Attributes:
      tokens: (batch, capacity) int32, committed tokens and current drafts.
      probabilities: (batch, capacity) float32, with which a committed token was accepted or a draft was proposed.
      committed: (batch, capacity) bool.
      open: (batch, capacity) bool, slots neither committed nor dropped.
      chosen: (batch, capacity) bool, slots whose drafts are being verified or infilled; a subset of `open`.
      ahead: (batch, capacity) bool, open slots that ride along as mask tokens in the next forward.
      passed: (batch, capacity) bool, chosen tokens that stand already.
      phases: (batch,) int32, STEP, INFILL_DRAFT or INFILL_VERIFY.
      rounds, num_chosen: (batch,) int32, rounds done and slots chosen in the infilling under way.
      forwards: (batch,) int32, forwards the row took part in.
      commit_forwards: (batch, capacity) int32, which of the row's forwards committed a token, from 0.
      accepted: (batch, capacity + 1) int32, slots accepted after so many infill rounds; 1 is from the front.
      events: (batch,) int32, acceptances; with `accepted` it gives the authors' tokens-per-forward.
      cache: the KV buffer, or None where it is kept aside.
    """

    tokens: jax.Array
    probabilities: jax.Array
    committed: jax.Array
    open: jax.Array
    chosen: jax.Array
    ahead: jax.Array
    passed: jax.Array
    phases: jax.Array
    rounds: jax.Array
    num_chosen: jax.Array
    forwards: jax.Array
    commit_forwards: jax.Array
    accepted: jax.Array
    events: jax.Array
    cache: KVCache | None


class Work(flax.struct.PyTreeNode):
    """What one call of the loop did, () int32 each.

    Attributes:
      iterations: forwards of the whole batch.
      row_forwards: those of them, over rows, that an unfinished row took part in.
      positions, needed_positions: query positions computed, and those that some row needed.
    """

    iterations: jax.Array
    row_forwards: jax.Array
    positions: jax.Array
    needed_positions: jax.Array


@dataclasses.dataclass(frozen=True)
class Program:
    """What the loop is compiled for.

    Attributes:
      module: the model.
      shapes: (tokens, width) of the forwards to compile, cheapest first: a forward takes the first whose `width` holds
        the longest query and whose `tokens` hold all queries together. The last must hold any, which never exceed the
        response.
      rules: the functions that decide.
      sampling: whether any row may have a temperature.
      infilling: whether any row may decode with the published algorithm.
      split: whether rows and heads are split over the mesh in use, which has to divide both. Rows of several devices
        cannot be packed: every shape is then `batch * width` tokens.
    """

    module: Transformer
    shapes: tuple[tuple[int, int], ...]
    rules: Rules = DEFAULT_RULES
    sampling: bool = True
    infilling: bool = True
    split: bool = False


# ---- small helpers over offsets; a missing offset is `capacity` ----------------------------------------------------


def _offsets(request: Request) -> jax.Array:
    return jnp.arange(request.position_ids.shape[1], dtype=jnp.int32)


def _first(condition: jax.Array) -> jax.Array:
    """(batch, 1): the first offset at which `condition` (batch, capacity) holds, else capacity."""
    index = jnp.arange(condition.shape[1], dtype=jnp.int32)
    return jnp.min(jnp.where(condition, index, condition.shape[1]), axis=1, keepdims=True)


def _label(labels: jax.Array, offset: jax.Array, missing: int) -> jax.Array:
    """(batch, 1): the label of `offset` (batch, 1); `missing` for a missing offset."""
    labels = jnp.pad(labels, ((0, 0), (0, 1)), constant_values=missing)
    return jnp.take_along_axis(labels, offset, axis=1, mode="promise_in_bounds")


def _slot_of(request: Request, offset: jax.Array) -> jax.Array:
    return _label(request.slot_starts, offset, request.slot_starts.shape[1])


def _any(condition: jax.Array) -> jax.Array:
    return jnp.any(condition, axis=1, keepdims=True)


def _at(values: jax.Array, offsets: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, offsets, axis=1, mode="promise_in_bounds")


def _previous(condition: jax.Array) -> jax.Array:
    """Whether `condition` holds at the offset before."""
    return jnp.pad(condition, ((0, 0), (1, 0)))[:, :-1]


def _slot_prefix(request: Request, passes: jax.Array) -> jax.Array:
    """Cumulative product of `passes` inside every slot; the first token of a slot always passes."""
    failures = jnp.cumsum(~passes, axis=1)
    return failures == _at(failures, request.slot_starts)


def _is_eos(request: Request, tokens: jax.Array) -> jax.Array:
    return jnp.any(tokens[..., None] == request.eos_ids[:, None], axis=-1)


def _starts(request: Request) -> jax.Array:
    return request.slot_starts == _offsets(request)


def _ended(request: Request, eos: jax.Array) -> jax.Array:
    """Offsets of the EOS's hole from the beginning of its slot on: what an EOS (batch, 1) drops or closes."""
    same_hole = request.holes == _label(request.holes, eos, -1)
    return same_hole & (request.slot_starts >= _slot_of(request, eos))


def _undisturbed(ahead: jax.Array, kept: jax.Array) -> jax.Array:
    """(batch, 1): whether no kept mask token saw one that was dropped, as when an EOS ends the first of two holes."""
    return ~_any(kept & (jnp.arange(kept.shape[1]) > _first(ahead & ~kept)))


# ---- one forward ---------------------------------------------------------------------------------------------------


def _look_ahead(request: Request, state: DecodeState) -> DecodeState:
    """Sets the mask tokens of the next forward: the unchosen slots of the first serial block that has any.

    They ride along with a verification when its drafts are likely enough to be accepted as a whole; otherwise the
    next draft is a forward of its own.
    """
    drafted = state.chosen & ~state.passed & ~_starts(request)
    joint = jnp.sum(jnp.where(drafted, jnp.log(state.probabilities), 0.0), axis=1, keepdims=True)
    rides = ~_any(state.chosen) | (joint > jnp.log(request.carry_thresholds)[:, None])
    unchosen = state.open & ~state.chosen & rides & (state.phases != INFILL_DRAFT)[:, None]
    no_block = jnp.iinfo(jnp.int32).max
    block = jnp.min(jnp.where(unchosen, request.blocks, no_block), axis=1, keepdims=True)
    return state.replace(ahead=unchosen & (request.blocks == block))


def _query_lengths(state: DecodeState) -> jax.Array:
    """(batch,) int32: query tokens each row needs in its next forward; 0 when the row is finished."""
    return jnp.sum(state.chosen | state.ahead, axis=1)


def _forward(
    program: Program,
    shape: tuple[int, int],
    params: Any,
    prefix: KVCache | None,
    request: Request,
    state: DecodeState,
) -> tuple[Reading, tuple[jax.Array, jax.Array]]:
    """Runs the rows' next forward in the compiled shape (tokens, width).

    Returns:
      what the forward says about every offset it predicts, (batch, capacity); and the query's KV, whose first entries
      are those of the chosen tokens in order, padded to the widest shape.
    """
    module, (num_tokens, width) = program.module, shape
    batch, capacity = state.tokens.shape
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    in_query = state.chosen | state.ahead
    infilling = (state.phases != STEP)[:, None]
    masked = state.ahead | (state.chosen & ~state.passed & (state.phases == INFILL_DRAFT)[:, None])

    count = jnp.sum(state.chosen, axis=1, keepdims=True)
    place = jnp.where(state.chosen, jnp.cumsum(state.chosen, axis=1), count + jnp.cumsum(state.ahead, axis=1)) - 1
    at = jnp.where(in_query, place, width)
    offsets = jnp.zeros((batch, width), jnp.int32).at[rows, at].set(_offsets(request), mode="drop")
    lengths = jnp.sum(in_query, axis=1, keepdims=True)
    index = jnp.arange(width, dtype=jnp.int32)
    live = index < lengths

    slots = jnp.where(index < count, _at(request.slot_starts, offsets) + 1, ALL_GROUPS)
    visibility = Visibility(
        segment=live.astype(jnp.int32),
        order=jnp.broadcast_to(index, (batch, width)),
        group=jnp.where(infilling, slots, 0),
    )
    # Where the query's tokens stand in one line, packed or row by row.
    if num_tokens < batch * width:
        begins = jnp.cumsum(lengths, axis=0) - lengths
        places = jnp.minimum(begins + index, num_tokens - 1)
        flat = jnp.where(live, begins + index, num_tokens)
        sources = jnp.zeros(num_tokens, jnp.int32).at[flat].set(rows * width + index, mode="drop")
        packing = Packing(sources, places)
    else:
        packing = None

    def in_line(values: jax.Array) -> jax.Array:
        line = jnp.broadcast_to(values, (batch, width)).reshape(-1)
        return line if packing is None else line[packing.sources]

    tokens = in_line(_at(jnp.where(masked, module.config.mask_token_id, state.tokens), offsets))
    position_ids = in_line(_at(request.position_ids, offsets))
    if packing is None:
        tokens, position_ids = tokens.reshape(batch, width), position_ids.reshape(batch, width)
    assert state.cache is not None
    caches = (state.cache,) if prefix is None else (prefix, state.cache)
    hidden, kv = module.apply(
        {"params": params}, tokens, position_ids, visibility, caches, True, packing, method="encode"
    )
    logits = module.apply({"params": params}, hidden, method="unembed")

    # As in training, a mask predicts its own position and any other token the next one.
    target = jnp.where(_at(masked, offsets), offsets, jnp.minimum(offsets + 1, capacity - 1))
    line_of_rows, target_positions = in_line(rows), in_line(_at(request.position_ids, target))
    scores = _scores(program, request, state, logits, line_of_rows, target_positions)
    confidence = program.rules.slot_score.token
    reading = read_logits(logits, scores, in_line(_at(state.tokens, target)), confidence)
    predicted_by = place - ~masked
    if packing is None:
        source = jnp.clip(predicted_by, 0, width - 1)
        reading = jax.tree.map(lambda values: _at(values.reshape(batch, width), source), reading)
    else:
        source = jnp.clip(begins + predicted_by, 0, num_tokens - 1)
        reading = jax.tree.map(lambda values: values[source], reading)
    spare = max(width for _, width in program.shapes) - width
    padded = [jnp.pad(part, ((0, 0), (0, 0), (0, 0), (0, spare), (0, 0))) for part in kv]
    return reading, (padded[0], padded[1])


def _scores(
    program: Program, request: Request, state: DecodeState, logits: jax.Array, rows: jax.Array, positions: jax.Array
) -> jax.Array:
    """What proposals are the argmax of: logits, without suppressed tokens, filtered and noisy for rows that sample.

    The published algorithm draws anew in each forward and infills greedily; ours keeps each position's noise fixed, so
    that a repaired draft converges to one sample.

    Args:
      logits: (tokens, vocab). rows, positions: (tokens,), the row and the position that each of them predicts.
    """
    scores = logits
    if request.suppressed_ids.shape[1]:
        scores = suppress(scores, request.suppressed_ids[rows])
    if not program.sampling:
        return scores
    temperatures = jnp.where(state.phases == INFILL_DRAFT, 0.0, request.temperatures)[rows]
    draws = jnp.where(request.self_correcting, 0, state.forwards)[rows]
    limited = (request.top_ks < logits.shape[-1]) | (request.top_ps < 1)

    def filtered() -> jax.Array:
        return filter_logits(scores, temperatures, request.top_ks[rows], request.top_ps[rows])

    def noisy() -> jax.Array:
        kept = jax.lax.cond(jnp.any(limited), filtered, lambda: scores)
        noise = gumbel_noise(request.keys[rows], draws, positions, logits.shape[-1])
        return kept + temperatures[:, None] * noise

    return jax.lax.cond(jnp.any(temperatures > 0), noisy, lambda: scores)


# ---- what a forward leads to ---------------------------------------------------------------------------------------


def _verification(request: Request, state: DecodeState, reading: Reading) -> Verification:
    return Verification(
        token=state.tokens,
        probability=reading.token_probability,
        choice=reading.choice,
        choice_probability=reading.choice_probability,
        threshold=request.token_thresholds[:, None],
        self_correcting=request.self_correcting[:, None],
    )


def _choose(program: Program, request: Request, ahead: jax.Array, reading: Reading) -> jax.Array:
    """Slots among `ahead` that the model is sure of; the single best one when there is none (paper section 3)."""
    score = program.rules.slot_score.slot(jnp.where(ahead, reading.confidence, 0.0), request.slot_starts)
    first = ahead & _starts(request)
    sure = first & (score > request.slot_thresholds[:, None])
    best = jnp.argmax(jnp.where(first, score, -jnp.inf), axis=1, keepdims=True)
    picked = jnp.where(_any(sure), sure, first & (_offsets(request) == best))
    return ahead & _at(picked, request.slot_starts)


def _record(state: DecodeState, happened: jax.Array, slots: jax.Array, rounds: jax.Array) -> DecodeState:
    """Books an acceptance event of `slots` slots after `rounds` rounds, for the authors' tokens-per-forward."""
    # A comparison and no scatter: of that the compiler for TPU v5p and v6e dies, in a loop and from eight rows on.
    booked = happened[:, None] & (jnp.arange(state.accepted.shape[1]) == rounds[:, None])
    accepted = state.accepted + jnp.where(booked, slots[:, None], 0)
    return state.replace(accepted=accepted, events=state.events + happened)


def _after_step(
    program: Program, request: Request, state: DecodeState, reading: Reading
) -> tuple[DecodeState, jax.Array]:
    """Verify from the front; then choose again, repair the drafts (self-correcting) or start to infill (paper).

    Returns the next state and the offsets to commit, (batch, capacity) bool.
    """
    ours = request.self_correcting[:, None]
    chosen, starts = state.chosen, _starts(request)
    verification = _verification(request, state, reading)
    # What has settled stays so and the token behind it passes: with the default rules it would anyway.
    passes = starts | state.passed | _previous(state.passed) | program.rules.accepted(verification)
    settled = chosen & (_offsets(request) < _first(chosen & ~passes))
    eos = _first(settled & _is_eos(request, state.tokens))
    found = eos < chosen.shape[1]
    whole = chosen & (request.slot_starts < _slot_of(request, _first(chosen & ~settled)))
    accepted = jnp.where(found, chosen & (_offsets(request) <= eos), whole)
    still_open = state.open & ~accepted & ~_ended(request, eos)

    left = chosen & ~accepted
    ahead = state.ahead & still_open
    complete = ~_any(left) & _undisturbed(state.ahead, ahead)
    give_back = _any(left) & (found | (_any(accepted) & (~ours | request.redraft[:, None])))
    repair = _any(left) & ~give_back & ours
    infill = _any(left) & ~give_back & ~ours

    drafted, repaired = complete & ahead, repair & left & ~settled & ~starts
    replaced = program.rules.repaired(verification, program.module.config.vocab_size)
    tokens = jnp.where(repaired, replaced, jnp.where(drafted, reading.choice, state.tokens))
    own = drafted | (repaired & (tokens == reading.choice))
    checked = (accepted & ~starts) | repaired
    probabilities = jnp.where(checked, reading.token_probability, state.probabilities)
    slots = jnp.sum(accepted & starts, axis=1)
    state = _record(state, slots > 0, slots, jnp.ones_like(slots))
    state = state.replace(
        tokens=tokens,
        probabilities=jnp.where(own, reading.choice_probability, probabilities),
        open=still_open,
        chosen=jnp.where(complete, _choose(program, request, ahead, reading), left & ~give_back),
        passed=jnp.where(infill, chosen & _slot_prefix(request, passes), repair & left & settled),
        phases=jnp.where(infill[:, 0], INFILL_DRAFT, STEP),
        rounds=jnp.zeros_like(state.rounds),
        num_chosen=jnp.sum(chosen & starts, axis=1),
    )
    return state, accepted


def _after_infill_draft(state: DecodeState, reading: Reading) -> DecodeState:
    redrafted = state.chosen & ~state.passed
    return state.replace(
        tokens=jnp.where(redrafted, reading.choice, state.tokens),
        probabilities=jnp.where(redrafted, reading.choice_probability, state.probabilities),
        phases=jnp.full_like(state.phases, INFILL_VERIFY),
    )


def _after_infill_verify(
    program: Program, request: Request, state: DecodeState, reading: Reading
) -> tuple[DecodeState, jax.Array]:
    """Marks what passed, each slot for itself; commits all chosen slots once every token has (paper section 3)."""
    accepts = program.rules.accepted(_verification(request, state, reading))
    passes = _starts(request) | _previous(state.passed) | accepts
    passed = state.chosen & _slot_prefix(request, passes)
    eos = _first(passed & _is_eos(request, state.tokens))
    # An EOS drops the chosen slots behind it; those of other holes go back to the open ones.
    chosen = state.chosen & (request.slot_starts <= _slot_of(request, eos))
    passed = chosen & (passed | _ended(request, eos))
    # Chosen slots are still being filled and close when they are committed.
    still_open = (state.open & ~_ended(request, eos)) | chosen

    done = ~_any(chosen & ~passed)
    accepted = done & chosen & (_offsets(request) <= _first(chosen & _is_eos(request, state.tokens)))
    still_open &= ~(done & chosen)
    ahead = state.ahead & still_open
    ahead &= done & ~_any(state.chosen & ~accepted) & _undisturbed(state.ahead, ahead)
    rounds = state.rounds + 1
    # The authors also count the loop entry that finds nothing left to do.
    state = _record(state, done[:, 0], state.num_chosen, rounds + 1)
    probabilities = jnp.where(accepted & ~_starts(request), reading.token_probability, state.probabilities)
    state = state.replace(
        tokens=jnp.where(ahead, reading.choice, state.tokens),
        probabilities=jnp.where(ahead, reading.choice_probability, probabilities),
        open=still_open,
        chosen=jnp.where(done, _choose(program, request, ahead, reading), chosen),
        passed=passed & ~done,
        phases=jnp.where(done[:, 0], STEP, INFILL_DRAFT),
        rounds=rounds,
    )
    return state, accepted


def _advance(program: Program, request: Request, state: DecodeState, reading: Reading) -> tuple[DecodeState, jax.Array]:
    """What the forward leads to, each row in its own phase: the next state and the offsets to commit."""
    step = _after_step(program, request, state, reading)
    if not program.infilling:
        return step
    nothing = jnp.zeros_like(state.open)
    outcomes = (
        step,
        (_after_infill_draft(state, reading), nothing),
        _after_infill_verify(program, request, state, reading),
    )

    def by_phase(step: jax.Array, infill_draft: jax.Array, infill_verify: jax.Array) -> jax.Array:
        phase = state.phases.reshape(-1, *[1] * (step.ndim - 1))
        return jnp.where(phase == STEP, step, jnp.where(phase == INFILL_DRAFT, infill_draft, infill_verify))

    return jax.tree.map(by_phase, *outcomes)


# ---- the compiled functions ----------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))  # so that each field gets a buffer of its own, to donate
def empty_state(program: Program, batch: int, capacity: int, buffer_length: int) -> DecodeState:
    """A batch in which every row is finished."""
    zeros = jnp.zeros((batch, capacity), jnp.int32)
    nothing = jnp.zeros((batch, capacity), jnp.bool_)
    counts = jnp.zeros(batch, jnp.int32)
    state = DecodeState(
        tokens=zeros,
        probabilities=jnp.zeros((batch, capacity), jnp.float32),
        committed=nothing,
        open=nothing,
        chosen=nothing,
        ahead=nothing,
        passed=nothing,
        phases=counts,
        rounds=counts,
        num_chosen=counts,
        forwards=counts,
        commit_forwards=zeros,
        accepted=jnp.zeros((batch, capacity + 1), jnp.int32),
        events=counts,
        cache=empty_cache(program.module.config, batch, buffer_length),
    )
    return hand_over(state) if program.split else state


@functools.partial(jax.jit, static_argnames=("module", "split"))
def prefill_prefix(
    module: Transformer, params: Any, tokens: jax.Array, length: jax.Array, split: bool = False
) -> KVCache:
    """The KV of text that stands before every prompt: a buffer of batch 1.

    Args:
      tokens: (copies, width) int32, padded at the end; one copy for each device that rows are split over.
      length: (1,) int32. split: as `Program.split`.
    """
    position_ids = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    visibility = Visibility.causal(*tokens.shape)
    _, kv = module.apply({"params": params}, tokens, position_ids, visibility, (), True, method="encode")
    cache = full_cache(module.config, jax.tree.map(lambda part: part[:, :1], kv), length)
    return split_heads(cache) if split else cache


@functools.partial(jax.jit, static_argnames=("module", "split"), donate_argnames=("request", "state"))
def admit(
    module: Transformer,
    params: Any,
    prefix: KVCache | None,
    prompts: jax.Array,
    position_ids: jax.Array,
    lengths: jax.Array,
    rows: jax.Array,
    asked: Request,
    request: Request,
    state: DecodeState,
    split: bool = False,
) -> tuple[Request, DecodeState]:
    """Computes the KV of prompts and gives each a row to start in.

    Args:
      module, params: the model. prefix: what stands before every prompt.
      prompts, position_ids: (prompts, width) int32, padded at the end. lengths: (prompts,) int32.
      rows: (prompts,) int32, the finished row that each takes; one beyond the batch for a prompt that is none. Where
        rows are split, prompts are split like them, and each takes one of its own device's.
      asked: what the prompts ask for, a `Request` of `prompts` rows.
      request, state: the batch's; donated. split: as `Program.split`.
    """
    visibility = Visibility.causal(*prompts.shape)
    caches = () if prefix is None else (prefix,)
    _, kv = module.apply({"params": params}, prompts, position_ids, visibility, caches, True, method="encode")

    def take_rows(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[rows].set(new, mode="drop")

    assert state.cache is not None
    request = jax.tree.map(take_rows, request, asked)
    fresh = jax.tree.map(lambda old: jnp.zeros((len(rows), *old.shape[1:]), old.dtype), state.replace(cache=None))
    fresh = fresh.replace(open=asked.is_response)
    cache = (write_own_prompts if split else write_prompts)(state.cache, kv, rows, lengths)
    state = jax.tree.map(take_rows, state.replace(cache=None), fresh).replace(cache=cache)
    state = _look_ahead(request, state)
    return (constrain_whole(request), hand_over(state)) if split else (request, state)


@functools.partial(jax.jit, donate_argnames="state")
def release(state: DecodeState, rows: jax.Array) -> DecodeState:
    """Finishes rows (batch,) bool before their time; what they have committed stays."""
    keep = ~rows[:, None]
    return state.replace(open=state.open & keep, chosen=state.chosen & keep, ahead=state.ahead & keep)


@functools.partial(jax.jit, static_argnames="program", donate_argnames="state")
def decode_loop(
    program: Program,
    params: Any,
    prefix: KVCache | None,
    request: Request,
    state: DecodeState,
    least_running: jax.Array,
    most_iterations: jax.Array,
) -> tuple[DecodeState, Work]:
    """Decodes while enough rows are unfinished: one `while_loop`, no transfer to the host.

    Args:
      program: what to compile.
      params: the model's. prefix: what stands before every prompt.
      request: what the rows are asked for.
      state: from `empty_state`, `admit`, `release` or this function; its buffers are donated.
      least_running: () int32, ends when fewer rows than this are unfinished; at least 1.
      most_iterations: () int32, ends after so many.
    """
    batch = state.tokens.shape[0]
    if program.split:
        request, state = split_rows(request), split_state(state)
    append = commit_own if program.split else commit
    sizes, widths = (jnp.array(column, jnp.int32) for column in zip(*program.shapes, strict=True))

    def goes_on(carry: tuple[DecodeState, Work]) -> jax.Array:
        state, work = carry
        running = jnp.sum(jnp.any(state.open, axis=1))
        return (running >= least_running) & (work.iterations < most_iterations)

    def iterate(carry: tuple[DecodeState, Work]) -> tuple[DecodeState, Work]:
        state, work = carry
        lengths, running, cache = _query_lengths(state), jnp.any(state.open, axis=1), state.cache
        assert cache is not None
        fits = (jnp.sum(lengths) <= sizes) & (jnp.max(lengths) <= widths)
        shape = jnp.argmax(fits)
        forwards = [functools.partial(_forward, program, shape) for shape in program.shapes]
        reading, kv = jax.lax.switch(shape, forwards, params, prefix, request, state)
        after, accepted = _advance(program, request, state.replace(cache=None), reading)
        after = after.replace(
            committed=state.committed | accepted,
            commit_forwards=jnp.where(accepted, state.forwards[:, None], state.commit_forwards),
            forwards=state.forwards + running,
            cache=append(cache, kv, jnp.sum(accepted, axis=1)),
        )
        work = Work(
            iterations=work.iterations + 1,
            row_forwards=work.row_forwards + jnp.sum(running),
            positions=work.positions + jnp.minimum(sizes, batch * widths)[shape],
            needed_positions=work.needed_positions + jnp.sum(lengths),
        )
        after = _look_ahead(request, after)
        after = split_state(after) if program.split else after
        # Arrays made of Python numbers have weak types; a state with other types would compile everything again.
        return jax.tree.map(lambda new, old: new.astype(old.dtype), after, state), work

    none = jnp.zeros((), jnp.int32)
    state, work = jax.lax.while_loop(goes_on, iterate, (state, Work(none, none, none, none)))
    if program.split:
        return hand_over(state), constrain_whole(work)
    # The host reads all but the buffer, also where the parameters are split over several processes.
    return constrain_whole(state.replace(cache=None)).replace(cache=state.cache), constrain_whole(work)
