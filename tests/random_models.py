"""Models of random weights, both as this package has them and in NumPy."""

import functools

import flax.linen as nn
import jax
import numpy as np
from reference_decoders import NumpyQwen3

from refusion_jax.config import ModelConfig
from refusion_jax.decoding.sampling import gumbel_noise
from refusion_jax.huggingface import LAYER_PARAM_PATHS, PARAM_PATHS
from refusion_jax.modeling import Transformer

# With several EOS IDs in a small vocabulary an EOS is met now and then.
UNTIED = ModelConfig(
    vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, eos_token_ids=(5, 9), mask_token_id=15,
)  # fmt: skip
TIED = ModelConfig(
    vocab_size=12, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True, eos_token_ids=(3, 7),
)  # fmt: skip


@functools.cache
def random_model(config, seed, scale=0.4, sharpness=1):
    """The module, its parameters, and a `NumpyQwen3` of the same weights; `sharpness` multiplies the logits."""
    rng = np.random.default_rng(seed)
    ones = np.ones((1, 1), np.int32)
    shapes = nn.meta.unbox(jax.eval_shape(Transformer(config).init, jax.random.key(0), ones, ones)["params"])
    params = jax.tree.map(lambda leaf: rng.normal(0, scale, leaf.shape).astype(np.float32), shapes)
    if "lm_head" in params:
        params["lm_head"]["kernel"] *= sharpness
    tensors = {}
    for hf_name, path in PARAM_PATHS.items():
        if path[0] in params:
            tensors[hf_name if path[0] == "lm_head" else f"model.{hf_name}"] = _tensor(params, path)
    for hf_name, path in LAYER_PARAM_PATHS.items():
        for layer, weights in enumerate(_tensor(params, ("layers", *path))):
            tensors[f"model.layers.{layer}.{hf_name}"] = weights
    fields = ("rms_norm_eps", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta")
    shape = {field: getattr(config, field) for field in (*fields, "num_hidden_layers", "tie_word_embeddings")}
    return Transformer(config), params, NumpyQwen3(shape, tensors)


def _tensor(params, path):
    leaf = functools.reduce(lambda tree, key: tree[key], path, params)
    return leaf.swapaxes(-1, -2) if path[-1] == "kernel" else leaf


@functools.partial(jax.jit, static_argnums=(2, 3))
def _noise(key, draws, positions, vocab_size):
    table = np.broadcast_to(np.arange(positions, dtype=np.int32), (len(draws), positions))
    keys = jax.numpy.broadcast_to(key, (*table.shape, 2))
    return gumbel_noise(keys, jax.numpy.broadcast_to(draws[:, None], table.shape), table, vocab_size)


def noise_table(key, draws, positions, vocab_size):
    """(draws, positions, vocab_size) float32, the Gumbel noise of a row with this key data."""
    return np.asarray(_noise(key, np.arange(draws, dtype=np.int32), positions, vocab_size))
