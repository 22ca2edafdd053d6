"""TPUs by name, such as v5p:4x4x4 or 2*v5e:4x8 (two slices): what one chip can do, and devices to compile for.

libtpu holds the compiler of real TPUs and needs none of them: a topology's devices are descriptions.
"""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from refusion_jax.config import ConfigError

# libtpu asks for these where it finds no TPU; without them it looks for one in the network.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    # A process that only compiles shares libtpu with any other: it holds no chip.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_NAME = re.compile(r"(?:([0-9]+)\*)?([a-z0-9]+):([0-9]+(?:x[0-9]+)*)")
_MOST_SLICES = 256  # whose descriptions are made in seconds
_HOST = (2, 2, 1)  # chips of a host, of which a slice has whole ones


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip as its maker states it.

    Attributes:
      flops: bfloat16 FLOP/s. bandwidth: bytes/s of its memory.
      hbm_bytes: what the compiler lets a program have of its memory.
      largest: chips of the largest slice along each axis.
    """

    flops: float
    bandwidth: float
    hbm_bytes: int
    largest: tuple[int, ...]


CHIPS = {
    "v5e": Chip(197e12, 819e9, round(15.75 * 2**30), (16, 16)),
    "v5p": Chip(459e12, 2765e9, round(95.74 * 2**30), (16, 24, 28)),
    "v6e": Chip(918e12, 1640e9, round(31.25 * 2**30), (16, 16)),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """So many equal slices of chips.

    Attributes:
      name: as it was given. family: a key of `CHIPS`. shape: chips of a slice along each axis.
      slices: how many there are.
    """

    name: str
    family: str
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def chip(self) -> Chip:
        """What one of the chips can do."""
        return CHIPS[self.family]

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        return self.slices * math.prod(self.shape)


def read_topology(name: str) -> Topology:
    """The topology of a name: `FAMILY:SHAPE`, or `SLICES*FAMILY:SHAPE`.

    Raises:
      ConfigError: when there is no such TPU.
    """
    examples = "v5e:4x8, v5p:4x4x4, v6e:16x16, or 2*v5e:4x8 for two slices"
    match = _NAME.fullmatch(name)
    if match is None or match[2] not in CHIPS:
        raise ConfigError(
            f"--compile_for is {name!r}, which names no known TPU; the known families are {', '.join(CHIPS)} with "
            f"the chips along their axes, as in {examples}."
        )
    slices, family, shape = int(match[1] or 1), match[2], tuple(map(int, match[3].split("x")))
    largest = CHIPS[family].largest
    fits = len(shape) == len(largest) and all(
        0 < size <= most and size % whole == 0 for size, most, whole in zip(shape, largest, _HOST, strict=False)
    )
    if not 0 < slices <= _MOST_SLICES:
        raise ConfigError(f"--compile_for is {name!r}, of {slices} slices; give between 1 and {_MOST_SLICES}.")
    if not fits:
        sizes = "x".join(map(str, largest))
        raise ConfigError(
            f"--compile_for is {name!r}, but a slice of {family} has {len(largest)} axes of up to {sizes} chips, of "
            f"which the first two are even numbers; for example {examples}."
        )
    return Topology(name, family, shape, slices)


def require_compiler() -> None:
    """Looks for libtpu.

    Raises:
      ConfigError: when it is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(f"--compile_for needs libtpu, which has the compiler; install it: {_installation()}.")


def _installation() -> str:
    """The command that installs libtpu beside this package: pip knows a checkout by its directory alone."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "setup.cfg").is_file():
        return "pip install 'refusion_jax[tpu]'"
    return f"pip install -e '{os.path.relpath(root)}[tpu]'"


def topology_devices(topology: Topology) -> Sequence[Any]:
    """Descriptions of the topology's chips, which arrays and meshes can name but which hold nothing.

    The process computes on the CPU from now on, even on a machine with a TPU.

    Raises:
      ConfigError: without libtpu.
    """
    require_compiler()
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    jax.config.update("jax_platforms", "cpu")
    name = f"{topology.family}:{'x'.join(map(str, topology.shape))}"
    slices = {"num_slices": topology.slices} if topology.slices > 1 else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **slices).devices
