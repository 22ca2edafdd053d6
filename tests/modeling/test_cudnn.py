"""What is asked of cuDNN: the same in plain operations gives plain attention, and it lowers for CUDA without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo  # the version of a cuDNN that is not there

from refusion_jax.modeling import Visibility
from refusion_jax.modeling.attention import attend, visibility_bias
from refusion_jax.modeling.cudnn import MaskedRows, cudnn_attention, fits, is_capable

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 24, 4, 2, 8
SEGMENT = np.stack([np.repeat([1, 2, 0], [10, 8, 6]), np.repeat(1, LENGTH)]).astype(np.int32)


def packed_rows():
    return Visibility.causal(BATCH, LENGTH).replace(segment=jnp.asarray(SEGMENT))


def outcome(attention, dtype):
    rng = np.random.default_rng(0)
    query, cotangent = rng.normal(size=(2, BATCH, LENGTH, HEADS, HEAD_DIM))
    key, value = rng.normal(size=(2, BATCH, KV_HEADS, LENGTH, HEAD_DIM))

    def loss(*inputs):
        mixed = attention(*inputs)
        return jnp.sum(mixed * cotangent.reshape(mixed.shape)), mixed

    inputs = (jnp.asarray(part, dtype) for part in (query, key, value))
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True)), tuple(inputs)


def test_forward_and_gradients_are_those_of_plain_attention():
    rows, bias = MaskedRows.of(packed_rows()), visibility_bias(packed_rows())
    gradient, inputs = outcome(lambda q, k, v: cudnn_attention(q, k, v, rows, implementation="xla"), jnp.float32)
    plain, _ = outcome(lambda q, k, v: attend(q, (k,), (v,), bias), jnp.float32)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), gradient(*inputs), plain(*inputs))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_it_lowers_to_calls_of_cudnn(monkeypatch, dtype):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    gradient, inputs = outcome(lambda q, k, v: cudnn_attention(q, k, v, MaskedRows.of(packed_rows())), dtype)
    program = gradient.trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"):
        assert f"@{kernel}(" in program


@pytest.mark.parametrize(
    ("length", "head_dim", "dtype", "possible"),
    [
        (24, 8, "bfloat16", True),
        (24, 128, "float16", True),
        (24, 128, "float32", False),
        (23, 128, "bfloat16", False),
        (24, 12, "bfloat16", False),
        (24, 136, "bfloat16", False),
    ],
)
def test_what_fits(length, head_dim, dtype, possible):
    assert fits(length, head_dim, dtype) == possible


@pytest.mark.parametrize(
    ("device", "capable"),
    [
        ({"compute_capability": "9.0"}, True),
        ({"compute_capability": "7.5"}, False),
        ({"compute_capability": "gfx90a"}, False),
        ({}, False),
    ],
)
def test_which_gpus(monkeypatch, device, capable):
    monkeypatch.setattr(jax, "local_devices", lambda: [type("Device", (), device)])
    assert is_capable() == capable
