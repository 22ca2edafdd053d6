"""Learning rates and update rules, against their definitions in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.config import OPTIMIZERS, SCHEDULES, OptimizerConfig
from refusion_jax.training.optimizer import decay_mask, learning_rate_schedule, make_optimizer

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


def test_weight_decay_leaves_norm_scales_and_biases_alone():
    projection = {"kernel": jnp.ones((3, 3)), "bias": jnp.ones((2, 3))}
    params = {"norm": {"scale": jnp.ones(3)}, "layers": {"mlp": {"up_proj": projection}}}
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, warmup_steps=0, weight_decay=0.5), 10)
    updates, _ = jax.jit(optimizer.update)(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    assert np.array_equal(updates["norm"]["scale"], np.zeros(3))
    assert np.array_equal(updates["layers"]["mlp"]["up_proj"]["bias"], np.zeros((2, 3)))
    np.testing.assert_allclose(updates["layers"]["mlp"]["up_proj"]["kernel"], -0.05)


def test_one_update_is_clipped_adam():
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=0, beta1=0.8, beta2=0.9, epsilon=0.5, clip_norm=2.0)
    params = {"kernel": jnp.zeros(4)}
    gradient = np.array([3.0, 0.0, -4.0, 0.0])  # of norm 5, clipped to 2
    optimizer = make_optimizer(config, 10)
    updates, _ = jax.jit(optimizer.update)({"kernel": jnp.asarray(gradient)}, optimizer.init(params), params)
    clipped = gradient * 2 / 5
    np.testing.assert_allclose(updates["kernel"], -0.1 * clipped / (np.abs(clipped) + 0.5), rtol=1e-5)


# ---- schedules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "linear", "final_ratio": 0.1}, {10: 0.4, 60: 0.22, 110: 0.04, 200: 0.04}),
        ({"schedule": "constant"}, {10: 0.4, 60: 0.4, 110: 0.4, 200: 0.4}),
        ({"schedule": "wsd", "decay_steps": 20}, {10: 0.4, 60: 0.4, 90: 0.4, 95: 0.3, 105: 0.1, 110: 0, 200: 0}),
    ],
    ids=["linear", "constant", "wsd"],
)
def test_after_warm_up(settings, expected):
    schedule = learning_rate_schedule(OptimizerConfig(learning_rate=0.4, warmup_steps=10, **settings), 110)
    expected = {0: 0.0, 5: 0.2} | expected
    np.testing.assert_allclose([float(schedule(step)) for step in expected], list(expected.values()), atol=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_that_is_all_warm_up_and_decay(schedule):
    decay = 5 if schedule == "wsd" else 0
    rate = learning_rate_schedule(
        OptimizerConfig(learning_rate=0.4, schedule=schedule, warmup_steps=5, decay_steps=decay), 10
    )
    rates = np.array([float(rate(step)) for step in range(11)])
    assert rates[0] == 0 and rates[5] == pytest.approx(0.4)
    assert rates[10] == pytest.approx(0.4 if schedule == "constant" else 0.0)


# ---- update rules ----------------------------------------------------------------------------------------------------

SHAPES = {
    "embed_tokens": {"embedding": (12, 8)},
    "layers": {"input_layernorm": {"scale": (3, 8)}, "mlp": {"up_proj": {"kernel": (3, 8, 6)}}},
    "lm_head": {"kernel": (8, 12)},
    "norm": {"scale": (8,)},
}


def random_tree(seed, dtype=jnp.float32):
    rng, shapes = np.random.default_rng(seed), SHAPES
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), dtype), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def updates_of(config, steps=1, dtype=jnp.float32):
    """Updates and state after some steps with random gradients; no warm-up, clipping out of reach."""
    optimizer, params = make_optimizer(config, 100), random_tree(0, dtype)
    state, update = jax.jit(optimizer.init)(params), jax.jit(optimizer.update)
    for step in range(steps):
        updates, state = update(random_tree(1 + step, dtype), state, params)
    return updates, state


def settings(**changes):
    return OptimizerConfig(
        **{"learning_rate": 0.1, "warmup_steps": 0, "schedule": "constant", "clip_norm": 1e6} | changes
    )


def test_lion_takes_signs():
    """Sign of the interpolated momentum; the momentum itself follows by `beta2`."""
    updates, _ = updates_of(settings(name="lion", beta1=0.6, beta2=0.9), steps=2)
    first, second = random_tree(1), random_tree(2)
    expected = jax.tree.map(lambda a, b: -0.1 * np.sign(0.6 * 0.1 * a + 0.4 * b), first, second)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates, expected)


def orthogonalised(matrix):
    """Five quintic Newton-Schulz iterations with Muon's coefficients."""
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def test_muon_orthogonalises_each_layer_and_leaves_the_rest_to_adam():
    config = settings(name="muon", beta1=0.8, beta2=0.9)
    updates, _ = updates_of(config)
    gradient = random_tree(1)
    kernels = np.asarray(gradient["layers"]["mlp"]["up_proj"]["kernel"], np.float64)
    expected = [-0.1 * 0.2 * np.sqrt(8) * orthogonalised(kernel) for kernel in kernels]
    np.testing.assert_allclose(updates["layers"]["mlp"]["up_proj"]["kernel"], expected, atol=1e-4)
    for leaf in (updates["embed_tokens"], updates["lm_head"], updates["norm"], updates["layers"]["input_layernorm"]):
        # The first step of Adam with Nesterov momentum has the size of the learning rate in every element.
        sizes = np.abs(jax.tree.leaves(leaf)[0])
        assert np.ptp(sizes) < 1e-4 * sizes.max() and 0.05 < sizes.max() < 0.5


def test_adafactor_keeps_one_row_and_column_of_large_matrices():
    optimizer = make_optimizer(settings(name="adafactor"), 100)
    params = {"layers": {"kernel": jnp.ones((2, 128, 256))}, "norm": {"scale": jnp.ones(8)}}
    state = jax.eval_shape(optimizer.init, params)
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim and leaf.size > 1)
    assert shapes == [(2, 128), (2, 256), (8,)]


def test_adafactor_divides_by_the_root_mean_square():
    """At the first step of a leaf too small to be factored: the gradient's sign, clipped to a root mean square of 1."""
    updates, _ = updates_of(settings(name="adafactor"))
    jax.tree.map(lambda a, g: np.testing.assert_allclose(a, -0.1 * np.sign(g), rtol=1e-4), updates, random_tree(1))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("embeddings", [True, False])
def test_weight_decay_is_the_learning_rate_times_the_parameters(name, embeddings):
    without, _ = updates_of(settings(name=name))
    decayed, _ = updates_of(settings(name=name, weight_decay=0.5, decay_embeddings=embeddings))
    got, params = jax.tree.map(lambda a, b: a - b, decayed, without), random_tree(0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(got):
        text = jax.tree_util.keystr(path)
        stays = "scale" in text or (not embeddings and ("embed_tokens" in text or "lm_head" in text))
        value = functools.reduce(lambda tree, key: tree[key.key], path, params)
        np.testing.assert_allclose(leaf, 0 * value if stays else -0.05 * value, atol=1e-5, err_msg=text)


def test_the_decay_mask_of_adapters():
    adapters = {"layers": {"self_attn": {"q_proj": {"a": jnp.ones(1), "b": jnp.ones(1)}}}}
    assert all(jax.tree.leaves(decay_mask(adapters, OptimizerConfig(decay_embeddings=False))))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_stored_as_configured_and_computed_in_float32(name):
    (exact, kept), (rounded, small) = (
        updates_of(settings(name=name, moments_dtype=dtype), steps=3) for dtype in ("float32", "bfloat16")
    )
    types = {leaf.dtype for leaf in jax.tree.leaves(small) if leaf.size > 12}
    assert types == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(kept) if leaf.size > 12} == {jnp.dtype("float32")}
    for got, wanted in zip(*map(jax.tree.leaves, (rounded, exact)), strict=True):
        assert got.dtype == jnp.float32
        assert np.linalg.norm(got - wanted) < (0.3 if name == "lion" else 0.03) * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_keep_their_types_with_bfloat16_parameters(name):
    optimizer, params = make_optimizer(settings(name=name, weight_decay=0.1), 100), random_tree(0, jnp.bfloat16)
    before = jax.eval_shape(optimizer.init, params)
    _, after = jax.eval_shape(optimizer.update, params, before, params)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), before) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), after
    )
