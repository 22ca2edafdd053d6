"""Names of TPUs, and what is refused."""

import importlib.util
import os
from pathlib import Path

import pytest

from refusion_jax.compilation import topologies
from refusion_jax.compilation.topologies import CHIPS, read_topology, topology_devices
from refusion_jax.config import ConfigError
from refusion_jax.training.flops import peak_flops


@pytest.mark.parametrize(
    ("name", "family", "chips", "slices"),
    [
        ("v5e:4x8", "v5e", 32, 1),
        ("v5p:4x4x4", "v5p", 64, 1),
        ("v5p:2x2x1", "v5p", 4, 1),
        ("v6e:16x16", "v6e", 256, 1),
        ("2*v5e:4x8", "v5e", 64, 2),
    ],
)
def test_a_name_tells_family_chips_and_slices(name, family, chips, slices):
    topology = read_topology(name)
    assert (topology.name, topology.family, topology.chips, topology.slices) == (name, family, chips, slices)
    assert topology.chip is CHIPS[family]


@pytest.mark.parametrize(
    "name", ["v9:2x2", "", "v5e", "v5e:", "4x8", "v5e:4x", "two*v5e:4x8", "V5E:4x8", "v5e 4x8", "v5e:\uff12x2"]
)
def test_a_name_of_no_tpu_is_refused_with_those_there_are(name):
    with pytest.raises(ConfigError, match=r"v5e, v5p, v6e .* v5p:4x4x4") as caught:
        read_topology(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["v5e:2x3", "v5e:1x1", "v5e:32x32", "v5e:4x4x4", "v5p:4x4", "v5p:2x2x0"])
def test_a_shape_that_no_slice_has_is_refused(name):
    with pytest.raises(ConfigError, match="the first two are even numbers"):
        read_topology(name)


@pytest.mark.parametrize("count", [0, 257, 1_000_000])
def test_more_slices_than_can_be_described_are_refused(count):
    with pytest.raises(ConfigError, match=f"of {count} slices; give between 1 and 256"):
        read_topology(f"{count}*v5e:4x8")


def test_without_libtpu_the_command_that_installs_it_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    root = os.path.relpath(Path(topologies.__file__).parents[2])
    with pytest.raises(ConfigError) as caught:
        topology_devices(read_topology("v5e:2x2"))
    assert f"install it: pip install -e '{root}[tpu]'." in str(caught.value)
    # As a wheel has it.
    monkeypatch.setattr(topologies, "__file__", str(tmp_path / "refusion_jax" / "compilation" / "topologies.py"))
    with pytest.raises(ConfigError, match=r"pip install 'refusion_jax\[tpu\]'"):
        topology_devices(read_topology("v5e:2x2"))


@pytest.mark.parametrize(("family", "kind"), [("v5e", "TPU v5 lite"), ("v5p", "TPU v5"), ("v6e", "TPU v6 lite")])
def test_the_peaks_are_those_of_training(family, kind):
    assert CHIPS[family].flops == peak_flops(kind)
