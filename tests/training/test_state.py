"""The first state."""

import jax
import numpy as np
import pytest

from refusion_jax.config import OPTIMIZERS, LoraConfig, MeshConfig, ModelConfig, OptimizerConfig
from refusion_jax.modeling import Transformer
from refusion_jax.sharding import make_mesh
from refusion_jax.training.optimizer import make_optimizer
from refusion_jax.training.state import abstract_state, init_state

pytestmark = pytest.mark.usefixtures("quick_compilation")


CONFIG = ModelConfig(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
    num_key_value_heads=1, head_dim=4, initializer_range=0.5,
)  # fmt: skip


def first_state(seed=0, lora=None, **settings):
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    optimizer = make_optimizer(OptimizerConfig(**settings), 100)
    return init_state(Transformer(CONFIG), optimizer, seed, mesh, lora or LoraConfig())


def test_the_first_state():
    state, shardings = first_state()
    other, _ = first_state(seed=1)
    assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (0, 0, 0)
    assert jax.tree.structure(state) == jax.tree.structure(shardings)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))
    embeddings = (state.params["embed_tokens"]["embedding"], other.params["embed_tokens"]["embedding"])
    assert np.asarray(embeddings[0]).std() == pytest.approx(0.5, rel=0.3)
    assert not np.array_equal(*embeddings)
    assert state.base is None
    assert state.model_params() is state.params


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("rank", [0, 2])
def test_every_leaf_of_every_optimizer_has_a_sharding(name, rank):
    state, shardings = first_state(name=name, lora=LoraConfig(rank=rank))
    assert jax.tree.structure(state) == jax.tree.structure(shardings)
    assert all(leaf.sharding == wanted for leaf, wanted in zip(*map(jax.tree.leaves, (state, shardings)), strict=True))
    moments = {leaf.shape for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim > 1}
    assert moments == {leaf.shape for leaf in jax.tree.leaves(state.params) if leaf.ndim > 1}


def test_adapters_over_a_frozen_base():
    lora = LoraConfig(rank=2, targets=("q_proj",))
    (plain, _), (state, _) = first_state(), first_state(lora=lora)
    jax.tree.map(np.testing.assert_array_equal, state.base, plain.params)
    adapter = state.params["layers"]["self_attn"]["q_proj"]
    assert {name: leaf.shape for name, leaf in adapter.items()} == {"a": (1, 8, 2), "b": (1, 2, 4)}
    # Nothing but the adapters has moments: two of each, and the counts.
    sizes = [leaf.size for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert sorted(sizes) == [8, 8, 16, 16]
    jax.tree.map(np.testing.assert_array_equal, state.model_params(lora), plain.params)
    moved = state.replace(params=jax.tree.map(lambda leaf: leaf + 1.0, state.params)).model_params(lora)
    kernels = [params["layers"]["self_attn"]["q_proj"]["kernel"] for params in (moved, plain.params)]
    assert np.abs(kernels[0] - kernels[1]).max() > 1


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=2)])
def test_the_abstract_state_is_like_the_first_one(lora):
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    optimizer = make_optimizer(OptimizerConfig(), 100)
    abstract, shardings = abstract_state(Transformer(CONFIG), optimizer, mesh, lora)
    state, same = first_state(lora=lora)
    assert shardings == same
    for wanted, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
        assert (wanted.shape, wanted.dtype, wanted.sharding) == (leaf.shape, leaf.dtype, leaf.sharding)
