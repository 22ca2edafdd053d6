"""The published sizes, by abstract initialisation: shapes without memory."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from refusion_jax.config import ConfigError
from refusion_jax.modeling import Transformer
from refusion_jax.modeling.sizes import qwen3

# What the published checkpoints hold, the output embedding counted once where it is the input's.
PARAMETERS = {
    "0.6B": 596_049_920,
    "1.7B": 1_720_574_976,
    "4B": 4_022_468_096,
    "8B": 8_190_735_360,
    "14B": 14_768_307_200,
    "32B": 32_762_123_264,
}


@pytest.mark.parametrize("size", PARAMETERS)
def test_parameter_counts(size):
    config = qwen3(size)
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    params = nn.unbox(jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens, tokens))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == PARAMETERS[size]


def test_settings_can_be_changed():
    config = qwen3("0.6B", dtype="bfloat16", num_hidden_layers=2)
    assert (config.dtype, config.num_hidden_layers, config.hidden_size) == ("bfloat16", 2, 1024)


def test_an_unknown_size():
    with pytest.raises(ConfigError, match=r"There is no Qwen3 of size '8b'\. Did you mean '8B'\?"):
        qwen3("8b")
