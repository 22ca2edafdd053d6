"""Meshes, and training on eight devices: the same curve as on one, with the state really split.

The devices are simulated, which has to be asked for before JAX starts: `results_of` runs this file as a script.
"""

import functools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.config import CheckpointConfig, ConfigError, MeshConfig, ModelConfig, OptimizerConfig, SlotsConfig
from refusion_jax.modeling import Transformer
from refusion_jax.sharding import RULES, batch_sharding, constrain, make_mesh, replicated
from refusion_jax.slots import Batch
from refusion_jax.training.checkpoint import Checkpoints
from refusion_jax.training.state import init_state, make_optimizer
from refusion_jax.training.step import make_train_step

STEPS, DEVICES = 5, 8
MESHES = {"1x1": (1, 1), "2x4": (2, 4), "1x8": (1, 8), "8x1": (8, 1)}
QUICK, SLOW = ("1x1", "2x4"), ("1x8", "8x1")
MODEL = ModelConfig(
    vocab_size=24,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)


def make_batch(step, rows=8, length=40):
    """Rows of two examples, prompts of 4 and responses of 16 and 10 tokens, and padding."""
    index = np.arange(length)
    segments = np.where(index < 20, 1, np.where(index < 34, 2, 0))
    return Batch(
        tokens=np.random.default_rng(step).integers(3, 24, (rows, length)).astype(np.int32) * (segments > 0),
        segment_ids=np.tile(segments, (rows, 1)).astype(np.int32),
        position_ids=np.tile(np.where(segments == 2, index - 20, index), (rows, 1)).astype(np.int32),
        prompt_lengths=np.full((rows, 2), 4, np.int32),
        response_lengths=np.tile(np.array([16, 10], np.int32), (rows, 1)),
        example_ids=np.arange(2 * rows, dtype=np.int32).reshape(rows, 2) + 100 * step,
        epochs=np.zeros((rows, 2), np.int32),
    )


def leaves(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def norm(state):
    return float(np.linalg.norm(state.params["lm_head"]["kernel"]))


class Run:
    """A few steps on one mesh, compiled apart so that several can be at once."""

    def __init__(self, data, fsdp):
        self.mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp), jax.devices()[: data * fsdp])
        module, optimizer = Transformer(MODEL), make_optimizer(OptimizerConfig(warmup_steps=0), STEPS)
        self.state, shardings = init_state(module, optimizer, 0, self.mesh)
        step = make_train_step(module, optimizer, SlotsConfig(sizes=(4, 8)), self.mesh, shardings)
        with jax.set_mesh(self.mesh):
            self.lowered = step.lower(self.state, make_batch(0), np.int32(0))

    def compile(self):
        self.step = self.lowered.compile()

    def restored_norm(self, workdir):
        """Continues what `workdir` holds, as far as the mesh goes."""
        checkpoints = Checkpoints(workdir, CheckpointConfig())
        restored = checkpoints.restore(self.state)
        checkpoints.close()
        assert restored.step == STEPS
        for got, wanted in zip(*map(jax.tree.leaves, (restored, self.state)), strict=True):
            assert got.sharding == wanted.sharding
        return norm(restored)

    def results(self):
        """Trains; what happened, in plain JSON types."""
        losses = []
        for index in range(STEPS):
            batch = jax.device_put(make_batch(index), batch_sharding(self.mesh))
            batch_shard = batch.tokens.addressable_shards[0].data.shape
            self.state, metrics = self.step(self.state, batch, jax.device_put(np.int32(0), replicated(self.mesh)))
            losses.append([float(metrics.loss.total), float(metrics.grad_norm)])
        split = leaves(self.state)
        return {
            "losses": losses,
            "shapes": {name: leaf.shape for name, leaf in split.items()},
            "shards": {name: leaf.addressable_shards[0].data.shape for name, leaf in split.items()},
            "devices": {name: len(leaf.sharding.device_set) for name, leaf in split.items()},
            "batch_shard": batch_shard,
            "constraints": self.lowered.as_text().count("sdy.sharding_constraint"),
        }


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """What happened on a mesh; the quick ones together in one process, and so the slow ones."""

    @functools.cache
    def run(names):
        workdir = tmp_path_factory.mktemp("multi_device")
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        command = [sys.executable, __file__, str(workdir), *names]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads((workdir / "results.json").read_text())

    return lambda name: run(QUICK if name in QUICK else SLOW)[name]


each_mesh = pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])


@each_mesh
def test_loss_curves_do_not_depend_on_the_mesh(name, results_of):
    expected = np.array(results_of("1x1")["losses"])
    assert np.isfinite(expected).all()
    assert len({loss for loss, _ in expected}) == STEPS
    np.testing.assert_allclose(results_of(name)["losses"], expected, rtol=1e-4)


@each_mesh
def test_parameters_and_optimizer_state_are_split_over_fsdp(name, results_of):
    result, (data, fsdp) = results_of(name), MESHES[name]
    split = [leaf for leaf in result["shapes"] if "_norm'" not in leaf and ("params" in leaf or "u[" in leaf)]
    assert len(split) == 3 * 12  # parameters and both moments, without the norms of query and key heads
    for leaf, shape in result["shapes"].items():
        assert result["devices"][leaf] == data * fsdp
        if leaf in split:
            # Kernels are split along the residual width, 32, wherever it stands.
            axis = shape.index(32)
            shape = [size // fsdp if index == axis else size for index, size in enumerate(shape)]
        assert result["shards"][leaf] == shape, leaf


@each_mesh
def test_batches_are_split_over_all_devices(name, results_of):
    assert results_of(name)["batch_shard"] == [8 // (MESHES[name][0] * MESHES[name][1]), 40]


@each_mesh
def test_the_step_constrains_activations(name, results_of):
    """The embedded tokens, and the residual stream twice in the scanned layer; each again for its gradient."""
    assert results_of(name)["constraints"] == 6


def test_a_checkpoint_of_one_mesh_continues_on_another(results_of):
    saved, restored = results_of("1x1")["norm"], results_of("2x4")["restored_norm"]
    assert restored == pytest.approx(saved, rel=1e-6)
    assert restored != pytest.approx(results_of("2x4")["initial_norm"], rel=1e-3)


@pytest.mark.parametrize(
    ("data", "fsdp", "shape"),
    [(1, -1, (1, 8)), (-1, 1, (8, 1)), (2, -1, (2, 4)), (-1, 2, (4, 2)), (2, 4, (2, 4))],
)
def test_mesh_sizes(data, fsdp, shape):
    mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp), list(range(8)))
    assert mesh.axis_names == ("data", "fsdp")
    assert mesh.devices.shape == shape
    assert sorted(mesh.devices.reshape(-1)) == list(range(8))


@pytest.mark.parametrize(("data", "fsdp"), [(3, -1), (-1, 16), (2, 2), (16, 1)])
def test_meshes_that_do_not_use_every_device_are_refused(data, fsdp):
    with pytest.raises(ConfigError) as caught:
        make_mesh(MeshConfig(data=data, fsdp=fsdp), list(range(8)))
    assert f"mesh.data {data} x mesh.fsdp {fsdp} does not make 8 devices" in str(caught.value)


def test_the_default_mesh_has_all_devices():
    assert make_mesh(MeshConfig()).size == jax.device_count()


def test_a_width_that_cannot_be_split_is_refused():
    mesh = SimpleNamespace(shape={"data": 1, "fsdp": 3})
    with pytest.raises(
        ConfigError, match=r"^model\.hidden_size is 32, not divisible by the 3 devices of the fsdp axis"
    ):
        init_state(Transformer(MODEL), make_optimizer(OptimizerConfig(), 100), 0, mesh)


def test_without_a_mesh_nothing_is_constrained():
    array = jnp.ones((4, 3))
    assert constrain(array, "batch", "activation_embed") is array


def test_every_axis_has_one_rule():
    names = [name for name, _ in RULES]
    assert len(set(names)) == len(names)


def main(root, names):
    """Trains on each mesh; the first also saves, and the others restore that before they train."""
    runs = {name: Run(*MESHES[name]) for name in names}
    with ThreadPoolExecutor() as pool:
        list(pool.map(Run.compile, runs.values()))
    results = {}
    for name, run in runs.items():
        found = {"initial_norm": norm(run.state), "restored_norm": run.restored_norm(root) if results else None}
        results[name] = found | run.results() | {"norm": norm(run.state)}
        if len(results) == 1:
            checkpoints = Checkpoints(root, CheckpointConfig())
            checkpoints.save(run.state)
            checkpoints.close()
    (root / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
