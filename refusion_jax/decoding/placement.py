"""Where a decode's arrays are on a mesh: rows over `batch`, key heads over `tensor`, and each device writes its own.

Between compiled calls only the KV buffer is split: the rest is small, and the host reads it.
"""

from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from refusion_jax.decoding.kv_cache import commit, write_prompts
from refusion_jax.modeling import KVCache
from refusion_jax.sharding import ROW_AXES, RULES, constrain, constrain_whole

_BUFFER = (None, "batch", "activation_heads")  # of (layers, batch, kv_heads, ...)


def split_rows(tree: Any) -> Any:
    """Asks the compiler to keep arrays (batch, ...) split along their rows."""
    return jax.tree.map(lambda leaf: constrain(leaf, "batch", *[None] * (leaf.ndim - 1)), tree)


def split_state(state: Any) -> Any:
    """A `DecodeState` as the loop has it: everything split along its rows, the buffer along its heads, too."""
    return split_rows(state.replace(cache=None)).replace(cache=_split_buffer(state.cache))


def hand_over(state: Any) -> Any:
    """A `DecodeState` as it is between two calls: the buffer split, all else whole on every device."""
    return constrain_whole(state.replace(cache=None)).replace(cache=_split_buffer(state.cache))


def split_heads(cache: KVCache) -> KVCache:
    """A buffer that rows share: on every device the heads that it computes."""
    return jax.tree.map(lambda leaf: constrain(leaf, *_shared_axes(leaf)), cache)


def buffer_shardings(cache: KVCache, mesh: Mesh) -> KVCache:
    """The sharding of each array of a buffer between two calls."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, _buffer_spec(leaf)), cache)


def commit_own(cache: KVCache, kv: tuple[jax.Array, jax.Array], counts: jax.Array) -> KVCache:
    """`commit`, each device to the rows and heads that it has: the partitioner would gather the buffer."""
    specs = jax.tree.map(_buffer_spec, cache)
    inputs = (specs, jax.tree.map(_buffer_spec, kv), PartitionSpec(ROW_AXES))
    return jax.shard_map(commit, in_specs=inputs, out_specs=specs, check_vma=False)(cache, kv, counts)


def commit_anywhere(cache: KVCache, kv: tuple[jax.Array, jax.Array], counts: jax.Array) -> KVCache:
    """`commit_own` on a mesh, `commit` where there is none."""
    write = commit if jax.sharding.get_abstract_mesh().empty else commit_own
    return write(cache, kv, counts)


def write_own_prompts(cache: KVCache, kv: tuple[jax.Array, jax.Array], rows: jax.Array, lengths: jax.Array) -> KVCache:
    """`write_prompts`, each device to the rows and heads that it has.

    Args:
      rows: (prompts,) int32. The prompts are split like the rows, so each must be in the share of the row it takes.
    """

    def write(cache: KVCache, kv: tuple[jax.Array, jax.Array], rows: jax.Array, lengths: jax.Array) -> KVCache:
        first = jax.lax.axis_index(ROW_AXES) * len(cache.lengths)
        return write_prompts(cache, kv, rows - first, lengths)

    specs, of_rows = jax.tree.map(_buffer_spec, cache), PartitionSpec(ROW_AXES)
    inputs = (specs, jax.tree.map(_buffer_spec, kv), of_rows, of_rows)
    return jax.shard_map(write, in_specs=inputs, out_specs=specs, check_vma=False)(cache, kv, rows, lengths)


def _buffer_axes(leaf: Any) -> tuple[str | None, ...]:
    return ("batch",) if leaf.ndim == 1 else (*_BUFFER, *[None] * (leaf.ndim - len(_BUFFER)))


def _shared_axes(leaf: Any) -> tuple[str | None, ...]:
    return tuple(None if axis == "batch" else axis for axis in _buffer_axes(leaf))


def _buffer_spec(leaf: Any) -> PartitionSpec:
    return nn.logical_to_mesh_axes(_buffer_axes(leaf), RULES)


def _split_buffer(cache: KVCache) -> KVCache:
    return jax.tree.map(lambda leaf: constrain(leaf, *_buffer_axes(leaf)), cache)
