"""Proposals and probabilities read from one forward's logits."""

import flax
import jax
import jax.numpy as jnp


class Reading(flax.struct.PyTreeNode):
    """What one forward says about each token it predicts; all of one shape.

    choice: int32, the model's own choice. choice_probability: float32, its probability.
    token_probability: float32, the probability of the token that stands there now.
    """

    choice: jax.Array
    choice_probability: jax.Array
    token_probability: jax.Array


def gumbel_noise(keys: jax.Array, draws: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    """Gumbel noise (batch, width, vocab_size) float32, keyed by the row's key, the draw and the position predicted.

    Args:
      keys: (batch, 2) uint32, key data of every row.
      draws: (batch,) int32; 0 keeps a position's noise fixed over the whole decode.
      positions: (batch, width) int32 position IDs.
    """

    def noise(key: jax.Array, draw: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key), draw), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(jax.vmap(noise, in_axes=(None, None, 0)))(keys, draws, positions)


def read_logits(logits: jax.Array, tokens: jax.Array, noise: jax.Array | None, suppressed: jax.Array) -> Reading:
    """Reads proposals and probabilities (paper section 3.2; Gumbel-max in float32).

    Noise and suppression change proposals only: probabilities always come from the plain softmax.

    Args:
      logits: (batch, width, vocab) float32.
      tokens: (batch, width) int32, whose probability is wanted.
      noise: None, or (batch, width, vocab) float32 to add before the argmax, already scaled by the temperature.
      suppressed: (batch, count) int32 token IDs never proposed; an ID outside the vocabulary stands for none.
    """
    batch, _, vocab = logits.shape
    # Three-valued indexing with drop-out-of-range needs no dense (batch, vocab) input from the host.
    penalty = jnp.zeros((batch, vocab)).at[jnp.arange(batch)[:, None], suppressed].set(-jnp.inf, mode="drop")
    scores = logits + penalty[:, None]
    choice = jnp.argmax(scores if noise is None else scores + noise, axis=-1)
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)

    def probability(token: jax.Array) -> jax.Array:
        return jnp.exp(jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0] - log_normalizer)

    return Reading(choice.astype(jnp.int32), probability(choice), probability(tokens))
