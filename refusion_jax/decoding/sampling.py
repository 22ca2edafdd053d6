"""Proposals and probabilities read from one forward's logits."""

from collections.abc import Callable

import flax
import jax
import jax.numpy as jnp

Confidence = Callable[[jax.Array, jax.Array], jax.Array]  # see `rules.SlotScore.token`


class Reading(flax.struct.PyTreeNode):
    """What one forward says about each token it predicts; all of one shape.

    choice: int32, the model's own choice. choice_probability: float32, its probability.
    token_probability: float32, the probability of the token that stands there now.
    confidence: float32, how sure the slot score's rule is of the choice.
    """

    choice: jax.Array
    choice_probability: jax.Array
    token_probability: jax.Array
    confidence: jax.Array


def gumbel_noise(keys: jax.Array, draws: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    """Gumbel noise (..., vocab_size) float32, keyed by the row's key, the draw and the position predicted.

    Args:
      keys: (..., 2) uint32, key data of the token's row.
      draws: (...) int32; 0 keeps a position's noise fixed over the whole decode.
      positions: (...) int32 position IDs.
    """

    def noise(key: jax.Array, draw: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key), draw), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    for _ in range(positions.ndim):
        noise = jax.vmap(noise)
    return noise(keys, draws, positions)


def filter_logits(logits: jax.Array, temperatures: jax.Array, top_ks: jax.Array, top_ps: jax.Array) -> jax.Array:
    """Takes out of `softmax(logits / temperature)` all but the `top_k` largest, of these all but the nucleus `top_p`.

    The nucleus is the smallest set of most probable tokens with at least `top_p` of the mass. Tokens as probable as the
    last one kept are kept too.

    Args:
      logits: (tokens, vocab) float32. temperatures, top_ks, top_ps: (tokens,); temperature 0 filters nothing.

    Returns:
      the logits, with -inf for what is taken out.
    """
    scaled = logits / jnp.where(temperatures > 0, temperatures, 1.0)[:, None]
    probabilities = jax.nn.softmax(scaled, axis=-1)
    # Floats in the order of integers, so that bisection finds the threshold exactly, without sorting the vocabulary.
    bits = jax.lax.bitcast_convert_type(probabilities, jnp.uint32)

    def largest_threshold(weights: jax.Array, targets: jax.Array) -> jax.Array:
        """(tokens, 1): the largest threshold that at least `targets` of the weight reaches."""

        def refine(i: jax.Array, threshold: jax.Array) -> jax.Array:
            candidate = threshold | (jnp.uint32(1 << 30) >> i.astype(jnp.uint32))
            reached = jnp.sum(jnp.where(bits >= candidate[:, None], weights, 0.0), axis=-1)
            return jnp.where(reached >= targets, candidate, threshold)

        return jax.lax.fori_loop(0, 31, refine, jnp.zeros(len(bits), jnp.uint32))[:, None]

    among = bits >= largest_threshold(jnp.ones_like(probabilities), top_ks.astype(jnp.float32))
    mass = jnp.where(among, probabilities, 0.0)
    nucleus = bits >= largest_threshold(mass, top_ps * jnp.sum(mass, axis=-1))
    kept = among & (nucleus | (top_ps >= 1)[:, None]) | (temperatures <= 0)[:, None]
    return jnp.where(kept, logits, -jnp.inf)


def suppress(logits: jax.Array, suppressed_ids: jax.Array) -> jax.Array:
    """Sets the logits of each token's suppressed IDs (tokens, count) to -inf; an ID outside the vocabulary is none."""
    return logits.at[jnp.arange(len(logits))[:, None], suppressed_ids].set(-jnp.inf, mode="drop")


def read_logits(logits: jax.Array, scores: jax.Array, tokens: jax.Array, confidence: Confidence) -> Reading:
    """Reads proposals and probabilities (paper section 3.2).

    Args:
      logits: (tokens, vocab) float32; probabilities come from their plain softmax.
      scores: (tokens, vocab) float32, what proposals are the argmax of: the logits, or these filtered, without the
        suppressed tokens, with scaled Gumbel noise.
      tokens: (tokens,) int32, whose probability is wanted.
      confidence: the token part of a slot score.
    """
    choice = jnp.argmax(scores, axis=-1)
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)

    def probability(token: jax.Array) -> jax.Array:
        return jnp.exp(jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0] - log_normalizer)

    sure = probability(choice)
    return Reading(choice.astype(jnp.int32), sure, probability(tokens), confidence(logits, sure))
