"""Training objectives: the hybrid loss of ReFusion, autoregressive plus masked diffusion (paper section 3).

Logits of a whole batch in float32 are the largest array of a training step: 2.5 GB for 4,096 positions and Qwen3's
vocabulary. `hybrid_loss_from_hidden` computes them a chunk of positions at a time and, where a gradient is wanted,
turns each chunk into its gradient at once; `hybrid_loss` is the same from given logits.
"""

import functools
from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from refusion_jax.config import SlotsConfig
from refusion_jax.sharding import batch_shards, constrain, sum_over_batch
from refusion_jax.slots import NO_TARGET, TrainingView


class HybridLoss(flax.struct.PyTreeNode):
    """The two terms and their weighted sum, () float32 each."""

    total: jax.Array
    ar: jax.Array
    mdm: jax.Array


def hybrid_loss(logits: jax.Array, view: TrainingView, num_examples: jax.Array, config: SlotsConfig) -> HybridLoss:
    """Next-token loss on clean slots plus denoising loss on masked slots.

    AR is the mean of the cross-entropy over all clean positions that have a target, over the whole batch. MDM is the
    sum over masked positions of cross-entropy / p / response_length, divided by the number of examples. A batch
    without a clean target (or without a masked slot) has 0 for that term.

    Args:
      logits: (rows, length, vocab) or (rows * length, vocab); used in float32.
      view: the training view the logits were computed on.
      num_examples: () int, the examples in the batch over all devices.
      config: weights of the two terms.
    """
    targets = view.targets.reshape(-1)
    logits = logits.reshape(targets.shape[0], -1).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    ar, mdm = _term_weights(view, num_clean_targets(view), num_examples)
    ar, mdm = jnp.sum(ar * losses), jnp.sum(mdm * losses)
    return HybridLoss(total=config.ar_weight * ar + config.mdm_weight * mdm, ar=ar, mdm=mdm)


def hybrid_loss_from_hidden(
    hidden: jax.Array,
    unembedding: jax.Array,
    view: TrainingView,
    num_examples: jax.Array,
    config: SlotsConfig,
    *,
    vocab_axis: int,
    chunk: int = 0,
    num_targets: jax.Array | None = None,
) -> HybridLoss:
    """`hybrid_loss` of the logits of `hidden`, which never exist all at once; only `total` has a gradient.

    Args:
      hidden: (rows * length, width) final hidden states; matrix products are in their type, sums in float32.
      unembedding: (width, vocab), or (vocab, width) with `vocab_axis` 0, the tied embedding.
      view, num_examples, config: as in `hybrid_loss`.
      vocab_axis: which axis of `unembedding` the vocabulary is.
      chunk: positions per chunk and device; 0 takes all at once.
      num_targets: () int, the clean targets the AR term is a mean over; default: those of `view`. A part of a batch
        takes the whole batch's, and its examples, so that the losses of the parts add up to the batch's.
    """
    num_targets = num_clean_targets(view) if num_targets is None else num_targets
    ar, mdm = _term_weights(view, num_targets, num_examples)
    weights = config.ar_weight * ar + config.mdm_weight * mdm
    total, losses = weighted_cross_entropy(
        hidden, unembedding, view.targets.reshape(-1), weights, vocab_axis=vocab_axis, chunk=chunk
    )
    return HybridLoss(total=total, ar=jnp.sum(ar * losses), mdm=jnp.sum(mdm * losses))


def num_clean_targets(view: TrainingView) -> jax.Array:
    """() int32, the clean positions of a view that have a target: what the AR term is a mean over."""
    return jnp.sum((view.targets != NO_TARGET) & ~view.is_masked)


def _term_weights(view: TrainingView, num_targets: jax.Array, num_examples: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each position's weight in the AR and in the MDM term, (rows * length,) float32."""
    is_clean_target = (view.targets != NO_TARGET) & ~view.is_masked
    ar = jnp.where(is_clean_target, 1 / jnp.maximum(num_targets, 1), 0.0)
    mdm = view.mdm_weights / jnp.maximum(num_examples, 1)
    return ar.reshape(-1), mdm.reshape(-1)


def weighted_cross_entropy(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    vocab_axis: int,
    chunk: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """`sum_i weights_i * cross_entropy_i`, its gradient computed in the forward pass, chunk by chunk.

    With logits `z = hidden @ unembedding`, the gradient with respect to `z_i` is
    `weights_i * (softmax(z_i) - onehot(target_i))`. All of it is known once a chunk's logits are, so each chunk is
    pulled back to `hidden` and `unembedding` on the spot, and no logits are kept or computed a second time. Positions
    with a target come first, and chunks without any are not computed. On a mesh every device works on its own
    positions; gradients of `unembedding` are added up over devices once, after the last chunk.

    Args:
      hidden: (positions, width); matrix products are in its type, everything else in float32.
      unembedding: (width, vocab), or (vocab, width) with `vocab_axis` 0.
      targets: (positions,) int, `NO_TARGET` where there is none.
      weights: (positions,) float32; those without a target do not count. They have no gradient.
      vocab_axis: which axis of `unembedding` the vocabulary is.
      chunk: positions per chunk and device; 0 takes all at once.

    Returns:
      the weighted sum, () float32, differentiable in `hidden` and `unembedding`, and the cross-entropy of every
      position, (positions,) float32, 0 where there is no target, without gradient.
    """
    shards = batch_shards(hidden.shape[0])
    split = hidden.shape[0] // shards
    total, losses = _cross_entropy(
        vocab_axis,
        chunk if chunk < split else 0,
        hidden.reshape(shards, split, -1),
        unembedding,
        targets.reshape(shards, split),
        jax.lax.stop_gradient(weights).astype(jnp.float32).reshape(shards, split),
    )
    return total, jax.lax.stop_gradient(losses).reshape(-1)


class _Sums(flax.struct.PyTreeNode):
    """What the chunks add to; gradients are None where none is wanted.

    Attributes:
      losses: (shards, positions) float32.
      hidden: (shards, positions, width), in the type of the hidden states.
      unembedding: (shards, ...) float32.
    """

    losses: jax.Array
    hidden: Any
    unembedding: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(
    vocab_axis: int, chunk: int, hidden: jax.Array, unembedding: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    sums = _over_chunks(vocab_axis, chunk, hidden, unembedding, targets, weights, wanted=(False, False))
    return jnp.sum(weights * sums.losses), sums.losses


def _forward(
    vocab_axis: int, chunk: int, hidden: CustomVJPPrimal, unembedding: CustomVJPPrimal, *rest: CustomVJPPrimal
) -> tuple[Any, Any]:
    targets, weights = (primal.value for primal in rest)
    wanted = hidden.perturbed, unembedding.perturbed  # a frozen output embedding needs no gradient
    sums = _over_chunks(vocab_axis, chunk, hidden.value, unembedding.value, targets, weights, wanted)
    d_unembedding = None
    if sums.unembedding is not None:
        # Over devices in the type of activations, as all gradients are.
        parts = sums.unembedding.astype(hidden.value.dtype)
        axes = ("vocab", "embed") if vocab_axis == 0 else ("embed", "vocab")
        d_unembedding = sum_over_batch(parts, *axes).astype(unembedding.value.dtype)
    return (jnp.sum(weights * sums.losses), sums.losses), (sums.hidden, d_unembedding)


def _backward(vocab_axis: int, chunk: int, gradients: tuple[Any, Any], cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    of_total = cotangents[0]
    if isinstance(of_total, SymbolicZero):
        return None, None, None, None
    scaled = (None if each is None else (each * of_total).astype(each.dtype) for each in gradients)
    return *scaled, None, None


_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


def _over_chunks(
    vocab_axis: int,
    chunk: int,
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    wanted: tuple[bool, bool],
) -> _Sums:
    """Losses and gradients of all positions; `wanted`: the gradient of the hidden states, that of `unembedding`."""
    axes = ("vocab", "activation_embed") if vocab_axis == 0 else ("activation_embed", "vocab")
    unembedding = constrain(unembedding.astype(hidden.dtype), *axes)
    of_chunk = functools.partial(_chunk_sums, vocab_axis, unembedding, wanted)
    if not chunk:
        return of_chunk(hidden, targets, weights)

    shards, positions, _ = hidden.shape
    has_target = targets != NO_TARGET
    order = jnp.argsort(~has_target, axis=1, stable=True)
    whole = -(-positions // chunk) * chunk
    # Beyond the last position stands one that does not exist: no target, nothing read back.
    padded = jnp.pad(order, ((0, 0), (0, whole - positions)), constant_values=positions)

    def take(values: jax.Array, at: jax.Array, fill: int = 0) -> jax.Array:
        return jax.vmap(lambda row, i: row.at[i].get(mode="fill", fill_value=fill))(values, at)

    def add_chunk(number: jax.Array, sums: _Sums) -> _Sums:
        start = number * chunk
        at = jax.lax.dynamic_slice_in_dim(padded, start, chunk, axis=1)
        new = of_chunk(take(hidden, at), take(targets, at, NO_TARGET), take(weights, at))
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=1)
        return _Sums(
            losses=put(sums.losses, new.losses),
            hidden=None if new.hidden is None else put(sums.hidden, new.hidden),
            unembedding=None if new.unembedding is None else sums.unembedding + new.unembedding,
        )

    start = _Sums(
        losses=jnp.zeros((shards, whole), jnp.float32),
        hidden=jnp.zeros((shards, whole, hidden.shape[2]), hidden.dtype) if wanted[0] else None,
        unembedding=constrain(jnp.zeros((shards, *unembedding.shape), jnp.float32), "batch", *axes)
        if wanted[1]
        else None,
    )
    needed = jnp.max(jnp.sum(has_target, axis=1))
    sums = jax.lax.fori_loop(0, (needed + chunk - 1) // chunk, add_chunk, start)
    place = jnp.argsort(order, axis=1)
    return sums.replace(
        losses=take(sums.losses, place), hidden=None if sums.hidden is None else take(sums.hidden, place)
    )


def _chunk_sums(
    vocab_axis: int,
    unembedding: jax.Array,
    wanted: tuple[bool, bool],
    hidden: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
) -> _Sums:
    """Losses and gradients of one chunk, hidden states (shards, positions, width)."""
    matrix = "vw" if vocab_axis == 0 else "wv"
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    logits = einsum(f"spw,{matrix}->spv", hidden, unembedding)
    is_target = targets[..., None] == jnp.arange(logits.shape[-1])
    # The target's own logit by a masked sum: the vocabulary may be split over devices.
    of_target = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - peak)
    norm = jnp.sum(exponentials, axis=-1)
    has_target = targets != NO_TARGET
    losses = jnp.where(has_target, jnp.log(norm) + peak[..., 0] - of_target, 0.0)
    if not any(wanted):
        return _Sums(losses, None, None)
    weights = jnp.where(has_target, weights, 0.0)
    d_logits = exponentials * (weights / norm)[..., None] - jnp.where(is_target, weights[..., None], 0.0)
    d_logits = d_logits.astype(hidden.dtype)
    return _Sums(
        losses=losses,
        hidden=einsum(f"spv,{matrix}->spw", d_logits, unembedding).astype(hidden.dtype) if wanted[0] else None,
        unembedding=einsum(f"spw,spv->s{matrix}", hidden, d_logits) if wanted[1] else None,
    )
