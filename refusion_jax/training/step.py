"""One training step, compiled once: draw the view, forward, loss, backward, update."""

from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from refusion_jax.config import OBJECTIVES, Config, ConfigError, LoraConfig, SlotsConfig
from refusion_jax.modeling import Transformer
from refusion_jax.modeling.lora import variables
from refusion_jax.objectives import (
    HybridLoss,
    hybrid_loss_from_hidden,
    num_clean_targets,
    weighted_cross_entropy,
)
from refusion_jax.sharding import batch_sharding, constrain, replicated
from refusion_jax.slots import NO_TARGET, Batch, TrainingView, of_segment
from refusion_jax.training.state import NO_LORA, TrainState
from refusion_jax.views import fully_clean_view, make_view, num_response_tokens

HYBRID = OBJECTIVES[0]


class Metrics(flax.struct.PyTreeNode):
    """What a step reports, () each.

    Attributes:
      loss: the loss and its parts, float32.
      grad_norm: global norm of the gradient before clipping, float32.
      param_norm: global norm of the trained parameters the gradient was taken at, float32.
      num_tokens: tokens that were not padding, int32.
      finite: whether loss and gradient were finite, bool; the step changed no parameter otherwise.
      skipped, skipped_in_a_row: steps that changed none, int32: all so far, and those since the last that did.
    """

    loss: HybridLoss
    grad_norm: jax.Array
    param_norm: jax.Array
    num_tokens: jax.Array
    finite: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array


class _Counts(flax.struct.PyTreeNode):
    """What the loss terms of a whole batch are divided by: examples, and clean targets; () int32."""

    num_examples: jax.Array
    num_targets: jax.Array


def _view_and_counts(
    objective: str, batch: Batch, seed: jax.Array, config: SlotsConfig, mask_token_id: int
) -> tuple[TrainingView, _Counts]:
    view = make_view(objective, seed, batch, config, mask_token_id)
    return view, _Counts(jnp.sum(batch.response_lengths > 0), num_clean_targets(view))


def _unembedding(module: Transformer, params: Any) -> tuple[jax.Array, int]:
    """The output embedding, and which of its axes is the vocabulary."""
    if module.config.tie_word_embeddings:
        return params["embed_tokens"]["embedding"], 0
    return params["lm_head"]["kernel"], 1


def _view_loss(
    module: Transformer, variables: Any, view: TrainingView, counts: _Counts, config: SlotsConfig, chunk: int
) -> HybridLoss:
    hidden, _ = module.apply(variables, view.tokens, view.position_ids, view.visibility, method="encode")
    unembedding, vocab_axis = _unembedding(module, variables["params"])
    return hybrid_loss_from_hidden(
        hidden,
        unembedding,
        view,
        counts.num_examples,
        config,
        vocab_axis=vocab_axis,
        chunk=chunk,
        num_targets=counts.num_targets,
    )


def make_run_step(
    config: Config, module: Transformer, optimizer: optax.GradientTransformation, mesh: Mesh, shardings: Any
) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, Metrics]]:
    """`make_train_step` with what a run's configuration says."""
    return make_train_step(
        module,
        optimizer,
        config.slots,
        mesh,
        shardings,
        accumulate_steps=config.train.accumulate_steps,
        loss_chunk=config.train.loss_chunk,
        lora=config.lora,
        objective=config.train.objective,
    )


def make_train_step(
    module: Transformer,
    optimizer: optax.GradientTransformation,
    config: SlotsConfig,
    mesh: Mesh,
    shardings: Any,
    *,
    accumulate_steps: int = 1,
    loss_chunk: int = 0,
    lora: LoraConfig = NO_LORA,
    objective: str = HYBRID,
) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, Metrics]]:
    """Compiles `(state, batch, seed) -> (state, metrics)`; the state is donated.

    A loss or gradient that is not finite skips the update: parameters and optimizer stay as they are, with the step
    counted all the same, and as a skipped one. So does the learning rate, which follows the updates.

    Args:
      module, optimizer: the model and its update rule.
      config: how training views are drawn and loss terms weighted.
      mesh, shardings: as from `init_state`; batches are split along rows.
      accumulate_steps: parts of the batch whose gradients are computed one after another and added up.
      loss_chunk: positions that are unembedded at a time on each device; 0 for all.
      lora: the adapters' settings, where the state has a base.
      objective: one of `config.OBJECTIVES`.

    Raises:
      ConfigError: when first called, for a batch that does not split into the parts evenly on every device.
    """

    def gradient(state: TrainState, view: TrainingView, counts: _Counts) -> tuple[Any, HybridLoss]:
        def loss_of(params: Any) -> tuple[jax.Array, HybridLoss]:
            inputs = {"params": params} if state.base is None else variables(state.base, params, lora)
            loss = _view_loss(module, inputs, view, counts, config, loss_chunk)
            return loss.total, loss

        return jax.grad(loss_of, has_aux=True)(state.params)

    def step(state: TrainState, batch: Batch, seed: jax.Array) -> tuple[TrainState, Metrics]:
        view, counts = _view_and_counts(objective, batch, seed, config, module.config.mask_token_id)
        if accumulate_steps == 1:
            grads, loss = gradient(state, view, counts)
        else:
            parts = _split_rows(view, accumulate_steps, mesh)
            grads, loss = _sum_over(lambda part: gradient(state, part, counts), parts)
        grad_norm = optax.tree.norm(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), grads))
        finite = jnp.isfinite(loss.total) & jnp.isfinite(grad_norm)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (params, opt_state), (state.params, state.opt_state)
        )
        skipped = state.skipped + ~finite
        skipped_in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1)
        num_tokens = jnp.sum(batch.segment_ids > 0)
        param_norm = optax.tree.norm(state.params)
        metrics = Metrics(loss, grad_norm, param_norm, num_tokens, finite, skipped, skipped_in_a_row)
        return TrainState(state.step + 1, params, opt_state, state.base, skipped, skipped_in_a_row), metrics

    everywhere = replicated(mesh)
    return jax.jit(
        step,
        in_shardings=(shardings, batch_sharding(mesh), everywhere),
        out_shardings=(shardings, everywhere),
        donate_argnums=0,
    )


def _split_rows(view: TrainingView, count: int, mesh: Mesh) -> TrainingView:
    """(count, rows / count, length) from (rows, length): every device keeps its own rows, a share in each part."""
    rows = view.tokens.shape[0]
    on_device = batch_sharding(mesh).shard_shape(view.tokens.shape)[0]
    if on_device % count:
        raise ConfigError(
            f"train.accumulate_steps is {count}, which does not divide the {on_device} of {rows} rows that each device "
            "has; lower it or use larger batches."
        )

    def split(leaf: jax.Array) -> jax.Array:
        parts = leaf.reshape(rows // count, count, *leaf.shape[1:]).swapaxes(0, 1)
        return constrain(parts, None, "batch", *([None] * (leaf.ndim - 1)))

    return jax.tree.map(split, view)


def _sum_over(function: Callable[[Any], Any], parts: Any) -> Any:
    """The sum of `function` over the leading axis of `parts`, one after another, in float32."""

    def add(sums: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(lambda total, new: total + new.astype(jnp.float32), sums, function(part)), None

    shapes = jax.eval_shape(function, jax.tree.map(lambda leaf: leaf[0], parts))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), shapes)
    return jax.lax.scan(add, zeros, parts)[0]


class HeldOutSums(flax.struct.PyTreeNode):
    """Sums over the examples of a batch, () float32, that means over several batches can be made of.

    Attributes:
      ar, ar_targets: cross-entropy of clean targets, and their number.
      mdm, examples: the MDM terms of the examples, and their number.
      bound: sum over masked positions of cross-entropy / p: with all tokens masked one by one in random order, a bound
        on the negative log-likelihood of the responses, in nats.
      nats: their negative log-likelihood as the objective's own decoding composes them, or a bound on it, see
        `make_eval_loss`.
      tokens: response tokens up to the first EOS each.
    """

    ar: jax.Array
    ar_targets: jax.Array
    mdm: jax.Array
    examples: jax.Array
    bound: jax.Array
    nats: jax.Array
    tokens: jax.Array


def make_eval_loss(
    module: Transformer,
    config: SlotsConfig,
    mesh: Mesh,
    shardings: Any,
    *,
    loss_chunk: int = 0,
    objective: str = HYBRID,
) -> Callable[[Any, Batch, jax.Array], HeldOutSums]:
    """Compiles `(params, batch, seed) -> sums` without an update; `params` as from `TrainState.model_params`.

    `nats` is what the responses cost: the next tokens' cross-entropy ("autoregressive", exact); `bound` ("llada",
    "dream", "block_diffusion"); of "hybrid" slots in random order, the first token of each from a mask (cross-entropy
    / p over masked slots) and the others as next tokens, with all slots clean: a bound, as it is a mean over orders.
    """

    def evaluate(params: Any, batch: Batch, seed: jax.Array) -> HeldOutSums:
        view, counts = _view_and_counts(objective, batch, seed, config, module.config.mask_token_id)
        losses = _position_losses(module, params, view, loss_chunk)
        is_clean_target = (view.targets != NO_TARGET) & ~view.is_masked
        ar = jnp.sum(jnp.where(is_clean_target, losses, 0.0))
        of_masked = view.mdm_weights * of_segment(batch.response_lengths, view.visibility.segment) * losses
        bound = jnp.sum(of_masked)
        if objective == HYBRID:
            clean = fully_clean_view(seed, batch, config)
            inside = jnp.sum(_position_losses(module, params, clean, loss_chunk))
            nats = inside + jnp.sum(jnp.where(view.is_slot_start, of_masked, 0.0))
        else:
            nats = ar + bound
        return HeldOutSums(
            ar=ar,
            ar_targets=counts.num_targets.astype(jnp.float32),
            mdm=jnp.sum(view.mdm_weights * losses),
            examples=counts.num_examples.astype(jnp.float32),
            bound=bound,
            nats=nats,
            tokens=num_response_tokens(batch, module.config.eos_token_ids).astype(jnp.float32),
        )

    params = shardings.params if shardings.base is None else shardings.base
    everywhere = replicated(mesh)
    return jax.jit(evaluate, in_shardings=(params, batch_sharding(mesh), everywhere), out_shardings=everywhere)


def _position_losses(module: Transformer, params: Any, view: TrainingView, chunk: int) -> jax.Array:
    """Cross-entropy of every position that has a target, (rows, length) float32, else 0."""
    hidden, _ = module.apply({"params": params}, view.tokens, view.position_ids, view.visibility, method="encode")
    unembedding, vocab_axis = _unembedding(module, params)
    targets = view.targets.reshape(-1)
    weights = jnp.zeros(targets.shape, jnp.float32)
    _, losses = weighted_cross_entropy(hidden, unembedding, targets, weights, vocab_axis=vocab_axis, chunk=chunk)
    return losses.reshape(view.targets.shape)
