"""The training state and how it comes into being, already sharded."""

from collections.abc import Callable
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from refusion_jax.config import LoraConfig
from refusion_jax.modeling import Transformer
from refusion_jax.modeling.lora import init_lora, merge
from refusion_jax.sharding import replicated, tree_shardings

NO_LORA = LoraConfig()


class TrainState(flax.struct.PyTreeNode):
    """What a training step turns into the next.

    Attributes:
      step: () int32, steps done so far, skipped ones among them.
      params: the pytree that is trained: the model's parameters, or adapters (LoRA).
      opt_state: the optimizer's pytree for `params`.
      base: None, or the frozen parameters that `params` adapts.
      skipped, skipped_in_a_row: () int32, steps without an update because loss or gradient was not finite: all, and
        those since the last update.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    base: Any = None
    skipped: jax.Array | int = 0
    skipped_in_a_row: jax.Array | int = 0

    def model_params(self, lora: LoraConfig = NO_LORA) -> Any:
        """Parameters of the plain model this state stands for: `params`, or the base with the adapters merged in."""
        return self.params if self.base is None else merge(self.base, self.params, lora)


def init_state(
    module: Transformer, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh, lora: LoraConfig = NO_LORA
) -> tuple[TrainState, Any]:
    """Initialises parameters and optimizer on the mesh; no device ever holds more than its share.

    With a `lora.rank` the model's parameters are the frozen `base`, random like any first ones: replace them by those
    to be adapted.

    Returns:
      the state, and its shardings as a pytree of the same structure.
    """
    _, shardings = abstract_state(module, optimizer, mesh, lora)
    _, init = _initialisers(module, optimizer, lora)
    with jax.set_mesh(mesh):
        state = jax.jit(init, out_shardings=shardings)(jax.random.key(seed))
    return state, shardings


def abstract_state(
    module: Transformer, optimizer: optax.GradientTransformation, mesh: Mesh, lora: LoraConfig = NO_LORA
) -> tuple[TrainState, Any]:
    """What `init_state` returns, with a `jax.ShapeDtypeStruct` that knows its sharding for each array of the state."""
    init_params, init = _initialisers(module, optimizer, lora)
    key = jax.eval_shape(lambda: jax.random.key(0))
    params, base = tree_shardings(jax.eval_shape(init_params, key), mesh)
    shapes = jax.eval_shape(init, key)
    shardings = jax.tree.map(lambda _: replicated(mesh), shapes).replace(
        params=params, base=base, opt_state=_moment_shardings(shapes, params, mesh)
    )
    state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )
    return state, shardings


def _initialisers(
    module: Transformer, optimizer: optax.GradientTransformation, lora: LoraConfig
) -> tuple[Callable[[jax.Array], tuple[Any, Any]], Callable[[jax.Array], TrainState]]:
    """From a random key the boxed parameters and base, and the whole state."""

    def init_params(key: jax.Array) -> tuple[Any, Any]:
        tokens = jnp.zeros((1, 1), jnp.int32)
        params = module.init(key, tokens, tokens)["params"]
        return (init_lora(jax.random.fold_in(key, 1), params, lora), params) if lora.rank else (params, None)

    def init(key: jax.Array) -> TrainState:
        params, base = nn.unbox(init_params(key))
        # Three arrays: the state is donated, and one buffer cannot be given away twice.
        step, skipped, skipped_in_a_row = (jnp.zeros((), jnp.int32) for _ in range(3))
        return TrainState(step, params, optimizer.init(params), base, skipped, skipped_in_a_row)

    return init_params, init


def _moment_shardings(state: TrainState, shardings: Any, mesh: Mesh) -> Any:
    """Moments are split like the parameter whose path they end with, and the same shape; the rest is replicated.

    By path and not by the parameters' boxes: factored moments have other shapes, and Muon's are absent for some leaves.
    """
    known = {
        path: (leaf.shape, sharding)
        for (path, leaf), sharding in zip(
            jax.tree_util.tree_leaves_with_path(state.params), jax.tree.leaves(shardings), strict=True
        )
    }

    def of_moment(path: Any, leaf: Any) -> Any:
        for start in range(len(path)):
            shape, sharding = known.get(path[start:], (None, None))
            if shape == leaf.shape:
                return sharding
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(of_moment, state.opt_state)
