"""Meshes, and training on eight devices: the same curve as on one, with the state really split.

The devices are simulated, which has to be asked for before JAX starts: `results_of` runs this file as a script.
"""

import dataclasses
import functools
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulated_devices import results_of_script

from refusion_jax.config import (
    CheckpointConfig,
    ConfigError,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    SlotsConfig,
    to_dict,
)
from refusion_jax.modeling import Transformer
from refusion_jax.sharding import (
    RULES,
    check_mesh,
    constrain,
    decoding_mesh,
    local_rows,
    make_mesh,
    put_batch,
    replicated,
    shared_rows,
    sum_over_batch,
    tree_shardings,
)
from refusion_jax.slots import Batch
from refusion_jax.training.checkpoint import About, Checkpoints
from refusion_jax.training.optimizer import make_optimizer
from refusion_jax.training.state import init_state
from refusion_jax.training.step import make_train_step

STEPS = 20
MESHES = {"1x1x1": (1, 1, 1), "2x2x2": (2, 2, 2), "1x8x1": (1, 8, 1), "8x1x1": (8, 1, 1), "1x2x4": (1, 2, 4)}
QUICK, SLOW = ("1x1x1", "2x2x2"), ("1x8x1", "8x1x1", "1x2x4", "2x1x2 in parts")
MESHES["2x1x2 in parts"] = (2, 1, 2)  # where a step computes each batch in two parts, with a chunked loss
MODEL = ModelConfig(
    vocab_size=24,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
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


def odd_vocabulary(mesh):
    """The share that a device has of an embedding of 23 tokens."""
    module = Transformer(dataclasses.replace(MODEL, vocab_size=23))
    key, tokens = jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
    shapes = jax.eval_shape(lambda: module.init(key, tokens, tokens)["params"])["embed_tokens"]
    return tree_shardings(shapes, mesh)["embedding"].shard_shape((23, 32))


def sum_of_parts(mesh):
    """What `sum_over_batch` makes of random parts, how far it is from their sum, and a device's share of it."""
    shares = mesh.shape["data"] * mesh.shape["fsdp"]
    parts = np.random.default_rng(0).normal(size=(shares, 600, 16)).astype(np.float32)
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda parts: sum_over_batch(parts, "vocab", "embed")).lower(parts).compile()
        total = compiled(parts)
    return {
        "error": float(jnp.max(jnp.abs(total - parts.sum(axis=0)))),
        "share": total.addressable_shards[0].data.shape,
        "scatters": compiled.as_text().count(" reduce-scatter("),
    }


class Run:
    """A few steps on one mesh, compiled apart so that several can be at once."""

    def __init__(self, *sizes, **switches):
        self.mesh = make_mesh(MeshConfig(*sizes), jax.devices()[: math.prod(sizes)])
        module, optimizer = Transformer(MODEL), make_optimizer(OptimizerConfig(warmup_steps=0), STEPS)
        self.state, shardings = init_state(module, optimizer, 0, self.mesh)
        step = make_train_step(module, optimizer, SlotsConfig(sizes=(4, 8)), self.mesh, shardings, **switches)
        with jax.set_mesh(self.mesh):
            self.lowered = step.lower(self.state, make_batch(0), np.int32(0))

    def compile(self):
        self.step = self.lowered.compile()

    def restored_norm(self, workdir):
        """Continues what `workdir` holds, as far as the mesh goes."""
        checkpoints = Checkpoints(workdir, CheckpointConfig(), About({"model": to_dict(MODEL)}, "", {}))
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
            batch = put_batch(make_batch(index), self.mesh, 8)
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
            "odd_vocabulary": odd_vocabulary(self.mesh),
            "sum_of_parts": sum_of_parts(self.mesh),
            "constraints": self.lowered.as_text().count("sdy.sharding_constraint"),
        }


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """What happened on a mesh; the quick ones together in one process, and so the slow ones."""

    @functools.cache
    def run(names):
        path = tmp_path_factory.mktemp("multi_device") / "results.json"
        return results_of_script(__file__, path, names, timeout=900)

    return lambda name: run(QUICK if name in QUICK else SLOW)[name]


each_mesh = pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])


@each_mesh
def test_loss_curves_do_not_depend_on_the_mesh(name, results_of):
    expected = np.array(results_of("1x1x1")["losses"])
    assert np.isfinite(expected).all()
    assert len({loss for loss, _ in expected}) == STEPS
    np.testing.assert_allclose(results_of(name)["losses"], expected, rtol=1e-4)


@each_mesh
def test_parameters_and_optimizer_state_are_split_over_fsdp_and_tensor(name, results_of):
    result, (data, fsdp, tensor) = results_of(name), MESHES[name]
    split = [leaf for leaf in result["shapes"] if "_norm'" not in leaf and ("params" in leaf or "u[" in leaf)]
    assert len(split) == 3 * 12  # parameters and both moments, without the norms of query and key heads
    for leaf, shape in result["shapes"].items():
        assert result["devices"][leaf] == data * fsdp * tensor
        if leaf in split:
            # The residual width is split over fsdp; heads, feed-forward width and vocabulary over tensor.
            last = len(shape) - 1
            ends = any(part in leaf for part in ("o_proj", "down_proj", "embedding", "scale"))
            residual = last if ends else last - 1
            shape = [*shape]
            shape[residual] //= fsdp
            if "scale" not in leaf:
                shape[last - 1 if ends else last] //= tensor
        assert result["shards"][leaf] == shape, leaf


@each_mesh
def test_batches_are_split_over_data_and_fsdp(name, results_of):
    assert results_of(name)["batch_shard"] == [8 // (MESHES[name][0] * MESHES[name][1]), 40]


@pytest.mark.parametrize("name", QUICK)
def test_the_step_constrains_activations(name, results_of):
    """In the scanned layer query, key, value, the inner width and the residual stream twice, each again for its
    gradient; the embedding, the embedded tokens and the embedding's gradient; and the output embedding, gathered once
    for the loss. Where rows are not split, the gradients of both embeddings are no sums over devices but constrained.
    """
    assert results_of(name)["constraints"] == (18 if name == "1x1x1" else 16)


@each_mesh
def test_each_device_is_sent_only_its_share_of_a_sum(name, results_of):
    result, (_, fsdp, tensor) = results_of(name)["sum_of_parts"], MESHES[name]
    assert result["error"] < 1e-5
    assert result["share"] == [600 // tensor, 16 // fsdp]
    assert result["scatters"] == (fsdp > 1)


def test_a_checkpoint_of_one_mesh_continues_on_another(results_of):
    saved, restored = results_of("1x1x1")["norm"], results_of("2x2x2")["restored_norm"]
    assert restored == pytest.approx(saved, rel=1e-6)
    assert restored != pytest.approx(results_of("2x2x2")["initial_norm"], rel=1e-3)


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ((1, -1), (1, 8, 1)),
        ((-1, 1), (8, 1, 1)),
        ((2, -1, 2), (2, 2, 2)),
        ((-1, 2), (4, 2, 1)),
        ((1, 2, -1), (1, 2, 4)),
    ],
)
def test_mesh_sizes(sizes, shape):
    mesh = make_mesh(MeshConfig(*sizes), devices())
    assert mesh.axis_names == ("data", "fsdp", "tensor")
    assert mesh.devices.shape == shape
    assert [device.id for device in mesh.devices.reshape(-1)] == list(range(8))


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    slice_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


def devices(slices=1):
    """Eight stand-ins, in so many slices; several slices are in no order."""
    made = [Device(id=i, process_index=i // 2, slice_index=i * slices // 8) for i in range(8)]
    return made if slices == 1 else made[::-1]


def test_slices_exchange_over_data_alone():
    mesh = make_mesh(MeshConfig(data=4, fsdp=2), devices(slices=2))
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert (slices[:2] == slices[0, 0, 0]).all() and (slices[2:] == slices[2, 0, 0]).all()
    assert slices[0, 0, 0] != slices[2, 0, 0]
    with pytest.raises(ConfigError, match=r"^mesh\.data is 1, which the 2 slices cannot share; make it a multiple"):
        make_mesh(MeshConfig(data=1, fsdp=8), devices(slices=2))


def test_rows_of_a_decode_are_rounded_down_to_equal_shares():
    mesh = SimpleNamespace(shape={"data": 3, "fsdp": 2, "tensor": 2})
    assert [shared_rows(mesh, rows) for rows in (6, 11, 12)] == [6, 6, 12]
    with pytest.raises(ConfigError, match=r"^batch_size is 5, fewer rows than the 6 devices .*; use at least 6\.$"):
        shared_rows(mesh, 5)


def test_a_mesh_of_no_device_or_of_one_twice_is_refused():
    for given, sentence in (([], "has 0 entries"), (devices()[:1] * 2, "has 2 entries, 1 of them different")):
        with pytest.raises(ConfigError, match=f"^devices {sentence}"):
            make_mesh(MeshConfig(-1, 1, 1), given)
    with pytest.raises(ConfigError, match=r"^config is a dict; give a MeshConfig"):
        make_mesh({"data": 8})


@pytest.mark.parametrize("sizes", [(3, -1), (-1, 16), (2, 2), (16, 1), (2, 2, 4), (1, -1, 3)])
def test_meshes_that_do_not_use_every_device_are_refused(sizes):
    with pytest.raises(ConfigError) as caught:
        make_mesh(MeshConfig(*sizes), devices())
    data, fsdp, tensor = (*sizes, 1)[:3]
    assert f"mesh.data {data} x mesh.fsdp {fsdp} x mesh.tensor {tensor} does not make 8 devices" in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ((1, 1), (1, 1, 1)),
        ((2, 1), (2, 1, 1)),
        ((1, 3), (1, 1, 3)),
        ((4, 2), (4, 1, 2)),
        ((-1, 2), (4, 1, 2)),
        ((3, -1), (3, 1, 2)),
    ],
)
def test_decoding_takes_the_first_devices(sizes, shape):
    mesh = decoding_mesh(*sizes, devices())
    assert mesh.axis_names == ("data", "fsdp", "tensor") and mesh.devices.shape == shape
    assert [device.id for device in mesh.devices.reshape(-1)] == list(range(math.prod(shape)))


@pytest.mark.parametrize("sizes", [(-1, -1), (0, 1), (1, 0), (3, 3), (-1, 9), (0, -1)])
def test_decoding_on_devices_that_are_not_there_is_refused(sizes):
    shown = f"^--data_parallel {sizes[0]} x --tensor_parallel {sizes[1]} cannot be had of 8 devices; give numbers"
    with pytest.raises(ConfigError, match=shown):
        decoding_mesh(*sizes, devices())


def test_the_default_mesh_has_all_devices():
    assert make_mesh(MeshConfig()).size == jax.device_count()


@pytest.mark.parametrize(
    ("shape", "rows", "message"),
    [
        ((1, 3, 1), 6, r"^model\.hidden_size is 32, not divisible by the 3 .* mesh\.fsdp may be 1, 2\.$"),
        ((1, 1, 8), 8, r"^mesh\.tensor is 8, which .* 8 query heads, 4 key heads .* width 40; it may be 1, 2, 4\.$"),
        ((1, 1, 3), 8, r"^mesh\.tensor is 3, .* it may be 1, 2\.$"),
        ((2, 4, 1), 12, r"^train\.batch_size is 12, not divisible by the 8 devices .* use 8\.$"),
        ((2, 4, 1), 4, r"^train\.batch_size is 4, .* use 8\.$"),
    ],
)
def test_what_cannot_be_split_is_refused_with_sizes_that_would_do(shape, rows, message):
    mesh = SimpleNamespace(shape=dict(zip(("data", "fsdp", "tensor"), shape, strict=True)), size=math.prod(shape))
    with pytest.raises(ConfigError, match=message):
        check_mesh(mesh, MODEL, rows)


def test_parts_of_a_batch_that_devices_cannot_have_are_refused():
    mesh = SimpleNamespace(shape={"data": 2, "fsdp": 1, "tensor": 1}, size=2)
    check_mesh(mesh, MODEL, 12, parts=3)
    with pytest.raises(ConfigError, match=r"^train\.accumulate_steps is 4, .* the 6 rows .* may be 1, 2, 3, 6\.$"):
        check_mesh(mesh, MODEL, 12, parts=4)


def test_a_vocabulary_that_cannot_be_split_stays_whole(results_of):
    assert results_of("2x2x2")["odd_vocabulary"] == [23, 16]


def test_one_process_has_all_rows():
    mesh = make_mesh(MeshConfig())
    assert local_rows(mesh, 8).tolist() == list(range(8))
    batch = put_batch({"tokens": np.arange(24).reshape(8, 3)}, mesh, 8)
    assert np.array_equal(batch["tokens"], np.arange(24).reshape(8, 3))


def test_without_a_mesh_nothing_is_constrained():
    array = jnp.ones((4, 3))
    assert constrain(array, "batch", "activation_embed") is array


def test_every_axis_has_one_rule():
    names = [name for name, _ in RULES]
    assert len(set(names)) == len(names)


def main(path, names):
    """Trains on each mesh; the first also saves, and the others restore that before they train."""
    root = path.parent
    parts = {"accumulate_steps": 2, "loss_chunk": 16}
    runs = {name: Run(*MESHES[name], **(parts if "parts" in name else {})) for name in names}
    with ThreadPoolExecutor() as pool:
        list(pool.map(Run.compile, runs.values()))
    results = {}
    for name, run in runs.items():
        found = {"initial_norm": norm(run.state), "restored_norm": run.restored_norm(root) if results else None}
        results[name] = found | run.results() | {"norm": norm(run.state)}
        if len(results) == 1:
            checkpoints = Checkpoints(root, CheckpointConfig(), About({"model": to_dict(MODEL)}, "", {}))
            checkpoints.save(run.state)
            checkpoints.close()
    path.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
