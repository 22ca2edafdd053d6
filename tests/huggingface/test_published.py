"""Published models by name and shape, without their memory."""

import json
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import flatten_dict

from refusion_jax.huggingface import read_model_config
from refusion_jax.huggingface.names import stored_name, tensor_specs
from refusion_jax.modeling import Transformer

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02,
    "max_position_embeddings": 40960, "model_type": "qwen3", "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
# hidden, intermediate, layers, heads, tied, parameters
QWEN3_SIZES = {
    "0.6B": (1024, 3072, 28, 16, True, 596_049_920),
    "1.7B": (2048, 6144, 28, 16, True, 1_720_574_976),
    "4B": (2560, 9728, 36, 32, True, 4_022_468_096),
    "8B": (4096, 12288, 36, 32, False, 8_190_735_360),
    "14B": (5120, 17408, 40, 40, False, 14_768_307_200),
    "32B": (5120, 25600, 64, 64, False, 32_762_123_264),
}
DREAM = {
    "architectures": ["DreamModel"], "attention_dropout": 0.0, "auto_map": {"AutoModel": "modeling_dream.DreamModel"},
    "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 3584,
    "initializer_range": 0.02, "intermediate_size": 18944, "mask_token_id": 151666, "max_position_embeddings": 131072,
    "max_window_layers": 28, "model_type": "Dream", "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "pad_token_id": 151643, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.46.2", "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
LLADA = {
    "activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0, "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0, "attention_layer_norm": False, "attention_layer_norm_with_affine": True,
    "auto_map": {"AutoModelForCausalLM": "modeling_llada.LLaDAModelLM"}, "bias_for_layer_norm": False,
    "block_group_size": 1, "block_type": "llama", "d_model": 4096, "embedding_dropout": 0.0, "embedding_size": 126464,
    "eos_token_id": 126081, "flash_attention": False, "include_bias": False, "include_qkv_bias": False,
    "init_cutoff_factor": None, "init_device": "meta", "init_fn": "mitchell", "init_std": 0.02, "input_emb_norm": False,
    "layer_norm_type": "rms", "layer_norm_with_affine": True, "mask_token_id": 126336, "max_sequence_length": 4096,
    "mlp_hidden_size": 12288, "mlp_ratio": 4, "model_type": "llada", "multi_query_attention": None, "n_heads": 32,
    "n_kv_heads": 32, "n_layers": 32, "pad_token_id": 126081, "precision": "amp_bf16", "residual_dropout": 0.0,
    "rms_norm_eps": 1e-05, "rope": True, "rope_full_precision": True, "rope_theta": 500000.0, "scale_logits": False,
    "transformers_version": "4.46.3", "use_cache": False, "vocab_size": 126464, "weight_tying": False,
}  # fmt: skip
QWEN_LAYER = (
    "input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
    "self_attn.o_proj.weight", "post_attention_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)  # fmt: skip
LLADA_LAYER = (
    "attn_norm.weight", "ff_norm.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight", "attn_out.weight",
    "ff_proj.weight", "up_proj.weight", "ff_out.weight",
)  # fmt: skip


def described(values, tmp_path):
    """The model of a config.json, its tensors' shapes by name, checked against the module's abstract parameters."""
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = read_model_config(tmp_path, dtype="bfloat16")
    specs = tensor_specs(config, values["model_type"])
    tokens = jnp.zeros((1, 1), jnp.int32)
    abstract = jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens, tokens)["params"]
    expected = {path: leaf.shape for path, leaf in flatten_dict(nn.unbox(abstract)).items()}
    got = {}
    for spec in specs:
        shape = spec.shape[::-1] if spec.is_transposed else spec.shape
        got[spec.path] = shape if spec.layer is None else (config.num_hidden_layers, *shape)
    assert got == expected
    per_layer = [spec for spec in specs if spec.layer is not None]
    assert len(per_layer) == len({spec.path for spec in per_layer}) * config.num_hidden_layers
    shapes = {stored_name(spec.name, values["model_type"]): spec.shape for spec in specs}
    assert len(shapes) == len(specs)
    return config, shapes


def count(shapes):
    return sum(math.prod(shape) for shape in shapes.values())


@pytest.mark.parametrize("size", QWEN3_SIZES)
def test_qwen3(size, tmp_path):
    hidden, intermediate, layers, heads, tied, parameters = QWEN3_SIZES[size]
    changes = {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "tie_word_embeddings": tied, "max_window_layers": layers,
    }  # fmt: skip
    config, shapes = described(QWEN3 | changes, tmp_path)
    assert count(shapes) == parameters
    layer = (*QWEN_LAYER, "self_attn.q_norm.weight", "self_attn.k_norm.weight")
    names = {f"model.layers.{i}.{name}" for i in range(layers) for name in layer}
    names |= {"model.embed_tokens.weight", "model.norm.weight"} | (set() if tied else {"lm_head.weight"})
    assert set(shapes) == names
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (heads * 128, hidden)
    assert config.mask_token_id == 151_670 and config.eos_token_ids == (151_645,)


def test_dream(tmp_path):
    config, shapes = described(DREAM, tmp_path)
    assert count(shapes) == 7_615_616_512
    layer = (*QWEN_LAYER, *(f"self_attn.{name}.bias" for name in ("q_proj", "k_proj", "v_proj")))
    names = {f"model.layers.{i}.{name}" for i in range(28) for name in layer}
    assert set(shapes) == names | {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert shapes["model.layers.27.self_attn.k_proj.bias"] == (512,)
    assert shapes["model.layers.27.mlp.down_proj.weight"] == (3584, 18944)
    assert config.mask_token_id == 151_666 and config.eos_token_ids == (151_643,)


def test_llada(tmp_path):
    config, shapes = described(LLADA, tmp_path)
    assert count(shapes) == 8_015_581_184
    names = {f"model.transformer.blocks.{i}.{name}" for i in range(32) for name in LLADA_LAYER}
    top = {f"model.transformer.{name}.weight" for name in ("wte", "ln_f", "ff_out")}
    assert set(shapes) == names | top
    assert shapes["model.transformer.blocks.31.ff_out.weight"] == (4096, 12288)
    assert shapes["model.transformer.ff_out.weight"] == (126464, 4096)
    assert config.mask_token_id == 126_336 and config.eos_token_ids == (126_081,)
    assert config.context_length == 4096
