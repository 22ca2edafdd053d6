"""Causal attention in buffer order on GPUs: cuDNN's flash attention, as `jax.nn.dot_product_attention` calls it."""

from typing import Literal

import flax
import jax

from refusion_jax.modeling.attention import Visibility
from refusion_jax.sharding import per_device

DTYPES = ("bfloat16", "float16")
MOST_HEAD_DIM = 128
LEAST_CAPABILITY = 8  # Ampere


class MaskedRows(flax.struct.PyTreeNode):
    """Rows whose tokens see what is not behind them and `mask` lets them: (batch, 1, length, length) bool."""

    mask: jax.Array

    @classmethod
    def of(cls, visibility: Visibility) -> "MaskedRows":
        """The mask says who is in the same segment; causal is the kernel itself."""
        segment = visibility.segment
        return cls(mask=segment[:, None, :, None] == segment[:, None, None, :])


def fits(length: int, head_dim: int, dtype: str) -> bool:
    """Whether cuDNN can compute rows of `length` tokens: 16-bit numbers, an even length, heads of 8 to 128 by 8."""
    return dtype in DTYPES and length % 2 == 0 and head_dim % 8 == 0 and head_dim <= MOST_HEAD_DIM


def is_capable() -> bool:
    """Whether this machine's GPU is an NVIDIA one that flash attention runs on."""
    generation = str(getattr(jax.local_devices()[0], "compute_capability", "")).split(".")[0]
    return generation.isdigit() and int(generation) >= LEAST_CAPABILITY


def cudnn_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rows: MaskedRows,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """`attend` for causal rows, with a gradient that computes the scores again.

    On a mesh each device computes its rows and heads.

    Args:
      query: (batch, length, heads, head_dim).
      key, value: (batch, kv_heads, length, head_dim).
      rows: what the tokens see.
      implementation: "cudnn", or "xla" for the same in plain operations.

    Returns:
      (batch, length, heads * head_dim), in the query's dtype.
    """
    batch, length, num_heads, head_dim = query.shape

    def of_device(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
        key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
        return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True, implementation=implementation)

    queries, keys = ("batch", None, "activation_heads", None), ("batch", "activation_heads", None, None)
    mixed = per_device(of_device, (queries, keys, keys, ("batch", None, None, None)), queries)
    return mixed(query, key, value, rows.mask).reshape(batch, length, num_heads * head_dim)
