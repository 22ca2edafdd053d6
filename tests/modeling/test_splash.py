"""Splash attention, interpreted, against the plain backend on the packed, reordered rows of training."""

import collections
import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.config import ModelConfig
from refusion_jax.modeling import Transformer, Visibility
from refusion_jax.modeling.attention import attend, visibility_bias
from refusion_jax.modeling.splash import CausalRows, fits, splash_attention

pytestmark = pytest.mark.usefixtures("quick_compilation")

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 256, 4, 2, 128
# Two examples that end within a block and padding; one example.
SEGMENT = np.stack([np.repeat([1, 2, 0], [100, 130, 26]), np.repeat(1, LENGTH)]).astype(np.int32)
CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=HEAD_DIM,
    initializer_range=0.3,
)


def packed_rows():
    causal = Visibility.causal(BATCH, LENGTH)
    return causal.replace(segment=jnp.asarray(SEGMENT))


def test_forward_and_gradients_are_those_of_plain_attention():
    rng = np.random.default_rng(0)
    query, cotangent = rng.normal(size=(2, BATCH, LENGTH, HEADS, HEAD_DIM)).astype(np.float32)
    key, value = rng.normal(size=(2, BATCH, KV_HEADS, LENGTH, HEAD_DIM)).astype(np.float32)
    cotangent = cotangent.reshape(BATCH, LENGTH, -1)
    rows, bias = CausalRows(jnp.asarray(SEGMENT), interpret=True), visibility_bias(packed_rows())

    def outcome(attention):
        def loss(*inputs):
            mixed = attention(*inputs)
            return jnp.sum(mixed * cotangent), mixed

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(query, key, value)

    got = outcome(lambda q, k, v: splash_attention(q, k, v, rows))
    expected = outcome(lambda q, k, v: attend(q, (k,), (v,), bias))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), got, expected)
    assert got[1].dtype == query.dtype


@pytest.mark.parametrize(
    ("length", "head_dim", "possible"), [(256, 128, True), (250, 128, False), (256, 64, True), (256, 96, False)]
)
def test_what_fits(length, head_dim, possible):
    assert fits(length, head_dim) == possible


def loss_of(config):
    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, (BATCH, LENGTH)), jnp.int32)
    module, position_ids = Transformer(config), jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)

    def loss(params):
        logits = module.apply({"params": params}, tokens, position_ids, packed_rows())
        return -jnp.mean(jnp.where(SEGMENT > 0, jax.nn.log_softmax(logits)[..., 3], 0.0))

    return loss


def params():
    tokens = jnp.zeros((1, 1), jnp.int32)
    return nn.unbox(jax.jit(Transformer(CONFIG).init)(jax.random.key(0), tokens, tokens))["params"]


@pytest.mark.slow
def test_in_scanned_rematerialised_layers():
    expected = jax.jit(jax.value_and_grad(loss_of(CONFIG)))(params())
    config = dataclasses.replace(CONFIG, attention="splash", remat="attention")
    got = jax.jit(jax.value_and_grad(loss_of(config)))(params())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), got, expected)


def test_keeping_attention_keeps_what_its_gradient_needs():
    """The output once, and the logarithm of each softmax's sum: with them the forward kernel need not run again."""

    def kept(remat):
        loss = loss_of(dataclasses.replace(CONFIG, attention="splash", remat=remat))
        _, pullback = jax.eval_shape(lambda params: jax.vjp(loss, params), params())
        return collections.Counter(leaf.shape for leaf in jax.tree.leaves(pullback))

    of_rows = (CONFIG.num_hidden_layers, BATCH, 1, 2, LENGTH)
    assert kept("attention") - kept("full") == {(*of_rows, HEAD_DIM): 1, of_rows: 1}
