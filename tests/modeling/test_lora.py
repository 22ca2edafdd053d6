"""Adapters: what they start as, what they compute, and merging them into the kernels."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.config import PROJECTIONS, ConfigError, LoraConfig, ModelConfig
from refusion_jax.modeling import Transformer
from refusion_jax.modeling.lora import init_lora, merge, variables

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = ModelConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, initializer_range=0.3,
)  # fmt: skip
LORA = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "down_proj"))
TOKENS = np.random.default_rng(0).integers(0, 40, (2, 9)).astype(np.int32)
POSITIONS = np.tile(np.arange(9, dtype=np.int32), (2, 1))


@functools.cache
def init_params():
    return nn.unbox(jax.jit(Transformer(CONFIG).init)(jax.random.key(0), TOKENS, POSITIONS))["params"]


def trained(lora=LORA, seed=1):
    """Adapters as training may leave them: nothing is zero."""
    adapters = init_lora(jax.random.key(seed), init_params(), lora)
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.3, leaf.dtype), adapters)


def logits(inputs, config=CONFIG):
    return jax.jit(Transformer(config).apply)(inputs, TOKENS, POSITIONS)


def shapes(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves}


def test_adapters_are_a_small_tree_stacked_over_the_layers():
    assert shapes(init_lora(jax.random.key(0), init_params(), LORA)) == {
        "layers/self_attn/q_proj/a": (2, 16, 3),
        "layers/self_attn/q_proj/b": (2, 3, 32),
        "layers/self_attn/v_proj/a": (2, 16, 3),
        "layers/self_attn/v_proj/b": (2, 3, 16),
        "layers/mlp/down_proj/a": (2, 24, 3),
        "layers/mlp/down_proj/b": (2, 3, 16),
    }


def test_new_adapters_change_nothing_and_differ_from_one_another():
    adapters = init_lora(jax.random.key(0), init_params(), LORA)
    np.testing.assert_array_equal(logits(variables(init_params(), adapters, LORA)), logits({"params": init_params()}))
    attention = adapters["layers"]["self_attn"]
    a = [attention["q_proj"]["a"][0], attention["q_proj"]["a"][1], attention["v_proj"]["a"][0]]
    assert all(np.abs(x - y).min() > 0 for x, y in ((a[0], a[1]), (a[0], a[2])))
    wide = init_lora(jax.random.key(0), init_params(), LoraConfig(rank=500))["layers"]["self_attn"]["q_proj"]["a"]
    assert float(jnp.std(wide)) == pytest.approx(1 / 4, rel=0.05)


@pytest.mark.parametrize("targets", [LORA.targets, PROJECTIONS], ids=["some", "all"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_merged_model_computes_what_base_and_adapters_do(targets, remat):
    lora, params = dataclasses.replace(LORA, targets=targets), init_params()
    config = dataclasses.replace(CONFIG, remat=remat)
    adapters = trained(lora)
    merged = merge(params, adapters, lora)
    assert shapes(merged) == shapes(params)
    adapted = logits(variables(params, adapters, lora), config)
    np.testing.assert_allclose(adapted, logits({"params": merged}), rtol=1e-4, atol=1e-4)
    assert np.abs(adapted - logits({"params": params})).max() > 0.1


def test_merging_adds_the_scaled_product_and_leaves_the_base_alone():
    params, adapters = init_params(), trained()
    before = jax.tree.map(np.array, params)
    merged = merge(params, adapters, LORA)
    jax.tree.map(np.testing.assert_array_equal, params, before)
    q = adapters["layers"]["self_attn"]["q_proj"]
    for layer in range(2):
        product = np.asarray(q["a"][layer], np.float64) @ np.asarray(q["b"][layer], np.float64)
        kernels = (tree["layers"]["self_attn"]["q_proj"]["kernel"][layer] for tree in (merged, params))
        np.testing.assert_allclose(next(kernels), next(kernels) + 6 / 3 * product, atol=1e-5)
    same = merged["layers"]["self_attn"]["k_proj"]["kernel"]
    assert np.array_equal(same, params["layers"]["self_attn"]["k_proj"]["kernel"])


def test_gradients_reach_the_adapters_alone():
    params, adapters = init_params(), trained()

    def loss(adapters):
        return jnp.mean(jax.nn.logsumexp(logits(variables(params, adapters, LORA)), axis=-1))

    def merged_loss(adapters):
        return jnp.mean(jax.nn.logsumexp(logits({"params": merge(params, adapters, LORA)}), axis=-1))

    got, expected = jax.grad(loss)(adapters), jax.grad(merged_loss)(adapters)
    assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(expected)) > 1e-4
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), got, expected)


def test_a_bfloat16_base_with_float32_adapters():
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), init_params())
    adapters = trained()
    assert {leaf.dtype for leaf in jax.tree.leaves(adapters)} == {jnp.dtype("float32")}
    config = dataclasses.replace(CONFIG, dtype="bfloat16", param_dtype="bfloat16")
    merged = merge(params, adapters, LORA)
    assert {leaf.dtype for leaf in jax.tree.leaves(merged)} == {jnp.dtype("bfloat16")}
    adapted, exact = logits(variables(params, adapters, LORA), config), logits({"params": merged}, config)
    assert np.linalg.norm(adapted - exact) < 0.05 * np.linalg.norm(exact)


def test_logical_axes_follow_the_kernels():
    boxed = jax.eval_shape(Transformer(CONFIG).init, jax.random.key(0), TOKENS, POSITIONS)["params"]
    adapters = jax.eval_shape(lambda key: init_lora(key, boxed_zeros(boxed), LORA), jax.random.key(0))
    q = adapters["layers"]["self_attn"]["q_proj"]
    assert (q["a"].names, q["b"].names) == (("layers", "embed", None), ("layers", None, "heads"))


def boxed_zeros(boxed):
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), boxed)


def test_unusable_adapters_are_refused():
    params = init_params()
    with pytest.raises(ConfigError, match=r"lora\.rank is 0, which is no adapter"):
        init_lora(jax.random.key(0), params, LoraConfig())
    with pytest.raises(ConfigError, match=r"'o_proj', which the model lacks; known: .*q_proj"):
        init_lora(jax.random.key(0), without(params, "o_proj"), LoraConfig(rank=2))
    with pytest.raises(ConfigError, match="but the adapters are for down_proj, q_proj, v_proj"):
        merge(params, trained(), dataclasses.replace(LORA, targets=("q_proj",)))
    with pytest.raises(ConfigError, match=r"with lora\.rank 4 the kernel"):
        merge(params, trained(), dataclasses.replace(LORA, rank=4))


def without(params, name):
    layers = params["layers"]
    attention = {key: value for key, value in layers["self_attn"].items() if key != name}
    return params | {"layers": layers | {"self_attn": attention}}
