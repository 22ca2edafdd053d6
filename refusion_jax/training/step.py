"""One training step, compiled once: draw the view, forward, hybrid loss, backward, update."""

from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from refusion_jax.config import SlotsConfig
from refusion_jax.modeling import Transformer
from refusion_jax.objectives import HybridLoss, hybrid_loss
from refusion_jax.sharding import batch_sharding, replicated
from refusion_jax.slots import Batch, draw, training_view
from refusion_jax.training.state import TrainState


class Metrics(flax.struct.PyTreeNode):
    """What a step reports, () each.

    Attributes:
      loss: the loss and its parts, float32.
      grad_norm: global norm of the gradient before clipping, float32.
      num_tokens: tokens that were not padding, int32.
    """

    loss: HybridLoss
    grad_norm: jax.Array
    num_tokens: jax.Array


def batch_loss(module: Transformer, params: Any, batch: Batch, seed: jax.Array, config: SlotsConfig) -> HybridLoss:
    """The hybrid loss of one batch under the draws of `seed`."""
    view = training_view(batch, draw(seed, batch, config), module.config.mask_token_id)
    hidden, _ = module.apply({"params": params}, view.tokens, view.position_ids, view.visibility, method="encode")
    logits = module.apply({"params": params}, hidden, method="unembed")
    return hybrid_loss(logits, view, jnp.sum(batch.response_lengths > 0), config)


def make_train_step(
    module: Transformer,
    optimizer: optax.GradientTransformation,
    config: SlotsConfig,
    mesh: Mesh,
    shardings: Any,
) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, Metrics]]:
    """Compiles `(state, batch, seed) -> (state, metrics)`; the state is donated.

    Args:
      module, optimizer: the model and its update rule.
      config: how training views are drawn and loss terms weighted.
      mesh, shardings: as from `init_state`; batches are split along rows.
    """

    def step(state: TrainState, batch: Batch, seed: jax.Array) -> tuple[TrainState, Metrics]:
        def loss_fn(params: Any) -> tuple[jax.Array, HybridLoss]:
            loss = batch_loss(module, params, batch, seed, config)
            return loss.total, loss

        grads, loss = jax.grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        metrics = Metrics(loss, optax.tree.norm(grads), jnp.sum(batch.segment_ids > 0))
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state), metrics

    everywhere = replicated(mesh)
    return jax.jit(
        step,
        in_shardings=(shardings, batch_sharding(mesh), everywhere),
        out_shardings=(shardings, everywhere),
        donate_argnums=0,
    )


def make_eval_loss(
    module: Transformer, config: SlotsConfig, mesh: Mesh, shardings: Any
) -> Callable[[Any, Batch, jax.Array], HybridLoss]:
    """Compiles `(params, batch, seed) -> losses` without an update."""

    def evaluate(params: Any, batch: Batch, seed: jax.Array) -> HybridLoss:
        return batch_loss(module, params, batch, seed, config)

    everywhere = replicated(mesh)
    return jax.jit(
        evaluate, in_shardings=(shardings.params, batch_sharding(mesh), everywhere), out_shardings=everywhere
    )
