"""The decoder: recorded logits, prefix and buffer, and the switches that must change nothing but speed."""

import dataclasses
import functools
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from refusion_jax.config import PROJECTIONS, ModelConfig
from refusion_jax.decoding.kv_cache import commit, empty_cache
from refusion_jax.huggingface import read_model_config, read_params
from refusion_jax.modeling import ALL_GROUPS, Packing, Transformer, Visibility
from refusion_jax.modeling.transformer import _dense

pytestmark = pytest.mark.usefixtures("quick_compilation")

REFERENCE = Path(__file__).parents[1] / "data" / "reference"
CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.3,
)


@functools.cache
def init(config):
    tokens = jnp.zeros((1, 1), jnp.int32)
    return nn.unbox(jax.jit(Transformer(config).init)(jax.random.key(0), tokens, tokens))["params"]


def random_tokens(seed, batch, length, config=CONFIG):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, (batch, length)).astype(np.int32)
    position_ids = np.stack([rng.permutation(3 * length)[:length] for _ in range(batch)]).astype(np.int32)
    return tokens, position_ids


def forward(config, params, tokens, position_ids, visibility=None):
    visibility = Visibility.causal(*tokens.shape) if visibility is None else visibility
    return compiled(config)({"params": params}, tokens, position_ids, visibility)


@functools.cache
def compiled(config):
    return jax.jit(Transformer(config).apply)


def encode(config):
    return jax.jit(functools.partial(Transformer(config).apply, method="encode"), static_argnums=5)


def test_recorded_logits():
    config = read_model_config(REFERENCE / "checkpoint")
    params = read_params(REFERENCE / "checkpoint", config)
    recorded = np.load(REFERENCE / "cases" / "forward.npz")
    apply = jax.jit(Transformer(config).apply)
    names = sorted({name.split(".")[0] for name in recorded})
    assert len(names) == 12
    for name in names:
        expected = recorded[f"{name}.logits"]
        rows, length, _ = expected.shape
        padded = np.zeros((2, 3, 68), np.int32)  # one shape for all: later tokens do not matter to earlier ones
        padded[0, :rows, :length] = recorded[f"{name}.tokens"]
        padded[1, :rows, :length] = recorded[f"{name}.position_ids"]
        logits = apply({"params": params}, *padded)
        assert logits.dtype == jnp.float32
        np.testing.assert_allclose(logits[:rows, :length], expected, atol=1e-4, rtol=0, err_msg=name)


def test_prefix_and_buffer_equal_one_full_forward():
    """Rows commit prefixes of different lengths; the rest of each row follows in a second forward."""
    params, total, width = init(CONFIG), 14, 9
    tokens, position_ids = random_tokens(1, 3, total)
    committed = np.array([5, 7, 9])
    full = np.asarray(forward(CONFIG, params, tokens, position_ids))

    prefix = tokens[:, : committed.max()], position_ids[:, : committed.max()]
    visibility = Visibility.causal(*prefix[0].shape)
    _, kv = encode(CONFIG)({"params": params}, *prefix, visibility, (), True)
    assert kv[0].shape == kv[1].shape == (2, 3, 2, committed.max(), 8)
    cache = commit(empty_cache(CONFIG, batch=3, buffer_length=20), kv, jnp.asarray(committed))

    at = np.minimum(committed[:, None] + np.arange(width), total - 1)
    rest = np.take_along_axis(tokens, at, 1), np.take_along_axis(position_ids, at, 1)
    hidden, nothing = encode(CONFIG)({"params": params}, *rest, Visibility.causal(3, width), (cache,), False)
    assert nothing is None
    logits = (hidden @ params["lm_head"]["kernel"]).reshape(3, width, -1)
    for row, start in enumerate(committed):
        np.testing.assert_allclose(logits[row, : total - start], full[row, start:], atol=2e-5)


@pytest.mark.parametrize("behind", [0, 1, 2], ids=["alone", "behind a buffer", "behind a shared one and its own"])
def test_a_packed_query_equals_the_unpacked_one(behind):
    """At live places: hidden states, keys and values, whatever the idle places and the line's padding hold."""
    batch, width, num_tokens = 4, 6, 14
    params, rng = init(CONFIG), np.random.default_rng(behind)
    apply = encode(CONFIG)
    committed = np.array([3, 0, 5, 2])
    prefix = random_tokens(10, batch, 5)
    _, kv = apply({"params": params}, *prefix, Visibility.causal(batch, 5), (), True)
    own = commit(empty_cache(CONFIG, batch, buffer_length=9), kv, jnp.asarray(committed))
    shared = jax.tree.map(lambda part: part[..., :1, :, :, :] if part.ndim == 5 else part[2:3], own)
    caches = [(), (own,), (shared, own)][behind]

    for lengths in (
        [6, 0, 5, 3],
        [0, 0, 6, 0],
        [1, 1, 1, 1],
        [0] * 4,
        rng.multinomial(num_tokens, [0.3, 0.2, 0.3, 0.2]),
    ):
        lengths = np.minimum(lengths, width)
        tokens, position_ids = random_tokens(int(lengths.sum()), batch, width)
        live = np.arange(width) < lengths[:, None]
        group = np.where(np.arange(width) < 3, np.arange(width) // 2 + 1, ALL_GROUPS)
        visibility = Visibility(
            segment=live.astype(np.int32),
            order=np.broadcast_to(np.arange(width, dtype=np.int32), live.shape),
            group=np.broadcast_to(group.astype(np.int32), live.shape),
        )
        line = np.flatnonzero(live)
        sources = np.concatenate([line, rng.integers(batch * width, size=num_tokens - len(line))]).astype(np.int32)
        places = rng.integers(num_tokens, size=live.shape).astype(np.int32)
        places[live] = np.arange(len(line))
        expected, expected_kv = apply({"params": params}, tokens, position_ids, visibility, caches, True)
        packed = tokens.reshape(-1)[sources], position_ids.reshape(-1)[sources]
        got, got_kv = apply({"params": params}, *packed, visibility, caches, True, Packing(sources, places))

        assert got.shape == (num_tokens, 32)
        np.testing.assert_allclose(got[: len(line)], expected[line], atol=2e-5)
        for ours, theirs in zip(got_kv, expected_kv, strict=True):
            assert ours.shape == theirs.shape == (2, batch, 2, width, 8)
            there = np.broadcast_to(live[None, :, None, :, None], theirs.shape)
            np.testing.assert_allclose(np.where(there, ours, 0), np.where(there, theirs, 0), atol=2e-5)


def test_tokens_see_what_visibility_says():
    """A change of one token reaches exactly the tokens that may see it, through all layers."""
    params = init(CONFIG)
    tokens, position_ids = random_tokens(2, 1, 8)
    labels = ([1, 1, 1, 1, 2, 2, 2, 0], range(8), [0, 0, 1, 2, 0, 0, 0, 0])
    visibility = Visibility(*(jnp.asarray([list(part)], jnp.int32) for part in labels))
    before = np.asarray(forward(CONFIG, params, tokens, position_ids, visibility))
    for changed, reached in ((0, {0, 1, 2, 3}), (2, {2}), (3, {3}), (4, {4, 5, 6}), (7, {7})):
        other = tokens.copy()
        other[0, changed] = (other[0, changed] + 1) % 40
        after = np.asarray(forward(CONFIG, params, other, position_ids, visibility))
        assert set(np.flatnonzero(np.abs(after - before).max((0, 2)) > 1e-6)) == reached


@pytest.mark.parametrize("tied", [False, True])
def test_parameter_names_and_shapes(tied):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    expected = {
        "embed_tokens/embedding": (40, 32),
        "norm/scale": (32,),
        "layers/input_layernorm/scale": (2, 32),
        "layers/post_attention_layernorm/scale": (2, 32),
        "layers/self_attn/q_proj/kernel": (2, 32, 32),
        "layers/self_attn/k_proj/kernel": (2, 32, 16),
        "layers/self_attn/v_proj/kernel": (2, 32, 16),
        "layers/self_attn/o_proj/kernel": (2, 32, 32),
        "layers/self_attn/q_norm/scale": (2, 8),
        "layers/self_attn/k_norm/scale": (2, 8),
        "layers/mlp/gate_proj/kernel": (2, 32, 48),
        "layers/mlp/up_proj/kernel": (2, 32, 48),
        "layers/mlp/down_proj/kernel": (2, 48, 32),
    } | ({} if tied else {"lm_head/kernel": (32, 40)})
    for switches in (
        {}, {"remat": "full"}, {"remat": "minimal"}, {"remat": "q_proj,attention"}, {"scan_unroll": 2},
        {"remat": "full", "scan_unroll": 2},
    ):  # fmt: skip
        params = jax.eval_shape(functools.partial(init.__wrapped__, dataclasses.replace(config, **switches)))
        leaves = jax.tree_util.tree_leaves_with_path(params)
        shapes = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves}
        assert shapes == expected, switches


@pytest.mark.slow
def test_remat_and_unrolling_change_no_gradient():
    params = init(CONFIG)
    tokens, position_ids = random_tokens(3, 2, 10)

    def gradients(**switches):
        module = Transformer(dataclasses.replace(CONFIG, **switches))

        def loss(params):
            logits = module.apply({"params": params}, tokens, position_ids)
            return -jnp.mean(jax.nn.log_softmax(logits)[..., 3])

        return jax.jit(jax.value_and_grad(loss))(params)

    expected = gradients()
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(expected))
    for switches in ({"remat": "full"}, {"remat": "minimal"}, {"remat": "attention,v_proj"}, {"scan_unroll": 2}):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradients(**switches), expected
        )


def test_remat_keeps_what_it_names():
    """What the forward pass hands to the backward pass, counted in the layers' stacked activations by their widths."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=2)
    params, (tokens, position_ids) = init(config), random_tokens(3, 2, 10)

    def kept(remat):
        module = Transformer(dataclasses.replace(config, remat=remat))
        _, pullback = jax.eval_shape(
            lambda params: jax.vjp(lambda p: module.apply({"params": p}, tokens, position_ids), params), params
        )
        # One leaf for each activation of the 2 layers and 20 tokens, whatever its shape beyond these.
        stacked = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape[0] == 2 and leaf.size % 40 == 0]
        return sorted(leaf.size // 40 for leaf in stacked if leaf.shape[1] in (2, 20))

    full, minimal, none = kept("full"), kept("minimal"), kept("none")
    assert full == [32]  # each layer's input
    assert kept("attention") == [32, 32]
    assert kept("up_proj,attention") == [32, 32, 48]
    assert sum(full) < sum(minimal) < sum(none)
    assert minimal.count(48) == 2  # gate and up; activations of the attention's products have widths 32 and 16


def test_rope_scaling_reads_a_longer_text_at_shorter_positions():
    params, (tokens, position_ids) = init(CONFIG), random_tokens(7, 2, 8)
    stretched = dataclasses.replace(CONFIG, rope_scaling=2.0)
    got = forward(stretched, params, tokens, 2 * position_ids)
    np.testing.assert_allclose(got, forward(CONFIG, params, tokens, position_ids), atol=1e-5)


def test_layers_are_initialised_differently_and_as_configured():
    params = init(CONFIG)
    kernel = np.asarray(params["layers"]["mlp"]["gate_proj"]["kernel"])
    assert kernel.std() == pytest.approx(0.3, rel=0.1)
    assert not np.array_equal(kernel[0], kernel[1])
    assert np.array_equal(params["norm"]["scale"], np.ones(32))


def test_tied_embedding():
    """Logits are hidden states times the embedding: what an untied model with its transpose computes."""
    tied = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    params = init(tied)
    inputs = random_tokens(4, 2, 6)
    untied = params | {"lm_head": {"kernel": params["embed_tokens"]["embedding"].T}}
    got = forward(tied, params, *inputs)
    np.testing.assert_allclose(got, forward(CONFIG, untied, *inputs), atol=1e-5)
    assert got.dtype == jnp.float32


def test_bfloat16_activations_stay_close():
    config, params = dataclasses.replace(CONFIG, dtype="bfloat16"), init(CONFIG)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(init(config)))
    inputs = random_tokens(5, 2, 12)
    exact, rounded = (np.asarray(forward(c, params, *inputs)) for c in (CONFIG, config))
    assert rounded.dtype == np.float32
    assert 0 < np.linalg.norm(rounded - exact) < 0.05 * np.linalg.norm(exact)
    visibility = Visibility.causal(*inputs[0].shape)
    hidden, kv = encode(config)({"params": params}, *inputs, visibility, (), True)
    assert hidden.dtype == kv[0].dtype == kv[1].dtype == jnp.bfloat16


def test_a_tied_model_wholly_in_bfloat16():
    config = dataclasses.replace(CONFIG, dtype="bfloat16", param_dtype="bfloat16", tie_word_embeddings=True)
    params = init(config)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(params))
    inputs = random_tokens(6, 2, 6)
    logits = forward(config, params, *inputs)
    assert logits.dtype == jnp.float32
    exact = forward(dataclasses.replace(config, dtype="float32"), params, *inputs)
    assert np.linalg.norm(logits - exact) < 0.05 * np.linalg.norm(exact)


def test_settings_make_the_parameters_of_other_decoders():
    """Without norms on query and key and with biases: what Llama, Qwen2 and LLaDA have."""

    def names(config):
        return set(flatten_dict(init(config)["layers"], sep="/"))

    qwen3, llama = names(CONFIG), names(dataclasses.replace(CONFIG, qk_norm=False))
    assert qwen3 - llama == {"self_attn/q_norm/scale", "self_attn/k_norm/scale"}
    biases = ("q_proj", "k_proj", "v_proj")
    qwen2 = init(dataclasses.replace(CONFIG, qk_norm=False, biases=biases))["layers"]
    assert set(flatten_dict(qwen2, sep="/")) - llama == {f"self_attn/{name}/bias" for name in biases}
    assert qwen2["self_attn"]["k_proj"]["bias"].shape == (2, 16)
    every = init(dataclasses.replace(CONFIG, biases=PROJECTIONS))["layers"]
    assert every["mlp"]["down_proj"]["bias"].shape == every["self_attn"]["o_proj"]["bias"].shape == (2, 32)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_a_bias_is_a_constant_input(name):
    """A projection with a bias computes what one without it does whose last input is always 1."""
    config = dataclasses.replace(CONFIG, biases=(name,))
    rng = np.random.default_rng(3)
    features = init(config)["layers"]["mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"][name][
        "bias"
    ].shape[1:]
    bias = rng.normal(size=features).astype(np.float32)
    inputs = rng.normal(size=(5, 32)).astype(np.float32)
    plain, biased = (_dense(c, features[0], ("embed", "mlp"), name) for c in (CONFIG, config))
    kernel = rng.normal(size=(32, *features)).astype(np.float32)
    expected = plain.apply({"params": {"kernel": np.concatenate([kernel, bias[None]])}}, np.c_[inputs, np.ones(5)])
    got = biased.apply({"params": {"kernel": kernel, "bias": bias}}, inputs)
    np.testing.assert_allclose(got, expected, atol=1e-5)
