"""One table decides all sharding: logical axis name -> mesh axis.

Model code names logical axes only. The mesh has three axes:

    data    rows of a batch; the outermost, so that slices of a pod exchange nothing but gradients over it
    fsdp    rows of a batch, and parameters along their `embed` axis: each device keeps a share and gathers a layer when
            it needs it
    tensor  heads, feed-forward width and vocabulary of one row: what lets a row be longer than a device holds

Constraints inside a jitted function take effect under `jax.set_mesh(mesh)`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from refusion_jax.config import ConfigError, MeshConfig, ModelConfig

AXES = ("data", "fsdp", "tensor")
ROW_AXES = ("data", "fsdp")
_TILES = 512  # elements that a row of a matrix should be a multiple of

RULES: tuple[tuple[str, tuple[str, ...] | str | None], ...] = (
    ("batch", ROW_AXES),  # rows of a batch, and the flattened (row, position) axis
    ("embed", "fsdp"),  # the residual width, in parameters
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("mlp", "tensor"),
    ("activation_embed", None),  # the residual width, in activations: rows are split already
    ("activation_heads", "tensor"),  # query heads, and key heads
    ("activation_mlp", "tensor"),
    ("layers", None),
)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Arranges the devices (default: all) as a (data, fsdp, tensor) mesh.

    Devices of several slices, which only a slow network joins, are divided along `data`.

    Raises:
      ConfigError: when the configured sizes do not multiply to the number of devices, there are none or some twice, or
        `data` is no multiple of the number of slices.
    """
    devices = jax.devices() if devices is None else devices
    if not isinstance(config, MeshConfig):
        raise ConfigError(f"config is a {type(config).__name__}; give a MeshConfig.")
    different = len(set(map(id, devices)))
    if not different or different < len(devices):
        raise ConfigError(f"devices has {len(devices)} entries, {different} of them different; give each device once.")
    sizes = [config.data, config.fsdp, config.tensor]
    given = math.prod(size for size in sizes if size != -1)
    resolved = [len(devices) // given if size == -1 else size for size in sizes]
    if math.prod(resolved) != len(devices):
        shown = " x ".join(f"mesh.{name} {size}" for name, size in zip(AXES, sizes, strict=True))
        raise ConfigError(
            f"{shown} does not make {len(devices)} devices; set one to -1 (the rest), and the others so that their "
            "product divides that number."
        )
    slices = len({getattr(device, "slice_index", None) for device in devices})
    if resolved[0] % slices:
        raise ConfigError(
            f"mesh.data is {resolved[0]}, which the {slices} slices cannot share; make it a multiple of that number."
        )
    if slices == 1:
        return Mesh(mesh_utils.create_device_mesh(resolved, list(devices), allow_split_physical_axes=True), AXES)
    within = [resolved[0] // slices, *resolved[1:]]
    arranged = mesh_utils.create_hybrid_device_mesh(
        within, [slices, 1, 1], list(devices), allow_split_physical_axes=True
    )
    return Mesh(arranged, AXES)


def decoding_mesh(data: int, tensor: int, devices: Sequence[Any]) -> Mesh:
    """The first `data * tensor` devices as a mesh: rows over `data`, the model over `tensor`.

    Args:
      data, tensor: numbers of at least 1; one of them may be -1, for as many as there are devices left.
      devices: to choose from.

    Raises:
      ConfigError: when there are not so many.
    """
    sizes = (data, tensor)
    if -1 in sizes and max(sizes) > 0:
        data, tensor = (len(devices) // max(sizes) if size == -1 else size for size in sizes)
    if min(data, tensor) < 1 or data * tensor > len(devices):
        raise ConfigError(
            f"--data_parallel {sizes[0]} x --tensor_parallel {sizes[1]} cannot be had of {len(devices)} "
            f"device{'s' * (len(devices) > 1)}; give numbers whose product is at most that, or -1 for one of them."
        )
    if data * tensor == len(devices):
        return make_mesh(MeshConfig(data=data, fsdp=1, tensor=tensor), devices)
    return Mesh(np.array(devices[: data * tensor]).reshape(data, 1, tensor), AXES)


def check_mesh(mesh: Any, model: ModelConfig, rows: int, parts: int = 1) -> None:
    """Refuses what cannot be split evenly over the mesh.

    Args:
      mesh: anything with a `shape`, devices by axis.
      model: whose widths are split.
      rows: of a batch.
      parts: in which a device computes its rows one after another.

    Raises:
      ConfigError: naming the value and sizes that would do.
    """
    check_rows(mesh, rows, "train.batch_size")
    shares = row_shares(mesh)
    if rows // shares % parts:
        raise ConfigError(
            f"train.accumulate_steps is {parts}, which does not divide the {rows // shares} rows of a batch that each "
            f"device has; it may be {_divisors(rows // shares, rows)}."
        )
    check_widths(mesh, model)


def row_shares(mesh: Any) -> int:
    """How many devices of a mesh the rows of a batch are split over; 1 without a mesh."""
    return 1 if mesh is None else math.prod(mesh.shape.get(axis, 1) for axis in ROW_AXES)


def check_rows(mesh: Any, rows: int, name: str) -> None:
    """Refuses a number of rows, called `name`, of which not every device can have as many.

    Raises:
      ConfigError: naming a number that would do.
    """
    if rows % (shares := row_shares(mesh)):
        raise ConfigError(
            f"{name} is {rows}, not divisible by the {shares} devices that its rows are split over "
            f"(mesh.data x mesh.fsdp); use {max(rows // shares, 1) * shares}."
        )


def shared_rows(mesh: Any, rows: int) -> int:
    """The most rows of a decode, of at most `rows`, that every device can have as many of.

    Raises:
      ConfigError: when they are fewer than the devices.
    """
    if rows < (shares := row_shares(mesh)):
        raise ConfigError(
            f"batch_size is {rows}, fewer rows than the {shares} devices they are split over; use at least {shares}."
        )
    return rows // shares * shares


def check_widths(mesh: Any, model: ModelConfig) -> None:
    """Refuses a model whose widths cannot be split evenly over the mesh.

    Raises:
      ConfigError: naming the value and sizes that would do.
    """
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    if model.hidden_size % fsdp:
        raise ConfigError(
            f"model.hidden_size is {model.hidden_size}, not divisible by the {fsdp} devices of the fsdp axis; "
            f"mesh.fsdp may be {_divisors(model.hidden_size, row_shares(mesh))}."
        )
    widths = (model.num_attention_heads, model.num_key_value_heads, model.intermediate_size)
    if any(width % tensor for width in widths):
        raise ConfigError(
            f"mesh.tensor is {tensor}, which does not divide the model's {widths[0]} query heads, {widths[1]} key "
            f"heads and feed-forward width {widths[2]}; it may be {_divisors(math.gcd(*widths), mesh.size)}."
        )


def _divisors(number: int, most: int) -> str:
    return ", ".join(str(size) for size in range(1, most + 1) if number % size == 0)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows split over data and fsdp, whatever the other axes."""
    return NamedSharding(mesh, PartitionSpec(ROW_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, PartitionSpec())


def local_rows(mesh: Mesh, rows: int) -> np.ndarray:
    """Which of the `rows` rows of a batch this process's devices need: (n,) int, ascending."""
    places = batch_sharding(mesh).addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[place] for place in places]))


def put_batch(local: Any, mesh: Mesh, rows: int) -> Any:
    """Joins what every process has of a batch to global arrays of `rows` rows, split as `batch_sharding` says.

    Args:
      local: a pytree of arrays with this process's `local_rows` along the first axis.
    """
    sharding, there = batch_sharding(mesh), local_rows(mesh, rows)

    def put(array: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            first, stop, _ = index[0].indices(rows)
            return array[np.searchsorted(there, first) : np.searchsorted(there, stop)]

        return jax.make_array_from_callback((rows, *array.shape[1:]), sharding, part)

    return jax.tree.map(put, local)


def tree_shardings(abstract: Any, mesh: Mesh) -> Any:
    """Shardings for a pytree whose leaves carry logical axes (`nn.Partitioned` boxes); others are replicated.

    An axis that its mesh axis does not divide, such as a vocabulary of a prime size, stays whole.
    """
    wanted = nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), mesh, RULES)

    def divisible(leaf: Any, sharding: NamedSharding) -> NamedSharding:
        spec = [
            axis if axis is None or size % mesh.shape[axis] == 0 else None
            for size, axis in zip(leaf.shape, sharding.spec, strict=False)
        ]
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(divisible, nn.unbox(abstract), wanted)


def constrain(array: jax.Array, *axes: str | None) -> jax.Array:
    """Asks the compiler to keep `array` split along the named logical axes; outside a mesh it does nothing."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return array
    spec = nn.logical_to_mesh_axes(axes, RULES)
    return jax.lax.with_sharding_constraint(array, spec)


def batch_shards(positions: int) -> int:
    """Over how many devices the mesh in use splits the positions of a batch; 1 where they do not divide."""
    shards = row_shares(jax.sharding.get_abstract_mesh())
    return shards if positions % shards == 0 else 1


def sum_over_batch(parts: jax.Array, *axes: str | None) -> jax.Array:
    """The sum over the leading axis, of which each of the `batch_shards` has one part, split along the named axes.

    Every device is sent the share that it keeps alone. Left to itself the partitioner lets each have the whole sum.
    """
    spec = [axis and nn.logical_to_mesh_axes((axis,), RULES)[0] for axis in axes]
    if parts.shape[0] == 1 or "fsdp" not in spec or jax.sharding.get_abstract_mesh().shape["fsdp"] == 1:
        return constrain(jnp.sum(parts, axis=0), *axes)
    kept = PartitionSpec(
        *(
            to if name and divides(size, name) else None
            for to, name, size in zip(spec, axes, parts.shape[1:], strict=True)
        )
    )
    scattered = spec.index("fsdp")

    def of_device(part: jax.Array) -> jax.Array:
        shape = part.shape[1:]
        # The TPU's compiler scatters only what it can cut into tiles; of 151,936 rows it would make the whole sum, too.
        spare = [(0, -size % _TILES if size > _TILES and axis != scattered else 0) for axis, size in enumerate(shape)]
        padded = jnp.pad(part[0], spare)
        share = jax.lax.psum_scatter(padded, "fsdp", scatter_dimension=scattered, tiled=True)
        cut = tuple(slice(None) if axis == scattered else slice(size) for axis, size in enumerate(shape))
        # Where parts of a batch are added up in a loop, the TPU's compiler fails when it moves the sum out of the loop.
        return jax.lax.optimization_barrier(jax.lax.psum(share[cut], "data"))

    return jax.shard_map(
        of_device, in_specs=PartitionSpec(ROW_AXES, *(None if to == "fsdp" else to for to in kept)), out_specs=kept
    )(parts)


def per_device(
    function: Callable[..., Any], inputs: Sequence[tuple[str | None, ...]], output: tuple[str | None, ...]
) -> Any:
    """`function` of each device's share of arrays that are split along the named logical axes; as it is outside a mesh.

    Args:
      function: takes and returns arrays; what it computes of a share must be that share of what it computes of all.
      inputs, output: the logical axes of each array.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return function
    specs = tuple(nn.logical_to_mesh_axes(axes, RULES) for axes in inputs)
    return jax.shard_map(function, in_specs=specs, out_specs=nn.logical_to_mesh_axes(output, RULES), check_vma=False)


def divides(size: int, axis: str) -> bool:
    """Whether the devices of a logical axis, of the mesh in use, can have equal shares of `size`."""
    mesh = jax.sharding.get_abstract_mesh()
    names = () if mesh.empty else (nn.logical_to_mesh_axes((axis,), RULES)[0] or ())
    names = (names,) if isinstance(names, str) else names
    return size % math.prod(mesh.shape[name] for name in names) == 0


def constrain_whole(tree: Any) -> Any:
    """Asks the compiler for every array of `tree` whole on every device, so that any process can read it."""
    return jax.tree.map(lambda array: constrain(array, *[None] * array.ndim), tree)
