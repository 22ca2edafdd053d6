"""Which tensors a checkpoint has: their names and shapes, and where each goes in the parameter tree.

Names are without the leading `model.`, which only some checkpoints have. A linear layer's weight is (outputs, inputs)
in the file, and a kernel of (inputs, outputs) here.
"""

from typing import Any, NamedTuple

from refusion_jax.config import ModelConfig

PARAM_PATHS: dict[str, tuple[str, ...]] = {
    "embed_tokens.weight": ("embed_tokens", "embedding"),
    "norm.weight": ("norm", "scale"),
    "lm_head.weight": ("lm_head", "kernel"),
}
LAYER_PARAM_PATHS: dict[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("input_layernorm", "scale"),
    "post_attention_layernorm.weight": ("post_attention_layernorm", "scale"),
    **{f"self_attn.{name}.weight": ("self_attn", name, "kernel") for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{f"self_attn.{name}.weight": ("self_attn", name, "scale") for name in ("q_norm", "k_norm")},
    **{f"mlp.{name}.weight": ("mlp", name, "kernel") for name in ("gate_proj", "up_proj", "down_proj")},
}
# LLaDA's names of modules, by those of the others.
_LLADA_NAMES = {
    "embed_tokens": "transformer.wte",
    "norm": "transformer.ln_f",
    "lm_head": "transformer.ff_out",
    "layers": "transformer.blocks",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
_VOCABULARY = ("embed_tokens", "lm_head")


class TensorSpec(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
      name: in the file, without the leading `model.`.
      path: of the parameter it belongs to.
      layer: its index along the parameter's first axis, or None where the parameter has no layers.
      shape: in the file.
    """

    name: str
    path: tuple[str, ...]
    layer: int | None
    shape: tuple[int, ...]

    @property
    def is_transposed(self) -> bool:
        """Whether the parameter has the axes in the opposite order."""
        return self.path[-1] == "kernel"

    @property
    def has_vocabulary(self) -> bool:
        """Whether the first axis is the vocabulary, of which a model may take fewer or more rows."""
        return self.path[0] in _VOCABULARY


def tensor_specs(config: ModelConfig, model_type: str) -> list[TensorSpec]:
    """All tensors of a model, in the order of its computation.

    Args:
      config: the model.
      model_type: that of config.json, which decides the names.
    """

    def spec(name: str, path: tuple[str, ...], layer: int | None = None) -> TensorSpec:
        module, _, kind = name.rpartition(".")
        names = _LLADA_NAMES if model_type == "llada" else {}
        full = names.get(module, module)
        if layer is not None:
            full = f"{names.get('layers', 'layers')}.{layer}.{full}"
            path = ("layers", *path)
        return TensorSpec(f"{full}.{kind}", path, layer, _shape(path, config))

    top = [spec(name, path) for name, path in PARAM_PATHS.items()]
    if config.tie_word_embeddings:
        top.pop()
    layer_paths = _layer_paths(config)
    layers = [spec(name, path, i) for i in range(config.num_hidden_layers) for name, path in layer_paths.items()]
    return [top[0], *layers, *top[1:]]


def _layer_paths(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    paths = {name: path for name, path in LAYER_PARAM_PATHS.items() if config.qk_norm or "_norm." not in name}
    for path in LAYER_PARAM_PATHS.values():
        if path[-2] in config.biases:
            paths[f"{path[0]}.{path[1]}.bias"] = (*path[:-1], "bias")
    return paths


def _shape(path: tuple[str, ...], c: ModelConfig) -> tuple[int, ...]:
    heads, kv_heads = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (c.vocab_size, c.hidden_size), "lm_head": (c.vocab_size, c.hidden_size),
        "q_proj": (heads, c.hidden_size), "k_proj": (kv_heads, c.hidden_size), "v_proj": (kv_heads, c.hidden_size),
        "o_proj": (c.hidden_size, heads), "q_norm": (c.head_dim,), "k_norm": (c.head_dim,),
        "gate_proj": (c.intermediate_size, c.hidden_size), "up_proj": (c.intermediate_size, c.hidden_size),
        "down_proj": (c.hidden_size, c.intermediate_size),
    }  # fmt: skip
    shape = shapes.get(path[-2], (c.hidden_size,))
    return shape[:1] if path[-1] == "bias" else shape


def stored_name(name: str, model_type: str) -> str:
    """The name with the leading `model.`, as those who publish checkpoints write it."""
    return name if name == "lm_head.weight" and model_type != "llada" else f"model.{name}"


def get(tree: Any, path: tuple[str, ...]) -> Any:
    """A leaf of a nested dictionary."""
    for key in path:
        tree = tree[key]
    return tree
