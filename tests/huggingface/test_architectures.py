"""Configurations: every architecture, what is refused, and where special tokens, rows and types come from."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from refusion_jax.config import ModelConfig
from refusion_jax.huggingface import CheckpointError, read_model_config
from refusion_jax.huggingface.architectures import stated_mask_token_id

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "eos_token_id": 1,
    "torch_dtype": "float32", "hidden_act": "silu", "rope_theta": 5e5,
}  # fmt: skip
LLAMA = SHAPE | {"model_type": "llama"}
LLADA = {
    "model_type": "llada", "d_model": 32, "n_heads": 4, "n_kv_heads": 4, "n_layers": 2, "mlp_hidden_size": 48,
    "embedding_size": 64, "vocab_size": 60, "max_sequence_length": 256, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    "weight_tying": False, "include_bias": False, "include_qkv_bias": False, "mask_token_id": 62, "eos_token_id": 1,
    "pad_token_id": 1, "layer_norm_type": "rms", "block_type": "llama", "activation_type": "silu", "alibi": False,
    "rope": True, "dtype": "float32", "multi_query_attention": None, "mlp_ratio": 4,
}  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture
def describe(tmp_path):
    """Writes a `config.json` of these values, but those that are Ellipsis, and reads it."""

    def describe(values, tokenizer=None, dtype=None):
        values = {name: value for name, value in values.items() if value is not Ellipsis}
        (tmp_path / "config.json").write_text(json.dumps(values))
        return read_model_config(tmp_path, tokenizer, dtype)

    return describe


def assert_has(config, **fields):
    assert {name: getattr(config, name) for name in fields} == fields


def test_the_recorded_configuration(checkpoint):
    assert read_model_config(checkpoint) == ModelConfig(
        vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, rope_theta=10_000.0, rms_norm_eps=1e-6,
        pad_token_id=0, eos_token_ids=(1,), mask_token_id=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"eos_token_id": [1, 5]}, {"eos_token_ids": (1, 5)}),
        ({"mask_token_id": ..., "pad_token_id": None}, {"mask_token_id": 63, "pad_token_id": 0}),
        ({"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {"rope_theta": 5e5}),
        ({"rope_theta": 1_000_000}, {"rope_theta": 1e6}),
        ({"rope_theta": ..., "rope_parameters": None}, {"rope_theta": 10_000.0}),
        ({"head_dim": ...}, {"head_dim": 128}),  # Qwen3's, whatever the width
        ({"attention_bias": True}, {"biases": ATTENTION, "qk_norm": True}),
        ({"torch_dtype": ..., "dtype": "bfloat16"}, {"dtype": "bfloat16", "param_dtype": "bfloat16"}),
        ({"auto_map": {"AutoModel": "x.py"}, "architectures": ["ReFusion"]}, {"hidden_size": 128}),
        ({"layer_types": ["full_attention"] * 3, "use_sliding_window": False, "sliding_window": 64}, {}),
    ],
)
def test_other_spellings_of_a_configuration(changes, got, write):
    assert_has(read_model_config(write({}, **changes)), **got)


# ---- architectures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({}, {"qk_norm": False, "biases": (), "head_dim": 8, "num_key_value_heads": 2, "tie_word_embeddings": False}),
        ({"head_dim": 16, "num_key_value_heads": ...}, {"head_dim": 16, "num_key_value_heads": 4}),
        ({"attention_bias": True}, {"biases": ATTENTION}),
        ({"attention_bias": True, "mlp_bias": True}, {"biases": ATTENTION + MLP}),
        ({"rope_theta": ...}, {"rope_theta": 10_000.0}),
        ({"model_type": "qwen2"}, {"biases": ATTENTION[:3], "qk_norm": False, "head_dim": 8}),
        (
            {"model_type": "Dream", "mask_token_id": 60},
            {"biases": ATTENTION[:3], "qk_norm": False, "mask_token_id": 60},
        ),
    ],
)
def test_llama_and_qwen2(changes, got, describe):
    assert_has(describe(LLAMA | changes), **got)


def test_llada(describe):
    assert describe(LLADA) == ModelConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8, max_position_embeddings=256, rope_theta=5e5, rms_norm_eps=1e-5,
        pad_token_id=1, eos_token_ids=(1,), mask_token_id=62, qk_norm=False,
    )  # fmt: skip
    assert_has(describe(LLADA | {"include_qkv_bias": True}), biases=ATTENTION[:3])
    assert_has(describe(LLADA | {"n_kv_heads": None, "embedding_size": None, "mask_token_id": 9}), vocab_size=60)
    assert_has(describe(LLADA | {"mlp_hidden_size": None}), intermediate_size=128)
    tied = {"weight_tying": True, "include_bias": True, "bias_for_layer_norm": False}
    assert_has(describe(LLADA | tied), biases=ATTENTION + MLP, tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layer_norm_type": "default"}, "sets layer_norm_type to 'default', which is not supported; only 'rms' is."),
        ({"block_type": "sequential"}, "sets block_type to 'sequential', which is not supported; only 'llama' is."),
        ({"alibi": True}, "sets alibi to True, which is not supported; only False is."),
        ({"rope": False}, "sets rope to False"),
        ({"activation_type": "gelu"}, "sets activation_type to 'gelu'"),
        ({"attention_layer_norm": True}, "sets attention_layer_norm to True"),
        ({"input_emb_norm": True}, "sets input_emb_norm to True"),
        ({"scale_logits": True}, "sets scale_logits to True"),
        ({"block_group_size": 2}, "sets block_group_size to 2"),
        ({"multi_query_attention": True}, "sets multi_query_attention to True"),
        ({"clip_qkv": 8.0}, "sets clip_qkv to 8.0, which is not supported; leave it out."),
        ({"include_bias": True}, "sets include_bias to True, which is not supported; only False is."),
        ({"d_model": ...}, "has no field 'd_model'"),
        ({"embedding_size": 0, "vocab_size": 0}, "describes a vocabulary of 0 tokens; give its size."),
    ],
)
def test_lladas_that_are_refused(changes, sentence, describe):
    with pytest.raises(CheckpointError) as caught:
        describe(LLADA | changes)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "mistral"}, "describes model_type 'mistral'; only qwen3, llama, qwen2, Dream, llada can be"),
        ({"model_type": ...}, "describes model_type None; only qwen3,"),
        ({"model_type": ["qwen3"]}, "describes model_type ['qwen3']; only qwen3,"),
        ({"use_sliding_window": True}, "sets use_sliding_window to True, which is not supported; only False is."),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sets layer_types to 'sliding_attention' for some"),
        ({"hidden_act": "gelu"}, "sets hidden_act to 'gelu', which is not supported; only 'silu' is."),
        (
            {"quantization_config": {"bits": 4}},
            "sets quantization_config to {'bits': 4}, which is not supported; leave",
        ),
        ({"hidden_size": 128.5}, "has hidden_size 128.5; it must be a whole number below 2**31."),
        ({"hidden_size": True}, "has hidden_size True; it must be a whole number below 2**31."),
        ({"hidden_size": 10**30}, "has hidden_size 1000000"),
        ({"vocab_size": "64"}, "has vocab_size '64'; it must be a whole number below 2**31."),
        ({"rms_norm_eps": "1e-6"}, "has rms_norm_eps '1e-6'; it must be a number."),
        ({"tie_word_embeddings": 1}, "has tie_word_embeddings 1; it must be true or false."),
        ({"torch_dtype": 16}, "has torch_dtype 16; it must be a text."),
        ({"torch_dtype": "float64"}, "has dtype 'float64'; load with one of float32, bfloat16, float16, as dtype=..."),
        ({"eos_token_id": "1"}, "has eos_token_id '1'; it must be a whole number below 2**31, or a list of them."),
        ({"eos_token_id": None}, "model.eos_token_ids is empty; a response needs a token that ends it."),
        ({"max_position_embeddings": 2**40}, "it must be a whole number below 2**31."),
        ({"hidden_size": None}, "has null for 'hidden_size', which the model needs; give its value."),
        ({"hidden_size": ...}, "has no field 'hidden_size'."),
        ({"head_dim": 31}, "does not describe a usable model: model.head_dim is 31; RoPE rotates pairs, make it even."),
        ({"num_key_value_heads": 3}, "model.num_attention_heads is 4, not a multiple of"),
        ({"num_attention_heads": 0}, "model.num_attention_heads is 0"),
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
        (b"[" * 100_000, "is not JSON: "),
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


# ---- special tokens, rows and types --------------------------------------------------------------------------------

TOKENIZER = SimpleNamespace(vocab_size=60, pad_token_id=5, mask_token_id=59, eos_token_ids=(7, 8))


def test_special_tokens_come_from_the_first_that_names_them(describe, tmp_path):
    bare = LLAMA | {"eos_token_id": ...}
    assert_has(describe(bare, TOKENIZER), eos_token_ids=(7, 8), pad_token_id=5, mask_token_id=59)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 1], "pad_token_id": 6}))
    assert_has(describe(bare, TOKENIZER), eos_token_ids=(9, 1), pad_token_id=6)
    assert_has(describe(LLAMA, TOKENIZER), eos_token_ids=(1, 9))
    stated = LLAMA | {"mask_token_id": 3, "pad_token_id": 2}
    assert_has(describe(stated, TOKENIZER), mask_token_id=3, pad_token_id=2)
    assert stated_mask_token_id(tmp_path) == 3
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json has eos_token_id 'x'"):
        describe(LLAMA)


def test_the_mask_of_a_published_refusion(describe):
    published = LLAMA | {"vocab_size": 151_671, "model_type": "qwen3", "head_dim": 8}
    published |= {"mask_token_id": 151_670, "bos_token_id": 151_669}
    assert_has(describe(published), mask_token_id=151_670, vocab_size=151_671)
    assert_has(describe(published | {"vocab_size": 151_936, "mask_token_id": None}), mask_token_id=151_670)


@pytest.mark.parametrize(("tokens", "rows"), [(64, 64), (65, 128), (128, 128), (129, 256)])
def test_rows_for_a_tokenizer_with_more_tokens(tokens, rows, describe):
    tokenizer = SimpleNamespace(**vars(TOKENIZER) | {"vocab_size": tokens, "mask_token_id": tokens - 1})
    assert_has(describe(LLAMA, tokenizer), vocab_size=rows, mask_token_id=tokens - 1)


def test_types(write, tensors):
    half = {name: tensor.astype(jnp.bfloat16) for name, tensor in tensors.items()}
    directory = write({"model.safetensors": half}, torch_dtype=...)
    assert_has(read_model_config(directory), dtype="bfloat16", param_dtype="bfloat16")
    assert_has(read_model_config(directory, dtype="float16"), dtype="float16", param_dtype="float16")
    assert_has(read_model_config(write({}, torch_dtype="torch.float16")), dtype="float16", param_dtype="float16")
