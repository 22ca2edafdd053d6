"""The paper's decoding with parts of its infilling repaired, greedily and one sequence at a time.

Five things set infilling apart from self-correcting decoding, and each can be repaired by itself:

- The first token of a slot that has not passed yet passes in the next round, whatever the model says. `checked`: unless
  its probability is above the threshold, the model's own next-token choice takes its place, and it is this that stands.
  The tokens behind a replaced one were read behind another token, so they do not pass in that round.
- Tokens that have not passed are drafted anew at mask positions. `next_token`: all but the first of each slot become
  the model's own next-token choices in the verification before. The first one keeps its mask position and the forward
  that takes, unless it is `checked` as well: then it too is the model's own choice, and a round is one forward.
- Committed slots keep the keys and values that each computed without the others in view. `recomputed`: one more
  forward computes them in plain causal order.
- Nor do slots see one another while they are filled. `in_view`: each sees the chosen ones before it, as they stand.
  Keys and values are then those of causal order anyway.
- Tokens of a slot pass and stay while those of earlier slots may still change. `in_order`, for slots in view: a token
  passes only when all before it have, in all chosen slots.

A slot's first token is never checked, by any of these decoders.
"""

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import refusion_jax as rf
from refusion_jax.config import ConfigError
from refusion_jax.decoding.kv_cache import commit, empty_cache
from refusion_jax.decoding.rules import DEFAULT_RULES
from refusion_jax.decoding.sampling import read_logits
from refusion_jax.modeling import KVCache, Transformer, Visibility

NARROWEST = 16  # query positions of the smallest compiled forward; others have powers of 2 times as many


@dataclasses.dataclass(frozen=True)
class Repairs:
    """What is repaired of the paper's infilling; nothing by default."""

    checked: bool = False
    next_token: bool = False
    recomputed: bool = False
    in_view: bool = False
    in_order: bool = False

    def __post_init__(self) -> None:
        if self.in_order and not self.in_view:
            raise ConfigError("in_order is for slots that see one another; repair in_view as well.")


class Origin(enum.IntEnum):
    """Why a committed token stands."""

    FRONT_FIRST = 0  # the first of a slot that was accepted from the front
    FRONT = 1  # above the threshold, accepted from the front
    INFILLED_FIRST = 2  # the first of an infilled slot
    INFILLED = 3  # above the threshold, infilled
    CHOICE = 4  # infilled at or below the threshold, but the model's own choice
    UNCHECKED = 5  # infilled at or below the threshold, and not the model's own choice


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What one sequence was decoded to.

    Attributes:
      tokens: (length,) int, by response offset; -1 where nothing was committed.
      origins: (length,) int, the committed tokens' `Origin`.
      order: (length,) int, which of `forwards` computed the committed keys and values.
      forwards: with every draft and every verification a forward of its own.
      fused_forwards: with the next draft riding along with the last verification where it can.
    """

    tokens: np.ndarray
    origins: np.ndarray
    order: np.ndarray
    forwards: int
    fused_forwards: int

    @property
    def is_infilled(self) -> bool:
        """Whether infilling had any part in it."""
        return bool((self.origins > Origin.FRONT).any())


@dataclasses.dataclass(frozen=True)
class Reading:
    """What one forward says about its `n` query tokens.

    Attributes:
      choice, confidence: (n,) the most probable token at each position, and its probability.
      own, probability: (n,) the most probable token at the position before, and the query token's probability there.
        Those of the first token of a slot mean nothing.
      kv: keys and values of the query.
    """

    choice: np.ndarray
    confidence: np.ndarray
    own: np.ndarray
    probability: np.ndarray
    kv: Any


class Network:
    """A model behind the committed keys and values of one sequence.

    Args:
      model: the model.
      prompt_length, response_length: the most tokens of a prompt and of a response.

    Attributes:
      config: the model's. cache: what is committed.
    """

    def __init__(self, model: rf.Model, prompt_length: int, response_length: int):
        self.config, self._module, self._params = model.config, model.module, model.params
        self.cache = empty_cache(model.config, 1, prompt_length + response_length)
        self._widest = max(prompt_length, response_length)

    def begin(self, prompt: Sequence[int]) -> None:
        """Commits a prompt, and nothing else."""
        self.cache = self.cache.replace(lengths=jnp.zeros(1, jnp.int32))
        self.commit(self.forward(np.array(prompt), np.arange(len(prompt))), len(prompt))

    def forward(self, tokens: np.ndarray, position_ids: np.ndarray, groups: np.ndarray | int = 0) -> Reading:
        """One forward of (n,) tokens that see what is committed, and each other as `groups` of `Visibility` say."""
        length, width = len(tokens), NARROWEST
        while width < length:
            width *= 2
        query = np.zeros((3, min(width, self._widest)), np.int32)
        query[:, :length] = np.broadcast_arrays(tokens, position_ids, groups)
        *found, kv = _forward(self._module, self._params, self.cache, query, length)
        choice, confidence, probability = (np.asarray(values)[:length] for values in found)
        return Reading(choice, confidence, np.roll(choice, 1), np.roll(probability, 1), kv)

    def commit(self, reading: Reading, count: int) -> None:
        """Commits the first `count` tokens of a forward's query."""
        self.cache = _commit(self.cache, reading.kv, np.array([count], np.int32))


@functools.partial(jax.jit, static_argnums=0)
def _forward(module: Transformer, params: Any, cache: KVCache, query: jax.Array, length: jax.Array) -> tuple[Any, ...]:
    tokens, position_ids, groups = query[:, None]
    index = jnp.arange(query.shape[1], dtype=jnp.int32)[None]
    visibility = Visibility(segment=(index < length).astype(jnp.int32), order=index, group=groups)
    variables = {"params": params}
    hidden, kv = module.apply(variables, tokens, position_ids, visibility, (cache,), True, method="encode")
    logits = module.apply(variables, hidden, method="unembed")
    following = jnp.roll(tokens[0], -1)
    reading = read_logits(logits, logits, following, DEFAULT_RULES.slot_score.token)
    return reading.choice, reading.choice_probability, reading.token_probability, kv


_commit = jax.jit(commit, donate_argnums=0)


def decode(network: Network, prompt: Sequence[int], config: rf.DecodeConfig, repairs: Repairs) -> Decoded:
    """Decodes one prompt by the paper's algorithm with these repairs.

    Args:
      network: what computes; the committed sequence stays in it.
      prompt: token IDs. config: lengths, slots, blocks and thresholds; the rest of it does not matter.
      repairs: what differs from the paper.
    """
    row = _Row(network, prompt, config)
    while row.open:
        chosen, tokens = row.draft(config.slot_threshold)
        reading = row.forward(tokens, chosen)
        passed = row.is_first(tokens) | (reading.probability > config.token_threshold)
        prefix = int(np.logical_and.accumulate(passed).sum())
        end = row.through_eos(tokens[:prefix]) or prefix // config.slot_size * config.slot_size
        if end:
            origins = np.where(row.is_first(tokens), Origin.FRONT_FIRST, Origin.FRONT)
            row.commit(reading, chosen, tokens[:end], origins)
        else:
            _infill(row, chosen, tokens, reading, config.token_threshold, repairs)
    return Decoded(row.tokens, row.origins, row.order, row.forwards, row.fused_forwards)


def _infill(
    row: "_Row", chosen: list[int], tokens: np.ndarray, reading: Reading, threshold: float, repairs: Repairs
) -> None:
    """Fills the chosen slots, none of which sees another unless that is repaired, and commits them."""
    first = row.is_first(tokens)
    prefix = np.logical_and.accumulate if repairs.in_order else row.slot_prefix
    passed = prefix(first | (reading.probability > threshold))
    origins = np.where(first, Origin.INFILLED_FIRST, Origin.INFILLED)
    outdated = False  # whether keys and values are those of a token that has been replaced
    while outdated or not passed.all():
        due = _previous(passed) & ~passed  # passes in this round
        tokens = _propose(row, chosen, tokens, passed, due, reading, repairs)
        reading = row.forward(tokens, chosen, repairs.in_view)
        above = reading.probability > threshold
        doubted = due & ~above & (tokens != reading.own)
        origins[due & ~above] = Origin.CHOICE
        if repairs.checked:
            tokens = np.where(doubted, reading.own, tokens)
            above &= ~_previous(doubted)
        else:
            origins[doubted] = Origin.UNCHECKED
        passed = prefix(row.is_first(tokens) | passed | due | above)
        with_eos = np.flatnonzero(passed & row.is_eos(tokens))
        if with_eos.size:
            count = with_eos[0] // row.slot_size + 1
            chosen, kept = row.end(chosen, count), slice(count * row.slot_size)
            tokens, passed, doubted, origins = tokens[kept], passed[kept], doubted[kept], origins[kept]
            reading = dataclasses.replace(reading, own=reading.own[kept], probability=reading.probability[kept])
            passed[-row.slot_size :] = True
        outdated = repairs.checked and not repairs.recomputed and bool(doubted.any())
    end = row.through_eos(tokens) or len(tokens)
    if repairs.recomputed:
        reading = row.forward(tokens[:end], chosen)
    row.commit(reading, chosen, tokens[:end], origins)


def _propose(
    row: "_Row",
    chosen: list[int],
    tokens: np.ndarray,
    passed: np.ndarray,
    due: np.ndarray,
    reading: Reading,
    repairs: Repairs,
) -> np.ndarray:
    """Tokens with new ones where none has passed; those `due` pass next. `reading` is of the tokens as they are."""
    kept = passed | row.is_first(tokens)
    if passed.all() or (repairs.next_token and repairs.checked):
        return np.where(kept, tokens, reading.own)
    drafted = row.forward(np.where(kept, tokens, row.mask), chosen, repairs.in_view).choice
    return np.where(kept, tokens, np.where(due | (not repairs.next_token), drafted, reading.own))


class _Row:
    """One sequence: what is committed of it and which slots are open, with its forwards counted."""

    def __init__(self, network: Network, prompt: Sequence[int], config: rf.DecodeConfig):
        self._network, self._prompt_length, self.slot_size = network, len(prompt), config.slot_size
        self.mask = network.config.mask_token_id
        self._slots_per_block = config.block_length // config.slot_size
        self.open = list(range(config.rounded_length // config.slot_size))
        self.tokens, self.origins, self.order = np.full((3, config.rounded_length), -1)
        self.forwards = self.fused_forwards = 0
        # Slots whose masks may follow the last query: their draft, should all of the query be committed.
        self._riding: list[int] = []
        network.begin(prompt)

    def is_eos(self, tokens: np.ndarray) -> np.ndarray:
        return np.isin(tokens, self._network.config.eos_token_ids)

    def through_eos(self, tokens: np.ndarray) -> int:
        """How many tokens there are through the first EOS; 0 without one."""
        return int(self.is_eos(tokens).argmax()) + 1 if self.is_eos(tokens).any() else 0

    def is_first(self, tokens: np.ndarray) -> np.ndarray:
        """Which of the tokens of whole slots are the first of theirs."""
        return np.arange(len(tokens)) % self.slot_size == 0

    def slot_prefix(self, passed: np.ndarray) -> np.ndarray:
        """The passing tokens before which everything in their slot passed."""
        return np.logical_and.accumulate(passed.reshape(-1, self.slot_size), axis=1).ravel()

    def draft(self, slot_threshold: float) -> tuple[list[int], np.ndarray]:
        """Drafts the current block: the slots the model is sure of, and their tokens."""
        slots = self._first_block(self.open)
        self.fused_forwards -= self._riding[: len(slots)] == slots
        reading = self.forward(np.full(len(slots) * self.slot_size, self.mask), slots)
        confidence = reading.confidence[:: self.slot_size]
        sure = confidence > slot_threshold
        if not sure.any():
            sure[confidence.argmax()] = True
        return [slots[i] for i in np.flatnonzero(sure)], reading.choice[np.repeat(sure, self.slot_size)]

    def forward(self, tokens: np.ndarray, slots: list[int], in_view: bool = True) -> Reading:
        """A forward of the slots' tokens, in causal order or, not `in_view`, none seeing another."""
        self.forwards += 1
        self.fused_forwards += 1
        self._riding = self._first_block([slot for slot in self.open if slot not in slots])
        groups = 0 if in_view else np.repeat(np.array(slots) + 1, self.slot_size)
        return self._network.forward(tokens, self._prompt_length + self._offsets(slots)[: len(tokens)], groups)

    def commit(self, reading: Reading, slots: list[int], tokens: np.ndarray, origins: np.ndarray) -> None:
        """Commits tokens of `slots`, as many as there are; an EOS at their end closes what is behind."""
        count = len(tokens)
        self._network.commit(reading, count)
        offsets, last = self._offsets(slots)[:count], -(-count // self.slot_size) - 1
        self.tokens[offsets], self.origins[offsets], self.order[offsets] = tokens, origins[:count], self.forwards - 1
        if count < len(reading.own):
            self._riding = []
        if self.is_eos(tokens[-1:]).any():
            self.end(slots, last + 1)
        self.open = [slot for slot in self.open if slot not in slots[: last + 1]]

    def end(self, slots: list[int], count: int) -> list[int]:
        """Drops what is behind the last of the first `count` of `slots`, which has an EOS; returns these."""
        if count < len(slots):
            self._riding = []
        self.open = [slot for slot in self.open if slot <= slots[count - 1]]
        return slots[:count]

    def _offsets(self, slots: list[int]) -> np.ndarray:
        return (np.array(slots)[:, None] * self.slot_size + np.arange(self.slot_size)).ravel()

    def _first_block(self, slots: list[int]) -> list[int]:
        """Those of `slots` that are in the block of the first of them."""
        return [slot for slot in slots if slot // self._slots_per_block == slots[0] // self._slots_per_block]


def _previous(condition: np.ndarray) -> np.ndarray:
    """Whether `condition` holds one place before."""
    return np.append(False, condition[:-1])
