"""Weights and KV entries in int8, symmetric: a number is its int8 times a float32 scale that it shares with others.

A kernel has a scale for each output, an embedding table one for each row, a KV buffer one for each token and head.
A product with int8 numbers is scaled afterwards, so that there is never a copy of them in a wider type.
"""

import functools
from collections.abc import Iterable
from typing import Any

import flax
import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from refusion_jax.config import ConfigError

Path = tuple[str, ...]

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
    leaves = sorted(_leaves(params), key=lambda item: item[1].size)
    return quantize_leaves(leaves, is_tied="lm_head" not in params)


def quantize_leaves(leaves: Iterable[tuple[Path, jax.Array]], is_tied: bool) -> dict[str, Any]:
    """What `quantize` makes of parameters that come one after another, so that only one at a time is not in int8 yet.

    Args:
      leaves: paths and arrays; each array that is quantised is deleted before the next is asked for.
      is_tied: whether the embedding table is the unembedding too.

    Raises:
      ConfigError: when they are quantised already.
    """
    made: dict[Path, jax.Array] = {}
    for path, leaf in leaves:
        axis = scale_axis(path, is_tied)
        if axis is None:
            made[path] = leaf
            continue
        if leaf.dtype == jnp.int8:
            raise ConfigError(f"{'/'.join(path)} is int8: the parameters are quantised already; use them as they are.")
        made[path], made[scale_path(path)] = quantize_leaf(leaf, axis)
    return unflatten_dict(made)


def quantize_leaf(leaf: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """A parameter, which is deleted, as int8 numbers and float32 scales, of which those along `axis` share one."""
    traced = isinstance(leaf, jax.core.Tracer)
    sharding = None if traced or not isinstance(leaf.sharding, NamedSharding) else leaf.sharding
    numbers, scale = _quantizer(axis, leaf.ndim, sharding)(leaf)
    if not traced:
        jax.block_until_ready(scale)
        leaf.delete()
    return numbers, scale


def quantized_shardings(params: Any, shardings: Any) -> Any:
    """Where each parameter of `quantize(params)` goes.

    Args:
      params: the parameters, or their shapes.
      shardings: where each of them goes, a pytree like them.
    """
    made = dict(_leaves(shardings))
    for path, leaf in _leaves(params):
        axis = scale_axis(path, is_tied="lm_head" not in params)
        if axis is not None:
            made[scale_path(path)] = scale_sharding(made[path], leaf.ndim, axis)
    return unflatten_dict(made)


def scale_axis(path: Path, is_tied: bool) -> int | None:
    """The axis of a parameter that shares a scale; None for one that is not quantised.

    Args:
      path: of the parameter.
      is_tied: whether the embedding table is the unembedding too.
    """
    return {"kernel": -2, "embedding": -1 if is_tied else None}.get(path[-1])


def scale_path(path: Path) -> Path:
    """Of the scales of the parameter at `path`."""
    return (*path[:-1], "scale")


def scale_sharding(sharding: Sharding, ndim: int, axis: int) -> Sharding:
    """Where the scales of a parameter of `ndim` axes go, of which those along `axis` share one."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    del spec[axis]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def scaled_product(inputs: jax.Array, numbers: jax.Array, scale: jax.Array) -> jax.Array:
    """`inputs @ (numbers * scale)` in float32, of inputs (..., width), int8 (width, outputs) and scales (outputs,)."""
    return jnp.dot(inputs, numbers.astype(inputs.dtype), preferred_element_type=jnp.float32) * scale


def _leaves(tree: Any) -> list[tuple[Path, Any]]:
    return [(tuple(key.key for key in path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _to_int8(values: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Int8 numbers, and the float32 scales without `axis`; what is all zeros has the scale 0.

    An int8 is always a number, and a maximum may pass NaN over: what is not finite makes its scale NaN.
    """
    values = values.astype(jnp.float32)
    finite = jnp.all(jnp.isfinite(values), axis=axis, keepdims=True)
    scales = jnp.where(finite, jnp.max(jnp.abs(values), axis=axis, keepdims=True) / _LARGEST, jnp.nan)
    numbers = jnp.round(values / jnp.where(finite & (scales != 0), scales, 1))
    numbers = jnp.where(finite, jnp.clip(numbers, -_LARGEST, _LARGEST), 0)
    return numbers.astype(jnp.int8), jnp.squeeze(scales, axis)


@functools.cache
def _quantizer(axis: int, ndim: int, sharding: Sharding | None) -> Any:
    shardings = None if sharding is None else (sharding, scale_sharding(sharding, ndim, axis))
    return jax.jit(lambda leaf: _to_int8(leaf, axis), out_shardings=shardings)
