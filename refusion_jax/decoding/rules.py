"""The three decisions of decoding that are meant to be changed: which slots, what stands, what replaces the rest.

A `Rules` object is a static argument of the compiled loop, so each function may be any traceable JAX code; pass
functions that live as long as the program, since every new one compiles anew. See docs/rules.md.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp

from refusion_jax.config import ConfigError


class Verification(flax.struct.PyTreeNode):
    """What a verifying forward says of the drafts. Arrays are (batch, capacity), over response offsets, or (batch, 1).

    Attributes:
      token: int32, the drafted token; probability: float32, its probability where the token before it was read.
      choice: int32, what the model itself would put there; choice_probability: float32.
      threshold: (batch, 1) float32, the row's `token_threshold`.
      self_correcting: (batch, 1) bool, the row's algorithm.
    """

    token: jax.Array
    probability: jax.Array
    choice: jax.Array
    choice_probability: jax.Array
    threshold: jax.Array
    self_correcting: jax.Array


def _require_functions(holder: Any, *names: str) -> None:
    for name in names:
        if not callable(getattr(holder, name)):
            raise ConfigError(f"{name} is {getattr(holder, name)!r}; give a function, see docs/rules.md.")


def _checked(value: Any, name: str, verification: Verification, dtype: Any) -> jax.Array:
    shape = verification.token.shape
    got = (getattr(value, "shape", None), getattr(value, "dtype", None))
    if got != (shape, jnp.dtype(dtype)):
        kind = jnp.dtype(dtype).name
        raise ConfigError(f"{name} returned {type(value).__name__} of shape {got[0]} and type {got[1]}; it must return "
                          f"{kind} of shape {shape}.")  # fmt: skip
    return value


# ---- slot scores ---------------------------------------------------------------------------------------------------


def probability(logits: jax.Array, choice_probability: jax.Array) -> jax.Array:
    """The proposal's own probability."""
    return choice_probability


def margin_to_second(logits: jax.Array, choice_probability: jax.Array) -> jax.Array:
    """The lead of the most probable token over the second, as a difference of probabilities."""
    best, second = jnp.moveaxis(jax.lax.top_k(logits, 2)[0], -1, 0)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    return jnp.exp(best - normalizer) - jnp.exp(second - normalizer)


def negative_entropy(logits: jax.Array, choice_probability: jax.Array) -> jax.Array:
    """1 - entropy / log(vocabulary): 1 for a certain token, 0 for the uniform distribution."""
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    entropy = -jnp.sum(jnp.exp(log_probabilities) * log_probabilities, axis=-1)
    return 1.0 - entropy / jnp.log(logits.shape[-1])


def of_first(confidence: jax.Array, slot_starts: jax.Array) -> jax.Array:
    """The confidence of a slot's first token."""
    return jnp.take_along_axis(confidence, slot_starts, axis=1)


def of_mean(confidence: jax.Array, slot_starts: jax.Array) -> jax.Array:
    """The mean confidence over a slot's tokens."""
    rows = jnp.arange(confidence.shape[0])[:, None]
    sums = jnp.zeros_like(confidence).at[rows, slot_starts].add(confidence)
    counts = jnp.zeros_like(confidence).at[rows, slot_starts].add(1.0)
    return jnp.take_along_axis(sums / jnp.maximum(counts, 1.0), slot_starts, axis=1)


@dataclasses.dataclass(frozen=True)
class SlotScore:
    """How sure the model is of a slot it drafted; compared with `slot_threshold`, the best slot is taken if none is.

    Attributes:
      token: `(logits (tokens, vocab) float32, choice_probability (tokens,)) -> (tokens,) float32` in [0, 1], the
        confidence in what is proposed at a mask.
      slot: `(confidence (batch, capacity), slot_starts (batch, capacity) int32) -> (batch, capacity) float32`, for
        every offset the score of its slot; only values at slot starts are read.
    """

    token: Callable[[jax.Array, jax.Array], jax.Array] = probability
    slot: Callable[[jax.Array, jax.Array], jax.Array] = of_first

    def __post_init__(self) -> None:
        _require_functions(self, "token", "slot")


SLOT_SCORES = {
    "first_token": SlotScore(probability, of_first),  # the paper's
    "mean": SlotScore(probability, of_mean),
    "margin": SlotScore(margin_to_second, of_first),
    "entropy": SlotScore(negative_entropy, of_first),
}


# ---- acceptance and repair -----------------------------------------------------------------------------------------


def above_threshold_or_own_choice(v: Verification) -> jax.Array:
    """Passes a token that is probable enough; under `self_correcting` also the model's own choice."""
    return (v.probability > v.threshold) | (v.self_correcting & (v.token == v.choice))


def own_choice(v: Verification) -> jax.Array:
    """Replaces a rejected token by the model's own choice."""
    return v.choice


@dataclasses.dataclass(frozen=True)
class Rules:
    """The functions a decode decides with; the defaults are the paper's and our self-correcting loop's.

    Attributes:
      slot_score: which slots to draft.
      accept: `Verification -> (batch, capacity) bool`, drafted tokens that stand. A slot's first token always stands,
        and so does the token right behind the settled ones in every later forward, so that decoding ends whatever
        this function says.
      repair: `Verification -> (batch, capacity) int32`, what rejected tokens are replaced by (`self_correcting`).
    """

    slot_score: SlotScore = SLOT_SCORES["first_token"]
    accept: Callable[[Verification], jax.Array] = above_threshold_or_own_choice
    repair: Callable[[Verification], jax.Array] = own_choice

    def __post_init__(self) -> None:
        score: Any = self.slot_score
        if not isinstance(score, SlotScore):
            raise ConfigError(f"slot_score is {score!r}; give a SlotScore, such as SLOT_SCORES['margin'].")
        _require_functions(self, "accept", "repair")

    def accepted(self, verification: Verification) -> jax.Array:
        """What `accept` says.

        Raises:
          ConfigError: when that is no array of truth values over all offsets.
        """
        return _checked(self.accept(verification), "accept", verification, jnp.bool_)

    def repaired(self, verification: Verification, vocab_size: int) -> jax.Array:
        """What `repair` says, within the vocabulary.

        Raises:
          ConfigError: when that is no array of int32 over all offsets.
        """
        tokens = _checked(self.repair(verification), "repair", verification, jnp.int32)
        return jnp.clip(tokens, 0, vocab_size - 1)


DEFAULT_RULES = Rules()
