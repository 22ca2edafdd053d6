"""Weights and KV entries in int8, symmetric: a number is its int8 times a float32 scale that it shares with others.

A kernel has a scale for each output, an embedding table one for each row, a KV buffer one for each token and head.
A product with int8 numbers is scaled afterwards, so that there is never a copy of them in a wider type.
"""

import functools
from collections.abc import Iterator
from typing import Any

import flax
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from refusion_jax.config import ConfigError

QUANTIZATIONS = ("int8",)
_LARGEST = 127


class Quantized(flax.struct.PyTreeNode):
    """Heads in int8.

    Attributes:
      numbers: (..., length, head_dim) int8. scales: (..., length) float32.
    """

    numbers: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers."""
        return self.numbers.shape


def quantize_heads(heads: jax.Array) -> Quantized:
    """Keys or values (..., length, head_dim) in int8, each head of a token with its own scale."""
    return Quantized(*_to_int8(heads, -1))


def quantize(params: Any) -> Any:
    """A model's parameters with the kernels in int8, and the embedding table too where it also is the unembedding.

    Beside each `kernel` (..., inputs, outputs) and `embedding` (vocabulary, width) in int8 there is a `scale` in
    float32, (..., outputs) or (vocabulary,), split over a mesh as that axis is. All else stays. What is quantised is
    deleted from `params`, the smaller first, so that there is never much more than the parameters.

    Args:
      params: nested dictionaries of arrays, or of what a transformation traces.

    Raises:
      ConfigError: when they are quantised already.
    """
    made = jax.tree.map(lambda leaf: leaf, params)
    for path in sorted(_paths(params), key=lambda path: _get(params, path).size):
        leaf, module = _get(params, path), _get(made, path[:-1])
        if leaf.dtype == jnp.int8:
            raise ConfigError(f"{'/'.join(path)} is int8: the parameters are quantised already; use them as they are.")
        traced = isinstance(leaf, jax.core.Tracer)
        module[path[-1]], module["scale"] = _quantize_leaf(_axis(path), None if traced else leaf.sharding)(leaf)
        if not traced:
            jax.block_until_ready(module["scale"])
            leaf.delete()
    return made


def quantized_shardings(params: Any, shardings: Any) -> Any:
    """Where each parameter of `quantize(params)` goes.

    Args:
      params: the parameters, or their shapes.
      shardings: where each of them goes, a pytree like them.
    """
    made = jax.tree.map(lambda leaf: leaf, shardings)
    for path in _paths(params):
        _get(made, path[:-1])["scale"] = _scale_sharding(_get(shardings, path), _get(params, path).ndim, _axis(path))
    return made


def scaled_product(inputs: jax.Array, numbers: jax.Array, scale: jax.Array) -> jax.Array:
    """`inputs @ (numbers * scale)` in float32, of inputs (..., width), int8 (width, outputs) and scales (outputs,)."""
    return jnp.dot(inputs, numbers.astype(inputs.dtype), preferred_element_type=jnp.float32) * scale


def _paths(params: Any) -> Iterator[tuple[str, ...]]:
    """Of the leaves to quantise."""
    is_tied = "lm_head" not in params
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        names = tuple(key.key for key in path)
        if names[-1] == "kernel" or (names[-1] == "embedding" and is_tied):
            yield names


def _axis(path: tuple[str, ...]) -> int:
    """The axis that shares a scale."""
    return -2 if path[-1] == "kernel" else -1


def _get(tree: Any, path: tuple[str, ...]) -> Any:
    return functools.reduce(lambda node, name: node[name], path, tree)


def _to_int8(values: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Int8 numbers, and the float32 scales without `axis`; what is all zeros has the scale 0."""
    values = values.astype(jnp.float32)
    scales = jnp.max(jnp.abs(values), axis=axis, keepdims=True) / _LARGEST
    numbers = jnp.round(values / jnp.where(scales == 0, 1, scales))
    return jnp.clip(numbers, -_LARGEST, _LARGEST).astype(jnp.int8), jnp.squeeze(scales, axis)


@functools.cache
def _quantize_leaf(axis: int, sharding: Sharding | None) -> Any:
    def quantize_leaf(leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _to_int8(leaf, axis)

    if not isinstance(sharding, NamedSharding):
        return jax.jit(quantize_leaf)

    def on_mesh(leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.jit(quantize_leaf, out_shardings=(sharding, _scale_sharding(sharding, leaf.ndim, axis)))(leaf)

    return on_mesh


def _scale_sharding(sharding: Sharding, ndim: int, axis: int) -> Sharding:
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    del spec[axis]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))
