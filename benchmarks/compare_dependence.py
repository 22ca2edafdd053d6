"""How much one masked token tells about another, by their distance: the observation that slots are made from.

On a model of masked diffusion with attention in both directions, whose masks predict themselves (`llada`).
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from refusion_jax.config import ConfigError
from refusion_jax.modeling import Transformer
from refusion_jax.modeling.attention import Visibility


def dependence_by_distance(
    module: Transformer,
    params: Mapping[str, Any],
    tokens: np.ndarray,
    prompt_lengths: np.ndarray,
    lengths: np.ndarray,
    *,
    draws: int = 8,
    seed: int = 0,
    batch_size: int = 64,
) -> dict[int, tuple[float, float, int]]:
    """The dependence of two masked response tokens by their distance, in nats.

    A random share of a response is masked, and one masked token `i` is revealed to what it is in the example. For every
    other masked token `j` that changes the prediction from `p` to `q`, by KL(q || p). Over examples whose tokens are as
    probable as the model says, its mean is the mutual information of the two tokens given those in view.

    Args:
      module, params: the model.
      tokens: (examples, length) int, prompt and response from index 0, then anything.
      prompt_lengths: (examples,) int.
      lengths: (examples,) int, tokens of prompt and response together. They should end with the first EOS: those that
        follow it tell nothing but one another.
      draws: how often each example is masked.
      seed: of all draws.
      batch_size: rows computed at once.

    Returns:
      for each distance `|i - j|` that at least two examples have, the mean over examples (of each the mean over its
      pairs), the standard error of that mean, and the number of examples.

    Raises:
      ConfigError: when no distance has two examples.
    """
    tokens, prompt_lengths, lengths = (np.asarray(a, np.int32) for a in (tokens, prompt_lengths, lengths))
    usable = np.flatnonzero(lengths - prompt_lengths >= 2)
    examples = np.repeat(usable, draws)
    masked, revealed = draw_masks(seed, prompt_lengths[examples], lengths[examples], tokens.shape[1])
    divergences = np.zeros(masked.shape, np.float32)
    for start in range(0, len(examples), batch_size):
        # The last batch is filled up with its last row, so that one program serves all.
        rows = np.minimum(np.arange(start, start + batch_size), len(examples) - 1)
        found = _divergences(
            module, params, tokens[examples[rows]], lengths[examples[rows]], masked[rows], revealed[rows]
        )
        divergences[rows] = found
    other = masked & (np.arange(tokens.shape[1]) != revealed[:, None])
    row, position = np.nonzero(other)
    means = _means(examples[row], np.abs(position - revealed[row]), divergences[row, position])
    if not means:
        raise ConfigError(
            f"Of {len(tokens)} examples no two have a pair of masked tokens at one distance; give more of them, with "
            "responses of at least two tokens."
        )
    return means


def draw_masks(
    seed: int, prompt_lengths: np.ndarray, lengths: np.ndarray, row_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Masks each response token with a probability drawn for its row, again until there are two, and picks one of them.

    Args:
      seed: of the draws.
      prompt_lengths, lengths: (rows,) int, with at least two response tokens between them.
      row_length: positions of a row.

    Returns:
      masked: (rows, row_length) bool. revealed: (rows,) int, a masked position.
    """
    rng = np.random.default_rng(seed)
    index = np.arange(row_length)
    in_response = (index >= prompt_lengths[:, None]) & (index < lengths[:, None])
    masked = np.zeros_like(in_response)
    while len(rows := np.flatnonzero(masked.sum(axis=1) < 2)):
        share = rng.random((len(rows), 1))
        masked[rows] = in_response[rows] & (rng.random((len(rows), row_length)) < share)
    revealed = np.argmax(np.where(masked, rng.random(masked.shape), -1.0), axis=1)
    return masked, revealed


@functools.partial(jax.jit, static_argnums=0)
def _divergences(
    module: Transformer,
    params: Mapping[str, Any],
    tokens: jax.Array,
    lengths: jax.Array,
    masked: jax.Array,
    revealed: jax.Array,
) -> jax.Array:
    """KL(with the token revealed || with it masked) of the predictions at every position, (rows, length) float32."""
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    zeros = jnp.zeros_like(index)
    visibility = Visibility(segment=(index < lengths[:, None]).astype(jnp.int32), order=zeros, group=zeros)

    def log_probabilities(masked: jax.Array) -> jax.Array:
        shown = jnp.where(masked, module.config.mask_token_id, tokens)
        return jax.nn.log_softmax(module.apply({"params": params}, shown, index, visibility))

    before = log_probabilities(masked)
    after = log_probabilities(masked & (index != revealed[:, None]))
    return jnp.sum(jnp.exp(after) * (after - before), axis=-1)


def _means(examples: np.ndarray, distances: np.ndarray, values: np.ndarray) -> dict[int, tuple[float, float, int]]:
    """Mean, standard error and number of examples by distance. Pairs of an example are not independent: it counts once.

    Args:
      examples, distances: (pairs,) int. values: (pairs,) float.
    """
    found = {}
    for distance in np.unique(distances):
        at = distances == distance
        _, places, counts = np.unique(examples[at], return_inverse=True, return_counts=True)
        means = np.bincount(places, values[at]) / counts
        if len(means) > 1:
            error = np.std(means, ddof=1) / np.sqrt(len(means))
            found[int(distance)] = (float(means.mean()), float(error), len(means))
    return found
