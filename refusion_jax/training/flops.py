"""How much arithmetic training takes, and how much of what a chip can do that is."""

from refusion_jax.config import Config, ModelConfig

# Dense bfloat16 FLOP/s of one chip, as its maker states them, by a part of JAX's name for the device.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6": 918e12,
    "TPU7x": 2307e12,
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Peak FLOP/s of a chip by JAX's name for it; None where it is not known."""
    fitting = [name for name in PEAK_FLOPS if name in device_kind]
    return PEAK_FLOPS[max(fitting, key=len)] if fitting else None


def training_flops_per_token(config: Config) -> int:
    """FLOPs of a run's training step per token of its rows; block diffusion has everything twice."""
    copies = 2 if config.train.objective == "block_diffusion" else 1
    return copies * flops_per_token(config.model, copies * config.data.max_length)


def flops_per_token(model: ModelConfig, row_length: int) -> int:
    """FLOPs of forward and backward per token: three times those of the forward, so 6 for each parameter of a matrix
    product, the output embedding's included, and `12 * layers * heads * head_dim * row_length` for attention.
    """
    return 3 * forward_flops_per_token(model, row_length)


def forward_flops_per_token(model: ModelConfig, keys: int) -> int:
    """FLOPs of a forward per token: of all layers, and 2 for each number of the output embedding."""
    return encoding_flops_per_token(model, keys) + 2 * model.hidden_size * model.vocab_size


def encoding_flops_per_token(model: ModelConfig, keys: int) -> int:
    """FLOPs of all layers per token: 2 for each parameter of a matrix product, and
    `4 * layers * heads * head_dim * keys` for attention to so many keys, all of which it computes, seen or not.
    """
    query_width, kv_width = (n * model.head_dim for n in (model.num_attention_heads, model.num_key_value_heads))
    attention = 2 * model.hidden_size * (query_width + kv_width)
    mlp = 3 * model.hidden_size * model.intermediate_size
    return 2 * model.num_hidden_layers * (attention + mlp) + 4 * model.num_hidden_layers * query_width * keys
