"""Low-rank adapters (LoRA): `kernel + alpha / rank * a @ b`, with the kernels frozen and only `a` and `b` trained.

Adapters are a tree of their own beside the parameters, `layers/MODULE/PROJECTION/{a,b}`, stacked over the layers on
axis 0 like the kernels. The model reads them from the collection "lora": `module.apply(variables(...), ...)` adds
`(inputs @ a) @ b` to each adapted product, so no kernel-sized gradient is ever made.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from refusion_jax.config import ConfigError, LoraConfig

_Path = tuple[str, ...]


def init_lora(key: jax.Array, params: Any, config: LoraConfig) -> Any:
    """Adapters that change nothing yet: `a` normal with variance 1 / inputs, `b` zero.

    Args:
      key: a random key.
      params: the model's parameters, or their shapes; boxed with logical axes, the adapters are too.
      config: rank, targets, type.

    Returns:
      `layers/MODULE/PROJECTION/a`: (layers, inputs, rank), `.../b`: (layers, rank, outputs).

    Raises:
      ConfigError: for a rank of 0, or a target the parameters do not have.
    """
    if not config.rank:
        raise ConfigError("lora.rank is 0, which is no adapter; give at least 1.")
    kernels = _adapted(params, config)
    adapters: dict[_Path, Any] = {}
    for number, (path, kernel) in enumerate(kernels.items()):
        value = nn.unbox(kernel)
        layers, inputs, outputs = value.shape
        draws = jax.random.normal(jax.random.fold_in(key, number), (layers, inputs, config.rank)) / jnp.sqrt(inputs)
        a, b = draws.astype(config.dtype), jnp.zeros((layers, config.rank, outputs), config.dtype)
        if isinstance(kernel, nn.Partitioned):
            first, into, out_of = kernel.names
            a = kernel.replace(value=a, names=(first, into, None))
            b = kernel.replace(value=b, names=(first, None, out_of))
        adapters |= {(*path, "a"): a, (*path, "b"): b}
    return unflatten_dict(adapters)


def variables(params: Any, lora: Any, config: LoraConfig) -> dict[str, Any]:
    """What `module.apply` takes to compute with base parameters and adapters."""
    scale = config.alpha / config.rank
    scaled = {path: leaf * scale if path[-1] == "b" else leaf for path, leaf in flatten_dict(lora).items()}
    return {"params": params, "lora": unflatten_dict(scaled)}


def merge(params: Any, lora: Any, config: LoraConfig) -> Any:
    """Parameters of a plain model that computes the same: each product added to its kernel, in float32.

    Args:
      params: the base parameters, which stay as they are.
      lora: adapters from `init_lora`, trained.
      config: the settings they were trained with.

    Raises:
      ConfigError: when the adapters are not those of `config`, or do not fit the parameters.
    """
    adapters = flatten_dict(lora)
    merged = flatten_dict(params)
    kernels = _adapted(params, config)
    if {path[:-1] for path in adapters} != set(kernels):
        found = sorted({path[-2] for path in adapters})
        raise ConfigError(f"lora.targets is {config.targets}, but the adapters are for {', '.join(found)}.")
    for path, kernel in kernels.items():
        a, b = (adapters[*path, name] for name in ("a", "b"))
        if (*a.shape[:2], b.shape[2]) != kernel.shape or a.shape[2] != config.rank or b.shape[1] != config.rank:
            raise ConfigError(
                f"The adapter of {path[-1]} is {a.shape} by {b.shape}; with lora.rank {config.rank} the kernel, "
                f"{kernel.shape}, needs another."
            )
        merged[*path, "kernel"] = merge_kernel(kernel, a, b, config)
    return unflatten_dict(merged)


def merge_kernel(kernel: jax.Array, a: jax.Array, b: jax.Array, config: LoraConfig) -> jax.Array:
    """A kernel (..., inputs, outputs) with the product of its adapter added in float32, in its own type."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    product = jnp.einsum("...ir,...ro->...io", a, b, precision=jax.lax.Precision.HIGHEST)
    return (kernel.astype(jnp.float32) + config.alpha / config.rank * product).astype(kernel.dtype)


def _adapted(params: Any, config: LoraConfig) -> dict[_Path, Any]:
    """The kernels of the targets, by the path of their module."""
    kernels = {
        path[:-1]: leaf for path, leaf in flatten_dict(params).items() if path[0] == "layers" and path[-1] == "kernel"
    }
    known = {path[-1] for path in kernels}
    for name in config.targets:
        if name not in known:
            raise ConfigError(f"lora.targets names {name!r}, which the model lacks; known: {', '.join(sorted(known))}.")
    return {path: leaf for path, leaf in kernels.items() if path[-1] in config.targets}
