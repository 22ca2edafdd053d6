"""Update rules and learning rates, put together from optax.

Every rule is: clip the gradient by its global norm, give it a direction and size of the order of 1, add weight decay
where the mask allows, multiply by the learning rate.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from refusion_jax.config import OptimizerConfig

# Where optax's states hold moments, shaped like the parameters or (Adafactor) factored.
_MOMENTS = {"mu", "nu", "v", "v_row", "v_col"}
_EMBEDDINGS = {"embed_tokens", "lm_head"}
# Muon's updates have singular values of 1; scaled to this root mean square they are as large as Adam's, so that one
# learning rate serves both ("Muon is Scalable for LLM Training", arXiv 2502.16982).
_MUON_RMS = 0.2


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate of each update: linear warm-up from 0, then what `config.schedule` names, ending at `steps`."""
    peak, final = config.learning_rate, config.learning_rate * config.final_ratio
    # optax wants room for a decay even where a run is all warm-up.
    rest = max(steps - config.warmup_steps, 1)
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, config.final_ratio if peak else 0.0)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, final, rest)
    elif config.schedule == "wsd":
        after = optax.linear_schedule(peak, final, config.decay_steps, rest - config.decay_steps)
    else:
        after = optax.constant_schedule(peak)
    if not config.warmup_steps:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, config.warmup_steps), after], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The configured update rule for a run of so many steps; its moments are stored in `config.moments_dtype`."""
    schedule = learning_rate_schedule(config, steps)
    decay = {"weight_decay": config.weight_decay, "mask": lambda params: decay_mask(params, config)}
    if config.name == "adamw":
        rule = optax.adamw(schedule, b1=config.beta1, b2=config.beta2, eps=config.epsilon, **decay)
    elif config.name == "lion":
        rule = optax.lion(schedule, b1=config.beta1, b2=config.beta2, **decay)
    else:
        rule = optax.chain(
            _adafactor() if config.name == "adafactor" else _muon(config),
            optax.scale(-1.0),  # both are made for descent: back to the gradient's sign, which decay is added to
            optax.add_decayed_weights(**decay),
            optax.scale_by_learning_rate(schedule),
        )
    return _stored_in(jnp.dtype(config.moments_dtype), optax.chain(optax.clip_by_global_norm(config.clip_norm), rule))


def decay_mask(params: Any, config: OptimizerConfig) -> Any:
    """Which leaves weight decay applies to: no norm scale, no bias, and embeddings only where wanted."""

    def decayed(path: Any, _: Any) -> bool:
        names = _names(path)
        return not {"scale", "bias"} & set(names) and (config.decay_embeddings or not _EMBEDDINGS & set(names))

    return jax.tree_util.tree_map_with_path(decayed, params)


def muon_dimensions(params: Any) -> Any:
    """Which axes of a leaf are a matrix for Muon: the last two of the layers' kernels, each layer by itself.

    Everything else, None here, is left to Adam: embeddings, whose rows are updated a few at a time, and norm scales and
    biases, which stacked over the layers only look like matrices.
    """

    def dimensions(path: Any, leaf: Any) -> MuonDimensionNumbers | None:
        names = _names(path)
        is_matrix = "layers" in names and leaf.ndim == 3
        return MuonDimensionNumbers(reduction_axis=1, output_axis=2) if is_matrix else None

    return jax.tree_util.tree_map_with_path(dimensions, params)


def _names(path: Any) -> list[str]:
    return jax.tree_util.keystr(path, simple=True, separator="/").split("/")


def _adafactor() -> optax.GradientTransformation:
    # Not scaled by the parameters' size: the learning rate then means the same as for the other rules.
    return optax.adafactor(learning_rate=None, multiply_by_parameter_scale=False)


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    return muon(
        1.0,
        beta=config.beta1,
        eps=config.epsilon,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        consistent_rms=_MUON_RMS,
        muon_weight_dimension_numbers=muon_dimensions,
    )


def _stored_in(dtype: jnp.dtype, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner`, computing in float32 whatever the gradients' type, with its moments stored in `dtype`."""

    def convert(state: Any, to: jnp.dtype) -> Any:
        def leaf(path: Any, value: jax.Array) -> jax.Array:
            is_moment = any(getattr(key, "name", None) in _MOMENTS for key in path)
            return value.astype(to) if is_moment else value

        return jax.tree_util.tree_map_with_path(leaf, state)

    def init(params: Any) -> Any:
        return convert(inner.init(params), dtype)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        grads = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), grads)
        updates, state = inner.update(grads, convert(state, jnp.dtype(jnp.float32)), params)
        return updates, convert(state, dtype)

    return optax.GradientTransformation(init, update)
