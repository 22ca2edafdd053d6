"""One table decides all sharding: logical axis name -> mesh axis.

Model code names logical axes only. Parameters are split over `fsdp` along their `embed` axis (each device keeps a share
and gathers a layer when it needs it); activations are split over both axes along the batch. Constraints inside a jitted
function take effect under `jax.set_mesh(mesh)`.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from refusion_jax.config import ConfigError, MeshConfig

AXES = ("data", "fsdp")

RULES: tuple[tuple[str, tuple[str, ...] | str | None], ...] = (
    ("batch", ("data", "fsdp")),  # rows of a batch, and the flattened (row, position) axis
    ("embed", "fsdp"),  # the residual width, in parameters
    ("activation_embed", None),  # the residual width, in activations: rows are split already
    ("layers", None),
    ("vocab", None),
    ("heads", None),
    ("kv_heads", None),
    ("mlp", None),
)


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """Arranges the devices (default: all) as a (data, fsdp) mesh.

    Raises:
      ConfigError: when the configured sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {"data": config.data, "fsdp": config.fsdp}
    given = math.prod(size for size in sizes.values() if size != -1)
    resolved = [len(devices) // given if size == -1 else size for size in sizes.values()]
    if math.prod(resolved) != len(devices):
        raise ConfigError(
            f"mesh.data {config.data} x mesh.fsdp {config.fsdp} does not make {len(devices)} devices; "
            "set one to -1 and the other to a divisor of that number."
        )
    return Mesh(np.array(devices).reshape(resolved), AXES)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows split over the whole mesh, whatever the other axes."""
    return NamedSharding(mesh, PartitionSpec(AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, PartitionSpec())


def tree_shardings(abstract: Any, mesh: Mesh) -> Any:
    """Shardings for a pytree whose leaves carry logical axes (`nn.Partitioned` boxes); others are replicated."""
    return nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), mesh, RULES)


def constrain(array: jax.Array, *axes: str | None) -> jax.Array:
    """Asks the compiler to keep `array` split along the named logical axes; outside a mesh it does nothing."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return array
    spec = nn.logical_to_mesh_axes(axes, RULES)
    return jax.lax.with_sharding_constraint(array, spec)
