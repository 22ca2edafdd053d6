"""Hugging Face directories: the recorded checkpoint in several guises, and what is said about unusable ones."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file, save_file

from refusion_jax.config import ModelConfig
from refusion_jax.huggingface import CheckpointError, read_model_config, read_params

CHECKPOINT = Path(__file__).parent / "data" / "reference" / "checkpoint"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def tensors():
    return load_file(CHECKPOINT / WEIGHTS)


@pytest.fixture(scope="module")
def expected():
    return read_params(CHECKPOINT, read_model_config(CHECKPOINT))


@pytest.fixture
def write(tmp_path):
    """Writes a directory of changed `config.json` values (None removes one) and the given weight files."""

    def write(files, **changes):
        values = json.loads((CHECKPOINT / "config.json").read_text()) | changes
        values = {name: value for name, value in values.items() if value is not Ellipsis}
        (tmp_path / "config.json").write_text(json.dumps(values))
        for name, content in files.items():
            save_file(content, tmp_path / name)
        return tmp_path

    return write


def read(directory):
    return read_params(directory, read_model_config(directory))


def assert_equal(got, expected, **tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **(tolerance or {"rtol": 0})), got, expected)


def test_the_recorded_configuration():
    assert read_model_config(CHECKPOINT) == ModelConfig(
        vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, rope_theta=10_000.0, rms_norm_eps=1e-6,
        pad_token_id=0, eos_token_ids=(1,), mask_token_id=2,
    )  # fmt: skip


def test_tensors_become_stacked_transposed_parameters(tensors, expected):
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(expected))
    layers = expected["layers"]
    for layer in range(3):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            kernel = layers["self_attn"][name]["kernel"][layer]
            assert np.array_equal(kernel, tensors[f"{prefix}.self_attn.{name}.weight"].T)
        assert np.array_equal(
            layers["self_attn"]["k_norm"]["scale"][layer], tensors[f"{prefix}.self_attn.k_norm.weight"]
        )
        assert np.array_equal(layers["mlp"]["up_proj"]["kernel"][layer], tensors[f"{prefix}.mlp.up_proj.weight"].T)
    assert np.array_equal(expected["embed_tokens"]["embedding"], tensors["model.embed_tokens.weight"])
    assert np.array_equal(expected["lm_head"]["kernel"], tensors["lm_head.weight"].T)
    count = sum(leaf.size for leaf in jax.tree.leaves(expected))
    assert count == sum(tensor.size for tensor in tensors.values())


def test_sharded_files(tensors, expected, write):
    names = sorted(tensors)
    shards = {
        "model-00001-of-00002.safetensors": {name: tensors[name] for name in names[::2]},
        "model-00002-of-00002.safetensors": {name: tensors[name] for name in names[1::2]},
    }
    directory = write(shards)
    weight_map = {name: file for file, content in shards.items() for name in content}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_equal(read(directory), expected)


def test_names_without_the_model_prefix(tensors, expected, write):
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert_equal(read(write({WEIGHTS: bare})), expected)


def test_tied_checkpoint(tensors, expected, write):
    tied = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    got = read(write({WEIGHTS: tied}, tie_word_embeddings=True))
    assert_equal(got, {name: part for name, part in expected.items() if name != "lm_head"})
    # An output embedding in the file of a tied model is the embedding once more.
    assert_equal(read(write({WEIGHTS: tensors}, tie_word_embeddings=True)), got)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 2**-8), (jnp.float16, 2**-10)])
def test_half_precision_tensors(dtype, tolerance, tensors, expected, write):
    got = read(write({WEIGHTS: {name: tensor.astype(dtype) for name, tensor in tensors.items()}}))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(got))
    assert_equal(got, expected, rtol=tolerance, atol=1e-6)
    assert np.array_equal(got["norm"]["scale"], tensors["model.norm.weight"].astype(dtype).astype(jnp.float32))


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"eos_token_id": [1, 5]}, {"eos_token_ids": (1, 5)}),
        ({"mask_token_id": ..., "pad_token_id": None}, {"mask_token_id": 63, "pad_token_id": 0}),
        ({"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {"rope_theta": 5e5}),
        ({"rope_theta": 1_000_000}, {"rope_theta": 1e6}),
    ],
)
def test_other_spellings_of_a_configuration(changes, got, write):
    config = read_model_config(write({}, **changes))
    assert {name: getattr(config, name) for name in got} == got


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "llama"}, "describes model_type 'llama'; only 'qwen3' can be loaded."),
        ({"model_type": ...}, "describes model_type None; only 'qwen3' can be loaded."),
        ({"attention_bias": True}, "sets attention_bias to True, which is not supported; only False is."),
        ({"use_sliding_window": True}, "sets use_sliding_window to True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "sets rope_scaling to {'rope_type': 'yarn'"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}}, "sets rope_parameters to {"),
        ({"hidden_act": "gelu"}, "sets hidden_act to 'gelu', which is not supported; only 'silu' is."),
        ({"hidden_size": 128.5}, "does not describe a usable model: hidden_size is 128.5; it must be of type int."),
        ({"vocab_size": "64"}, "vocab_size is '64'; it must be of type int."),
        ({"eos_token_id": None}, "eos_token_ids is None; it must be of type int."),
        ({"rope_theta": ..., "rope_parameters": None}, "has no field 'rope_theta'."),
        ({"hidden_size": ...}, "has no field 'hidden_size'."),
        ({"head_dim": 31}, "does not describe a usable model: model.head_dim is 31; RoPE rotates pairs, make it even."),
        ({"num_key_value_heads": 3}, "model.num_attention_heads is 4, not a multiple of"),
        ({"eos_token_id": 64}, "model.eos_token_ids is 64, outside the vocabulary of 64 tokens."),
    ],
)
def test_configurations_that_cannot_be_used(changes, sentence, write):
    directory = write({}, **changes)
    with pytest.raises(CheckpointError) as caught:
        read_model_config(directory)
    assert str(caught.value).startswith(str(directory / "config.json"))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{\n  'model_type'", r"is not JSON \(line 2\)"),
        (b"", r"is not JSON \(line 1\)"),
        (b'{"a": "\xff"}', "is not JSON: "),
        (b"[]", "is not a JSON object"),
    ],
)
def test_a_malformed_configuration(content, sentence, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.json {sentence}"):
        read_model_config(tmp_path)


def test_a_missing_configuration(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is missing; a Hugging Face directory has a config\.json"):
        read_model_config(tmp_path)


def test_missing_and_misshapen_tensors_are_named_with_their_shapes(tensors, write):
    broken = {name: tensor for name, tensor in tensors.items() if name != "model.layers.1.self_attn.q_norm.weight"}
    broken["model.layers.2.mlp.down_proj.weight"] = jnp.zeros((384, 128))
    directory = write({WEIGHTS: broken})
    with pytest.raises(CheckpointError) as caught:
        read(directory)
    assert str(caught.value) == (
        f"{directory} does not match its config.json: "
        "layers.1.self_attn.q_norm.weight is missing (expected shape (32,)); "
        "model.layers.2.mlp.down_proj.weight has shape (384, 128), not (128, 384)."
    )


def test_every_shape_is_checked(tensors, write):
    """Transposed, or with one element more, no tensor passes."""
    odd = {name: jnp.zeros([size + 1 for size in tensor.shape]) for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=rf"and {len(tensors) - 8} more\.$"):
        read(write({WEIGHTS: odd}))


def test_a_missing_shard(tensors, write):
    names = sorted(tensors)
    with pytest.raises(CheckpointError, match="is missing"):
        read(write({"model-00001-of-00002.safetensors": {name: tensors[name] for name in names[::2]}}))


def test_a_directory_without_weights(write):
    directory = write({})
    (directory / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file; weights in other formats"):
        read(directory)


def test_a_truncated_file(tmp_path):
    shutil.copy(CHECKPOINT / "config.json", tmp_path)
    (tmp_path / WEIGHTS).write_bytes((CHECKPOINT / WEIGHTS).read_bytes()[:1_000_000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable safetensors file"):
        read(tmp_path)
