"""What a step of a diffusion decoder proposes for its masks, and which of the masks become what is proposed.

All arrays are (batch, width): a place per token that a forward predicts, in the order of their positions.
"""

import flax
import jax
import jax.numpy as jnp

from refusion_jax.decoding.rows import Rows
from refusion_jax.decoding.rules import margin_to_second, negative_entropy, probability
from refusion_jax.decoding.sampling import filter_logits, gumbel_noise, suppress

_SCORES = {"confidence": probability, "entropy": negative_entropy, "margin": margin_to_second}


class Proposal(flax.struct.PyTreeNode):
    """What one forward proposes, (batch, width) each.

    Attributes:
      choice: int32, the token.
      probability: float32, that of the choice; of the distribution with nothing filtered or suppressed.
      score: float32, how sure the model is, as the ordering says; of the same distribution.
    """

    choice: jax.Array
    probability: jax.Array
    score: jax.Array


def propose(
    logits: jax.Array, rows: Rows, positions: jax.Array, draws: jax.Array, ordering: str, sampling: bool
) -> Proposal:
    """Chooses a token for every place: the most probable one, or of rows with a temperature one that is drawn.

    Args:
      logits: (batch, width, vocab) float32.
      rows: whose temperatures, filters, suppressed tokens and keys are followed.
      positions: (batch, width) int32, the position IDs predicted; noise is keyed by them,
      draws: (batch,) int32, and by the number of the row's forward.
      ordering: one of `methods.ORDERINGS`.
      sampling: whether any row may have a temperature.
    """
    batch, width, vocab_size = logits.shape
    row = jnp.repeat(jnp.arange(batch), width)
    flat, keys, noise_draws, places = logits.reshape(-1, vocab_size), rows.keys[row], draws[row], positions.reshape(-1)
    allowed = suppress(flat, rows.suppressed_ids[row]) if rows.suppressed_ids.shape[1] else flat
    if sampling:
        temperatures, top_ks, top_ps = rows.temperatures[row], rows.top_ks[row], rows.top_ps[row]
        limited = (temperatures > 0) & ((top_ks < vocab_size) | (top_ps < 1))
        kept = jax.lax.cond(
            jnp.any(limited), lambda: filter_logits(allowed, temperatures, top_ks, top_ps), lambda: allowed
        )
        allowed = kept + temperatures[:, None] * gumbel_noise(keys, noise_draws, places, vocab_size)
    choice = jnp.argmax(allowed, axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(flat, choice[:, None], axis=-1)[:, 0]
    sure = jnp.exp(chosen - jax.nn.logsumexp(flat, axis=-1))
    score = random_scores(keys, noise_draws, places) if ordering == "random" else _SCORES[ordering](flat, sure)
    return jax.tree.map(lambda values: values.reshape(batch, width), Proposal(choice, sure, score))


def random_scores(keys: jax.Array, draws: jax.Array, positions: jax.Array) -> jax.Array:
    """Uniform numbers in [0, 1), (tokens,) float32, independent of the noise that tokens are drawn with.

    Args:
      keys: (tokens, 2) uint32, key data of the token's row. draws, positions: (tokens,) int32.
    """

    def score(key: jax.Array, draw: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key), draw), position)
        # `gumbel_noise` draws from this key; another is derived, since one key gives related numbers.
        return jax.random.uniform(jax.random.fold_in(key, 0), dtype=jnp.float32)

    return jax.vmap(score)(keys, draws, positions)


def reveal(
    scores: jax.Array, masked: jax.Array, quota: jax.Array, thresholds: jax.Array, factors: jax.Array
) -> jax.Array:
    """Which masks become what is proposed: the best, the earlier of equals first; at least one of a row that has any.

    How many is up to the row: with a threshold, all with a score of at least it; with a factor, the largest number `n`
    for which the `n`-th best score `c` has `(n + 1) * (1 - c) < factor`; else `quota`.

    Args:
      scores: (batch, width) float32. A mask whose score is not a number comes last.
      masked: (batch, width) bool, what can be revealed.
      quota: (batch,) int32. thresholds, factors: (batch,) float32, 0 for none.

    Returns:
      (batch, width) bool.
    """
    lowest = jnp.finfo(jnp.float32).min
    scores = jnp.where(masked, jnp.nan_to_num(scores, nan=lowest, neginf=lowest), -jnp.inf)
    best_first = jnp.argsort(scores, axis=1, descending=True, stable=True)
    rank = jnp.argsort(best_first, axis=1)
    number = jnp.arange(1, scores.shape[1] + 1)
    within = (number + 1) * (1 - jnp.take_along_axis(scores, best_first, axis=1)) < factors[:, None]
    by_factor = jnp.max(jnp.where(within, number, 0), axis=1)
    by_threshold = jnp.sum(scores >= thresholds[:, None], axis=1)
    count = jnp.where(thresholds > 0, by_threshold, jnp.where(factors > 0, by_factor, quota))
    return masked & (rank < jnp.maximum(count, 1)[:, None])


def quota_of_step(steps: jax.Array, block_lengths: jax.Array, block_steps: jax.Array) -> jax.Array:
    """How many of a block's tokens its step number `steps` (from 0) reveals, so that `block_steps` reveal all.

    As equal as possible, the earlier ones more. All are (batch,) int32; a row of no steps gets what does not matter.
    """
    block_steps = jnp.maximum(block_steps, 1)
    return block_lengths // block_steps + (steps < block_lengths % block_steps)
