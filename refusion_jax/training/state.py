"""The training state and how it comes into being, already sharded."""

from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from refusion_jax.config import OptimizerConfig
from refusion_jax.modeling import Transformer
from refusion_jax.sharding import tree_shardings


class TrainState(flax.struct.PyTreeNode):
    """step: () int32, updates done so far. params, opt_state: pytrees."""

    step: jax.Array
    params: Any
    opt_state: Any


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up from 0, then cosine decay to `learning_rate * final_ratio` at `steps`."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup_steps else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        # optax wants room for a decay even where a run is all warm-up.
        decay_steps=max(steps, config.warmup_steps + 1),
        end_value=config.learning_rate * config.final_ratio,
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """AdamW after clipping by global norm; weight decay leaves norm scales alone."""

    def decayed(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "scale" not in jax.tree_util.keystr(path), params)

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )


def init_state(
    module: Transformer, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh
) -> tuple[TrainState, Any]:
    """Initialises parameters and optimizer on the mesh; no device ever holds more than its share.

    Returns:
      the state, and its shardings as a pytree of the same structure.
    """

    def init(key: jax.Array) -> TrainState:
        tokens = jnp.zeros((1, 1), jnp.int32)
        params = module.init(key, tokens, tokens)["params"]
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    key = jax.random.key(seed)
    shardings = tree_shardings(jax.eval_shape(init, key), mesh)
    with jax.set_mesh(mesh):
        state = jax.jit(lambda key: nn.unbox(init(key)), out_shardings=shardings)(key)
    return state, shardings
