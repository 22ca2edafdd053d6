"""Small decoders of `transformers` with random weights, and what they compute; needs PyTorch.

    python tests/parity/transformers_models.py

writes those of `RECORDED` with their logits to tests/data/huggingface, for tests that run without PyTorch.
"""

import shutil
from pathlib import Path

import numpy as np

RECORDINGS = Path(__file__).parents[1] / "data" / "huggingface"
CASE_NAME = "case.npz"

_SMALL = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "eos_token_id": 1, "pad_token_id": 0,
    "bos_token_id": 2,
}  # fmt: skip


def _rope(kind, theta=1e6, **settings):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta} | settings}


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

# Name -> (class of transformers' configuration, what differs from `_SMALL`).
MODELS = {
    "qwen3": ("Qwen3Config", {}),
    "qwen3-tied": ("Qwen3Config", {"tie_word_embeddings": True, "num_hidden_layers": 1} | _rope("default")),
    "qwen3-wide-heads": ("Qwen3Config", {"head_dim": 24, "num_key_value_heads": 1, "num_hidden_layers": 3}),
    "qwen3-all-kv-heads": ("Qwen3Config", {"num_key_value_heads": 4, "num_hidden_layers": 4} | _rope("default")),
    "qwen3-bias": ("Qwen3Config", {"attention_bias": True}),
    "qwen3-linear": ("Qwen3Config", {"head_dim": 16} | _rope("linear", factor=4.0)),
    "qwen3-yarn": (
        "Qwen3Config",
        {"head_dim": 32} | _rope("yarn", 1e4, factor=4.0, original_max_position_embeddings=32),
    ),
    "qwen3-yarn-ramp": (
        "Qwen3Config",
        {"head_dim": 64, "tie_word_embeddings": True}
        | _rope("yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=16.0, beta_slow=2.0),
    ),
    "qwen3-yarn-mscale": (
        "Qwen3Config",
        {"head_dim": 32}
        | _rope("yarn", factor=8.0, original_max_position_embeddings=32, mscale=1.5, mscale_all_dim=0.5),
    ),
    "qwen3-yarn-factor": (
        "Qwen3Config",
        {"head_dim": 32} | _rope("yarn", factor=2.0, original_max_position_embeddings=64, attention_factor=1.25),
    ),
    "llama": ("LlamaConfig", {"num_key_value_heads": 1}),
    "llama3": ("LlamaConfig", {"head_dim": 32, "tie_word_embeddings": True} | _rope("llama3", 5e5, **_LLAMA3)),
    "llama-bias": ("LlamaConfig", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2Config", {"num_hidden_layers": 3} | _rope("default")),
    "qwen2-tied": ("Qwen2Config", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
}  # fmt: skip
RECORDED = ("qwen3-tied", "qwen3-wide-heads", "qwen3-yarn", "llama3", "qwen2")
NUM_SHARDS = 3


def make_model(name):
    """The model of that name, eager and in float32; biases and norms are random too."""
    import torch
    import transformers

    kind, changes = MODELS[name]
    settings = _SMALL | changes
    if kind == "Qwen2Config":  # it has no head size of its own
        del settings["head_dim"]
    config = getattr(transformers, kind)(**settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return model


def save_model(model, directory, shards=1):
    """Writes config and weights, in about so many files."""
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    model.save_pretrained(directory, max_shard_size=size // shards + 1)


def compute_logits(model, tokens, position_ids):
    """Logits under a causal mask in buffer order, (batch, length, vocabulary)."""
    import torch

    length = tokens.shape[1]
    hidden = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
    # A mask of its own: without one, position IDs that jump are taken for several packed texts.
    mask = hidden.expand(len(tokens), 1, length, length)
    with torch.no_grad():
        inputs = {"input_ids": torch.tensor(tokens), "position_ids": torch.tensor(position_ids)}
        return model(**inputs, attention_mask=mask, use_cache=False).logits.numpy()


def generate_greedily(model, prompt, length, eos_token_ids):
    """The tokens that follow a prompt, up to and including the first EOS or so many."""
    import torch

    tokens = torch.tensor([prompt])
    mask = torch.ones_like(tokens)
    ends = {"eos_token_id": list(eos_token_ids), "pad_token_id": eos_token_ids[0], "max_new_tokens": length}
    return model.generate(tokens, attention_mask=mask, do_sample=False, **ends)[0, len(prompt) :].tolist()


def draw_inputs(config, seed=0, batch=2, length=24):
    """Tokens and position IDs: sorted ones, and ones drawn from all positions in any order."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, (batch, length))
    in_order = np.broadcast_to(np.arange(length), tokens.shape).copy()
    mixed = np.stack([rng.permutation(config.max_position_embeddings)[:length] for _ in range(batch)])
    return tokens, {"sorted": in_order, "permuted": mixed}


def record(name, directory):
    """Writes a model and what it computes to `directory`/NAME."""
    model, target = make_model(name), directory / name
    shutil.rmtree(target, ignore_errors=True)
    save_model(model, target, NUM_SHARDS if name == "qwen3-wide-heads" else 1)
    tokens, positions = draw_inputs(model.config)
    arrays = {"tokens": tokens}
    for order, position_ids in positions.items():
        arrays |= {
            f"{order}.position_ids": position_ids,
            f"{order}.logits": compute_logits(model, tokens, position_ids),
        }
    np.savez_compressed(target / CASE_NAME, **arrays)


if __name__ == "__main__":
    for recorded in RECORDED:
        record(recorded, RECORDINGS)
