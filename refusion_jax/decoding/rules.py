"""The three decisions of decoding that are meant to be changed: which slots, what stands, what replaces the rest.

A `Rules` object is a static argument of the compiled loop, so each function may be any traceable JAX code; pass
functions that live as long as the program, since every new one compiles anew. See docs/rules.md.
"""

import dataclasses
from collections.abc import Callable

import flax
import jax
import jax.numpy as jnp


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


DEFAULT_RULES = Rules()
