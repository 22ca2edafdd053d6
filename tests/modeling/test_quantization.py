"""Parameters in int8: how far from what they were, where they go, and that a model computes with them."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from refusion_jax.config import ConfigError, MeshConfig, ModelConfig
from refusion_jax.modeling import Transformer
from refusion_jax.modeling.quantization import quantize, quantize_heads, quantized_shardings, scaled_product
from refusion_jax.sharding import make_mesh
from refusion_jax.training.weights import param_shardings

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = ModelConfig(
    vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, biases=("q_proj",), initializer_range=0.3,
)  # fmt: skip
TIED = dataclasses.replace(CONFIG, tie_word_embeddings=True)
TOKENS = np.random.default_rng(0).integers(0, 24, (2, 7)).astype(np.int32)
POSITIONS = np.broadcast_to(np.arange(7, dtype=np.int32), TOKENS.shape)


@functools.cache
def shapes(config):
    return nn.unbox(jax.eval_shape(Transformer(config).init, jax.random.key(0), TOKENS, POSITIONS))["params"]


def random_params(config, dtype=jnp.float32):
    """New ones at every call, since `quantize` consumes them; of the same numbers."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape).astype(dtype)), shapes(config))


def modules(params):
    """Every innermost dictionary, by its path."""
    flat = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        *module, name = (key.key for key in path)
        flat.setdefault("/".join(module), {})[name] = leaf
    return flat


def dequantised(params):
    def whole(module):
        if "kernel" in module and "scale" in module:
            kernel = module["kernel"].astype(np.float32) * module["scale"][..., None, :]
            return {name: leaf for name, leaf in module.items() if name != "scale"} | {"kernel": kernel}
        if "embedding" in module and "scale" in module:
            return {"embedding": module["embedding"].astype(np.float32) * module["scale"][:, None]}
        return {name: whole(part) if isinstance(part, dict) else part for name, part in module.items()}

    return whole(jax.device_get(params))


@functools.cache
def forward(config):
    return jax.jit(Transformer(config).apply)


def logits(config, params):
    return forward(config)({"params": params}, TOKENS, POSITIONS)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_numbers_are_off_by_half_a_scale_at_most(config, dtype):
    params = random_params(config, dtype)
    before = modules(jax.device_get(params))
    after = modules(jax.device_get(quantize(params)))
    assert before.keys() == after.keys()
    kinds = set()
    for path, was in before.items():
        now = after[path]
        if "kernel" in was:
            name, axis = "kernel", -2
        elif path == "embed_tokens" and config.tie_word_embeddings:
            name, axis = "embedding", -1
        else:
            jax.tree.map(np.testing.assert_array_equal, now, was)
            assert all(leaf.dtype == dtype for leaf in now.values())
            continue
        kinds.add(name)
        numbers, scale, exact = now[name], np.expand_dims(now["scale"], axis), was[name].astype(np.float32)
        assert numbers.dtype == jnp.int8 and now["scale"].dtype == jnp.float32
        assert numbers.shape == exact.shape and scale.shape == np.max(exact, axis, keepdims=True).shape
        assert np.all(np.abs(numbers * scale - exact) <= scale * 0.50001)
        np.testing.assert_allclose(scale, np.max(np.abs(exact), axis, keepdims=True) / 127, rtol=1e-6)
        if "bias" in was:
            np.testing.assert_array_equal(now["bias"], was["bias"])
    assert kinds == ({"kernel", "embedding"} if config.tie_word_embeddings else {"kernel"})


def test_columns_of_zeros_stay_zeros():
    kernel = jnp.array([[0.0, 1.0, 1e-30], [0.0, -2.0, 1e-30]])
    (module,) = quantize({"lm_head": {"kernel": kernel}}).values()
    np.testing.assert_array_equal(module["kernel"], [[0, 64, 127], [0, -127, 127]])
    np.testing.assert_allclose(module["scale"], np.float32([0, 2 / 127, 1e-30 / 127]), rtol=1e-6)
    heads = quantize_heads(jnp.array([[0.0, 0.0], [-3.0, 1.0]], jnp.bfloat16))
    np.testing.assert_array_equal(heads.numbers, [[0, 0], [-127, 42]])
    np.testing.assert_allclose(heads.scales, np.float32([0, 3 / 127]), rtol=1e-6)


def test_what_is_quantised_is_deleted_and_the_rest_shared():
    params = random_params(CONFIG)
    made = quantize(params)
    deleted = {path for path, module in modules(params).items() if any(leaf.is_deleted() for leaf in module.values())}
    assert deleted == {path for path, module in modules(params).items() if "kernel" in module}
    assert made["embed_tokens"]["embedding"] is params["embed_tokens"]["embedding"]
    assert not params["layers"]["self_attn"]["q_proj"]["bias"].is_deleted()


def test_parameters_are_quantised_once():
    params = quantize(random_params(CONFIG))
    with pytest.raises(ConfigError, match="kernel is int8: the parameters are quantised already"):
        quantize(params)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("config", "dtype", "tolerance"),
    [(CONFIG, "float32", 2e-5), (TIED, "float32", 2e-5), (CONFIG, "bfloat16", 0.15), (CONFIG, "float16", 0.02)],
)
def test_a_model_computes_what_the_numbers_times_the_scales_say(config, dtype, tolerance):
    params = quantize(random_params(config, dtype))
    got = logits(dataclasses.replace(config, dtype=dtype, param_dtype=dtype), params)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, logits(config, dequantised(params)), atol=tolerance)


def test_products_are_summed_and_scaled_in_float32():
    """In float16 these would be infinite before the scale makes them small."""
    inputs, numbers = jnp.full((1, 64), 100, jnp.float16), jnp.full((64, 1), 127, jnp.int8)
    got = scaled_product(inputs, numbers, jnp.full(1, 1e-3, jnp.float32))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, 64 * 100 * 127 * 1e-3, rtol=1e-6)


def test_shapes_and_shardings_without_values():
    device = SingleDeviceSharding(jax.devices()[0])
    shardings = quantized_shardings(shapes(TIED), jax.tree.map(lambda _: device, shapes(TIED)))
    made = jax.eval_shape(quantize, shapes(TIED))
    assert jax.tree.structure(made) == jax.tree.structure(shardings)
    q_proj, embed = made["layers"]["self_attn"]["q_proj"], made["embed_tokens"]
    assert q_proj["kernel"].dtype == embed["embedding"].dtype == jnp.int8
    assert q_proj["scale"].shape == (2, 32) and embed["scale"].shape == (24,)
    assert set(jax.tree.leaves(shardings)) == {device}


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_scales_are_split_as_their_outputs_are(config):
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=1), jax.devices()[:1])
    wanted = param_shardings(config, mesh)
    shardings = quantized_shardings(shapes(config), wanted)
    layers = shardings["layers"]
    assert layers["self_attn"]["q_proj"]["scale"].spec == PartitionSpec(None, "tensor")
    assert layers["self_attn"]["o_proj"]["scale"].spec == PartitionSpec(None, "fsdp")
    assert layers["mlp"]["down_proj"]["kernel"].spec == PartitionSpec(None, "tensor", "fsdp")
    of_vocabulary = shardings["embed_tokens" if config.tie_word_embeddings else "lm_head"]["scale"]
    assert of_vocabulary == NamedSharding(mesh, PartitionSpec("tensor"))
    made = quantize(jax.tree.map(jax.device_put, random_params(config), wanted))
    jax.tree.map(lambda leaf, sharding: leaf.sharding == sharding or pytest.fail(str(leaf.sharding)), made, shardings)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_seen(value):
    """An int8 cannot be NaN, and a maximum may pass it over: a damaged weight would look healthy."""
    heads = np.ones((3, 4), np.float32)
    heads[1, 2] = value
    found = quantize_heads(jnp.asarray(heads))
    np.testing.assert_array_equal(np.isnan(found.scales), [False, True, False])
    params = random_params(CONFIG)
    params["lm_head"]["kernel"] = params["lm_head"]["kernel"].at[5, 7].set(value)
    scale = quantize(params)["lm_head"]["scale"]
    assert np.flatnonzero(np.isnan(scale)).tolist() == [7]
