"""Learning rate, optimizer and the first state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.config import MeshConfig, ModelConfig, OptimizerConfig
from refusion_jax.modeling import Transformer
from refusion_jax.sharding import make_mesh
from refusion_jax.training.state import init_state, learning_rate_schedule, make_optimizer

pytestmark = pytest.mark.usefixtures("quick_compilation")


def cosine(share, peak, final):
    return final + (peak - final) * (1 + np.cos(np.pi * share)) / 2


def test_linear_warm_up_then_cosine_decay():
    schedule = learning_rate_schedule(OptimizerConfig(learning_rate=0.4, warmup_steps=10, final_ratio=0.1), 110)
    got = [float(schedule(step)) for step in (0, 1, 5, 10, 35, 60, 85, 110, 200)]
    decayed = [cosine(share, 0.4, 0.04) for share in (0.25, 0.5, 0.75)]
    np.testing.assert_allclose(got, [0, 0.04, 0.2, 0.4, *decayed, 0.04, 0.04], atol=1e-6)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 100), (5, 5), (1, 1), (0, 1)])
def test_schedules_at_their_limits(warmup, steps):
    schedule = learning_rate_schedule(OptimizerConfig(learning_rate=0.4, warmup_steps=warmup), steps)
    rates = np.array([float(schedule(step)) for step in range(steps + 1)])
    assert rates[0] == pytest.approx(0.0 if warmup else 0.4)
    assert rates[warmup] == pytest.approx(0.4)
    assert (np.diff(rates[warmup:]) <= 0).all()


def test_weight_decay_leaves_norm_scales_alone():
    params = {"norm": {"scale": jnp.ones(3)}, "layers": {"mlp": {"up_proj": {"kernel": jnp.ones((3, 3))}}}}
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, warmup_steps=0, weight_decay=0.5), 10)
    updates, _ = jax.jit(optimizer.update)(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    assert np.array_equal(updates["norm"]["scale"], np.zeros(3))
    np.testing.assert_allclose(updates["layers"]["mlp"]["up_proj"]["kernel"], -0.05)


def test_one_update_is_clipped_adam():
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=0, beta1=0.8, beta2=0.9, epsilon=0.5, clip_norm=2.0)
    params = {"kernel": jnp.zeros(4)}
    gradient = np.array([3.0, 0.0, -4.0, 0.0])  # of norm 5, clipped to 2
    optimizer = make_optimizer(config, 10)
    updates, _ = jax.jit(optimizer.update)({"kernel": jnp.asarray(gradient)}, optimizer.init(params), params)
    clipped = gradient * 2 / 5
    np.testing.assert_allclose(updates["kernel"], -0.1 * clipped / (np.abs(clipped) + 0.5), rtol=1e-5)


def test_the_first_state():
    config = ModelConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=4, initializer_range=0.5,
    )  # fmt: skip
    module, optimizer = Transformer(config), make_optimizer(OptimizerConfig(), 100)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    state, shardings = init_state(module, optimizer, 0, mesh)
    other, _ = init_state(module, optimizer, 1, mesh)
    assert int(state.step) == 0
    assert jax.tree.structure(state) == jax.tree.structure(shardings)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))
    embeddings = (state.params["embed_tokens"]["embedding"], other.params["embed_tokens"]["embedding"])
    assert np.asarray(embeddings[0]).std() == pytest.approx(0.5, rel=0.3)
    assert not np.array_equal(*embeddings)
