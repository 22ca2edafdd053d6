"""Causal attention in buffer order on TPUs: JAX's splash attention kernel, whose scores never leave the chip.

The kernel's causal mask and segment IDs say what `Visibility.in_buffer_order` promises; blocks of keys behind the
queries are neither read nor computed.
"""

from collections.abc import Callable

import flax
import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from refusion_jax.sharding import per_device

BLOCK_LENGTHS = (512, 256, 128)  # tokens of a block of queries or keys, the longest that divides a row
HEAD_DIMS = 64  # what a head's width must be a multiple of
RESIDUALS = "attention"  # how rematerialisation names the output, and the logarithms kept for its gradient


class CausalRows(flax.struct.PyTreeNode):
    """Rows whose tokens see what is not behind them in their segment.

    Attributes:
      segment: (batch, length) int32.
      interpret: run the kernel in Python, where there is no TPU.
    """

    segment: jax.Array
    interpret: bool = flax.struct.field(pytree_node=False)


def fits(length: int, head_dim: int) -> bool:
    """Whether the kernel can compute rows of `length` tokens, a multiple of 128, and heads of `head_dim`, one of 64."""
    return length % BLOCK_LENGTHS[-1] == 0 and head_dim % HEAD_DIMS == 0


def splash_attention(query: jax.Array, key: jax.Array, value: jax.Array, rows: CausalRows) -> jax.Array:
    """`attend` for causal rows, with a gradient that computes the scores again.

    On a mesh each device computes its rows and heads.

    Args:
      query: (batch, length, heads, head_dim).
      key, value: (batch, kv_heads, length, head_dim).
      rows: the tokens' segments.

    Returns:
      (batch, length, heads * head_dim), in the query's dtype.
    """
    batch, length, num_heads, head_dim = query.shape
    kv_heads = key.shape[1]
    grouped = (query * head_dim**-0.5).reshape(batch, length, kv_heads, num_heads // kv_heads, head_dim)

    def of_device(query: jax.Array, key: jax.Array, value: jax.Array, segment: jax.Array) -> jax.Array:
        one_head = _kernel(query.shape[2], length, rows.interpret)
        of_row = jax.vmap(one_head, in_axes=(0, 0, 0, None))
        return jax.vmap(of_row)(query, key, value, kernel.SegmentIds(segment, segment))

    heads = ("batch", "activation_heads", None, None)
    inputs = (("batch", "activation_heads", None, None, None), heads, heads, ("batch", None))
    mixed = per_device(of_device, inputs, inputs[0])(grouped.transpose(0, 2, 3, 1, 4), key, value, rows.segment)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, length, num_heads * head_dim)


def _kernel(groups: int, length: int, interpret: bool) -> Callable[..., jax.Array]:
    """Attention of the (groups, length, head_dim) queries that share one head of keys (length, head_dim)."""
    block = next(block for block in BLOCK_LENGTHS if length % block == 0)
    sizes = kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    return kernel.make_splash_mqa_single_device(
        masks.MultiHeadMask([masks.CausalMask((length, length))] * groups),
        block_sizes=sizes,
        residual_checkpoint_name=RESIDUALS,
        interpret=interpret,
    )
