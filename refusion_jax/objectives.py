"""Training objectives: the hybrid loss of ReFusion, autoregressive plus masked diffusion (paper section 3)."""

import flax
import jax
import jax.numpy as jnp
import optax

from refusion_jax.config import SlotsConfig
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
    is_clean_target = (targets != NO_TARGET) & ~view.is_masked.reshape(-1)
    num_targets = jnp.maximum(jnp.sum(is_clean_target), 1)
    ar = jnp.sum(jnp.where(is_clean_target, losses, 0.0)) / num_targets
    mdm = jnp.sum(view.mdm_weights.reshape(-1) * losses) / jnp.maximum(num_examples, 1)
    return HybridLoss(total=config.ar_weight * ar + config.mdm_weight * mdm, ar=ar, mdm=mdm)
