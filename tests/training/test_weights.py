"""The weights of runs: of plain ones and of adapters, and in int8 without ever being whole on a device."""

import dataclasses
import functools
import gc
from contextlib import closing

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from refusion_jax.config import CheckpointConfig, Config, LoraConfig, MeshConfig, ModelConfig, TrainConfig, to_dict
from refusion_jax.files import write_json
from refusion_jax.huggingface import CheckpointError, export_checkpoint
from refusion_jax.modeling import Transformer, quantization
from refusion_jax.modeling.lora import init_lora, merge
from refusion_jax.modeling.quantization import quantize
from refusion_jax.sharding import make_mesh
from refusion_jax.training.checkpoint import About, Checkpoints
from refusion_jax.training.imported import write_run
from refusion_jax.training.run_directory import CONFIG_NAME, read_run_config
from refusion_jax.training.state import TrainState
from refusion_jax.training.weights import param_shardings, run_params, weights_digest

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODEL = ModelConfig(
    vocab_size=24, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, biases=("q_proj", "k_proj", "v_proj"), qk_norm=False, initializer_range=0.3,
)  # fmt: skip
TIED = dataclasses.replace(MODEL, tie_word_embeddings=True)
LORA = LoraConfig(rank=2, targets=("q_proj", "down_proj"))


@functools.cache
def random_params(config):
    tokens = jnp.zeros((1, 1), jnp.int32)
    return nn.unbox(jax.jit(Transformer(config).init)(jax.random.key(0), tokens, tokens))["params"]


def random_adapters(params):
    adapters = init_lora(jax.random.key(1), params, LORA)
    return jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape) / 8, adapters)


def make_run(directory, config):
    directory.mkdir()
    write_run(directory, config, random_params(config), None)
    return directory


def make_adapted_run(directory, base, config):
    """A run of adapters over what `base` holds."""
    run = Config(model=config, lora=LORA, train=TrainConfig(init_from=str(base)))
    directory.mkdir()
    write_json(directory / CONFIG_NAME, to_dict(run))
    about = About(to_dict(run), "", {}, weights_digest(random_params(config)))
    state = TrainState(jnp.int32(3), random_adapters(random_params(config)), {"count": jnp.int32(0)})
    with closing(Checkpoints(epath.Path(directory), CheckpointConfig(), about)) as checkpoints:
        checkpoints.save(state)
    return directory


@pytest.fixture(scope="module", params=["run", "tied run", "adapters of a run", "adapters of a Hugging Face directory"])
def run(request, tmp_path_factory):
    """A run directory, its model, and the parameters that it stands for."""
    directory, config = tmp_path_factory.mktemp("runs"), TIED if "tied" in request.param else MODEL
    params = random_params(config)
    if "adapters" not in request.param:
        return make_run(directory / "run", config), config, params
    if "Hugging Face" in request.param:
        export_checkpoint(params, config, directory / "base")
    else:
        make_run(directory / "base", config)
    adapted = make_adapted_run(directory / "run", directory / "base", config)
    return adapted, config, merge(params, random_adapters(params), LORA)


def read(directory, **options):
    return run_params(epath.Path(directory), read_run_config(epath.Path(directory)), **options)


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize(("dtype", "on_mesh"), [("float32", False), ("bfloat16", True)])
def test_a_run_in_int8_is_the_run_quantised(run, dtype, on_mesh, monkeypatch):
    directory, config, expected = run
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=1), jax.devices()[:1])
    options = {"dtype": dtype, "shardings": param_shardings(config, mesh) if on_mesh else None}
    plain = read(directory, **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b.astype(dtype), rtol=1e-6, atol=1e-6), plain, expected)
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(plain))
    plain, seen = quantize(plain), []
    gc.collect()
    before, round_leaf = live_bytes(), quantization.quantize_leaf

    def quantize_leaf(*arguments):
        seen.append(live_bytes() - before)
        return round_leaf(*arguments)

    monkeypatch.setattr(quantization, "quantize_leaf", quantize_leaf)
    int8 = read(directory, quantize="int8", **options)
    jax.tree.map(np.testing.assert_array_equal, int8, plain)
    for one, other in zip(*map(jax.tree.leaves, (int8, plain)), strict=True):
        assert (one.dtype, one.sharding) == (other.dtype, other.sharding)
    # All that is in int8, and one parameter that is not.
    assert largest <= max(seen) <= largest + sum(leaf.nbytes for leaf in jax.tree.leaves(int8))


@pytest.mark.parametrize("quantized", [None, "int8"])
def test_adapters_of_other_weights_are_refused(quantized, tmp_path):
    other = random_params(MODEL) | {"norm": {"scale": jnp.full(32, 1.5)}}
    export_checkpoint(other, MODEL, tmp_path / "base")
    directory = make_adapted_run(tmp_path / "run", tmp_path / "base", MODEL)
    with pytest.raises(CheckpointError, match=r"adapts other weights than train\.init_from now holds; restore those"):
        read(directory, quantize=quantized)


@pytest.mark.parametrize("quantized", [None, "int8"])
def test_a_checkpoint_of_another_model_is_refused(quantized, tmp_path):
    directory = make_run(tmp_path / "run", MODEL)
    config = read_run_config(epath.Path(directory))
    other = dataclasses.replace(config, model=dataclasses.replace(MODEL, num_hidden_layers=2))
    with pytest.raises(CheckpointError, match=r"^Checkpoint 0 of .*: layers/\S+ has shape \(3, .*\), not \(2, "):
        run_params(epath.Path(directory), other, quantize=quantized)
