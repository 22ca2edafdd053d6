"""RoPE's settings between `config.json` (`rope_theta`, `rope_scaling` or `rope_parameters`) and `ModelConfig`."""

import math
from typing import Any

from refusion_jax.config import ModelConfig
from refusion_jax.huggingface.errors import CheckpointError
from refusion_jax.huggingface.fields import Fields

_KNOWN = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "truncate", "high_freq_factor", "low_freq_factor", "partial_rotary_factor",
}  # fmt: skip
_DEFAULT_THETA = 10_000.0  # of all architectures here
_TYPES = ("default", "linear", "yarn", "llama3")


def read_rope(fields: Fields) -> dict[str, Any]:
    """The `rope_` fields of a ModelConfig.

    Args:
      fields: those of config.json.

    Raises:
      CheckpointError: for a type or a setting that is not supported, by its name.
    """
    rope = fields.section("rope_scaling") or fields.section("rope_parameters") or Fields({}, fields.where)
    rope_type = rope.text("rope_type", rope.text("type", "default"))
    if rope_type not in _TYPES:
        raise CheckpointError(
            f"{rope.where} sets rope_type to {rope_type!r}, which is not supported; only {', '.join(_TYPES)} are."
        )
    for name, value in rope.values.items():
        if name not in _KNOWN and value is not None:
            raise rope.error(name, "which is not supported; remove it if the model computes without it", "sets")
    for each in (fields, rope):
        each.refuse_unless("partial_rotary_factor", (1.0, 1))
    theta = rope.number("rope_theta", None)
    if theta is None:
        theta = fields.number("rope_theta", _DEFAULT_THETA)
    if rope_type == "default":
        return {"rope_theta": theta}
    if rope_type == "linear":
        return {"rope_theta": theta, "rope_scaling": rope.number("factor")}
    original = fields.integer("original_max_position_embeddings", rope.integer("original_max_position_embeddings", 0))
    common = {"rope_theta": theta, "rope_type": rope_type, "rope_original_length": original}
    if rope_type == "llama3":
        ramp = (rope.number("high_freq_factor"), rope.number("low_freq_factor"))
        return common | {"rope_scaling": rope.number("factor"), "rope_ramp": ramp}
    return common | _read_yarn(fields, rope, original)


def _read_yarn(fields: Fields, rope: Fields, original: int) -> dict[str, Any]:
    rope.refuse_unless("truncate", (True,))
    factor = rope.number("factor", None)
    if factor is None:
        if original <= 0:
            raise CheckpointError(f"{rope.where} has no field 'factor'; it tells how far yarn stretches.")
        factor = fields.integer("max_position_embeddings") / original
    attention_factor = rope.number("attention_factor", None)
    mscale, mscale_all = rope.number("mscale", None), rope.number("mscale_all_dim", None)
    if attention_factor is None and mscale and mscale_all:
        attention_factor = _magnitude(factor, mscale) / _magnitude(factor, mscale_all)
    if attention_factor is not None and not attention_factor > 0:
        raise rope.error("attention_factor", "it must be positive")
    # A zero counts as absent.
    ramp = (rope.number("beta_fast", None) or 32.0, rope.number("beta_slow", None) or 1.0)
    return {"rope_scaling": factor, "rope_ramp": ramp, "rope_attention_factor": attention_factor or 0.0}


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of a config.json."""
    if config.rope_type == "linear":
        scaling = None if config.rope_scaling == 1 else {"rope_type": "linear", "factor": config.rope_scaling}
        return {"rope_theta": config.rope_theta, "rope_scaling": scaling}
    scaling = {
        "rope_type": config.rope_type,
        "factor": config.rope_scaling,
        "original_max_position_embeddings": config.rope_original_length or config.max_position_embeddings,
    }
    if config.rope_type == "llama3":
        high, low = config.rope_ramp or (4.0, 1.0)
        scaling |= {"high_freq_factor": high, "low_freq_factor": low}
    else:
        fast, slow = config.rope_ramp or (32.0, 1.0)
        scaling |= {"beta_fast": fast, "beta_slow": slow}
        if config.rope_attention_factor:
            scaling["attention_factor"] = config.rope_attention_factor
    return {"rope_theta": config.rope_theta, "rope_scaling": scaling}
