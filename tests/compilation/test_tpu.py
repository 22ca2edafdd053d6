"""With the compiler of real TPUs: counts against unrolled programs, every family, every preset."""

import dataclasses
import json
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from refusion_jax import command_line
from refusion_jax.compilation.programs import DecodeShape, decode_programs, known_vocabulary, train_program
from refusion_jax.compilation.report import compile_program
from refusion_jax.compilation.topologies import read_topology, topology_devices
from refusion_jax.config import Config, DataConfig, DecodeConfig, MeshConfig, ModelConfig, TrainConfig
from refusion_jax.decoding import Rules
from refusion_jax.sharding import decoding_mesh

pytestmark = pytest.mark.tpu_compile

SMALL = Config(
    model=ModelConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=256, dtype="bfloat16", attention_chunk=0,
    ),
    data=DataConfig(max_length=256),
    train=TrainConfig(batch_size=8, loss_chunk=0),
    decode=DecodeConfig(gen_length=32),
)  # fmt: skip

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.py"))
PRESETS = {path.stem: runpy.run_path(str(path))["TOPOLOGY"] for path in CONFIGS}


def changed(config, **sections):
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **fields) for name, fields in sections.items()}
    )


def compiled(config, name="v5e:2x2"):
    topology = read_topology(name)
    return compile_program(train_program(known_vocabulary(config), topology_devices(topology)), topology)


def preset(name, **sections):
    values = command_line.parse([f"--config={name}"], _flags())
    return changed(values.config, **sections)


def _flags():
    values = command_line.flags.FlagValues()
    command_line.define_config(values)
    return values


def test_loops_count_as_often_as_they_run():
    unrolled = changed(SMALL, model={"scan_unroll": 3})
    topology = read_topology("v5e:2x2")
    program = train_program(unrolled, topology_devices(topology))
    whole = program.compile()
    report = compile_program(dataclasses.replace(program, compile=lambda: whole), topology)
    looped = compiled(changed(SMALL, train={"loss_chunk": 128}))
    # XLA also counts what is no matrix product.
    assert whole.cost_analysis()["flops"] == pytest.approx(report.cost.flops, rel=0.06)
    assert looped.cost.flops == pytest.approx(report.cost.flops, rel=0.005)
    # Not the compiler's fusions, but the same order: a program with loops has more to put away.
    assert 0.5 < looped.cost.bytes / report.cost.bytes < 2
    gathered = [each.cost.collectives["all-gather"] for each in (report, looped)]
    assert gathered[1] == pytest.approx(gathered[0], rel=0.25)


def test_chunks_of_attention_and_parts_of_a_batch_are_loops_too():
    chunks = [compiled(changed(SMALL, model={"attention_chunk": size})).cost.flops for size in (64, 128)]
    assert chunks[0] == pytest.approx(chunks[1], rel=0.005)
    whole = compiled(SMALL).cost.flops
    for sizes in ({"fsdp": 4}, {"data": 2, "fsdp": 2}):
        parts = compiled(changed(SMALL, train={"accumulate_steps": 2}, mesh=sizes)).cost.flops
        assert parts == pytest.approx(whole, rel=0.005)


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "2*v5e:2x2"])
def test_a_step_compiles_for_every_family_and_several_slices(topology):
    slices = read_topology(topology).slices
    report = compiled(changed(SMALL, mesh={"data": slices, "fsdp": 2, "tensor": 2}), topology)
    assert report.fits
    assert report.cost.flops * report.used == pytest.approx(report.program.model_flops, rel=0.05)
    assert report.cost.collectives["all-reduce"] > 0
    assert report.memory["gradients, activations, temporaries"] > 0


@pytest.mark.parametrize(
    ("name", "rows", "algorithm", "sizes"),
    [
        ("v5e:2x2", 4, "self_correcting", (1, 1)),
        ("v5p:2x2x1", 8, "self_correcting", (1, 2)),
        ("v6e:2x2", 8, "paper", (1, 1)),
        ("v6e:2x2", 16, "self_correcting", (2, 2)),
    ],
)
def test_decoding_compiles(name, rows, algorithm, sizes):
    topology = read_topology(name)
    shape = DecodeShape(rows, 64, dataclasses.replace(SMALL.decode, algorithm=algorithm), Rules())
    model = dataclasses.replace(SMALL.model, head_dim=128)
    mesh = decoding_mesh(*sizes, topology_devices(topology))
    programs = decode_programs(model, shape, mesh, topology.chip.hbm_bytes)
    compiled = [program.compile() for program in programs]
    prefill, forward = (
        compile_program(dataclasses.replace(program, compile=lambda done=done: done), topology)
        for program, done in zip(programs, compiled, strict=True)
    )
    assert prefill.fits and forward.fits
    assert forward.used == math.prod(sizes)
    assert forward.cost.flops * forward.used == pytest.approx(forward.program.model_flops, rel=0.05)
    assert prefill.cost.flops * prefill.used == pytest.approx(prefill.program.model_flops, rel=0.1)
    assert prefill.memory["other arguments"] >= 0
    assert re.search(r"buffer_attention[\w.]* = .*custom-call\(", compiled[1].as_text())
    # Sums over the layers' halves are as large as activations; rows are gathered nowhere.
    activations = 2 * forward.program.tokens * model.hidden_size * (2 * model.num_hidden_layers + 2)
    assert sum(forward.cost.collectives.values()) < activations


def decode_forward(kv_dtype="", quantize=""):
    """Of a model whose layers weigh more than its vocabulary, on four chips."""
    model = ModelConfig(
        vocab_size=512, hidden_size=2048, intermediate_size=6144, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=4096, dtype="bfloat16", param_dtype="bfloat16",
        kv_dtype=kv_dtype,
    )  # fmt: skip
    topology, config = read_topology("v6e:2x2"), DecodeConfig(gen_length=64, slot_size=32)
    mesh = decoding_mesh(1, 4, topology_devices(topology))
    shape = DecodeShape(8, 2048, config, Rules(), quantize)
    return compile_program(decode_programs(model, shape, mesh, topology.chip.hbm_bytes)[1], topology)


def test_a_decode_forward_moves_little_more_than_weights_and_committed_entries():
    wide, narrow = decode_forward(), decode_forward("int8", "int8")
    least = wide.program.least_bytes
    assert least == sum(wide.program.held.values())
    assert least < wide.cost.bytes < 1.5 * least
    assert least / 2 < narrow.cost.bytes < 0.8 * least


def test_a_step_exchanges_what_sharding_needs():
    config = preset("qwen3_8b_sft", model={"num_hidden_layers": 1}, data={"max_length": 512}, train={"batch_size": 64})
    report = compiled(config, "v5p:4x4x4")
    assert report.program.mesh == {"data": 4, "fsdp": 16, "tensor": 1}
    found = report.cost.collectives
    assert sum(found.values()) < 1.1 * report.program.least_collectives
    # A whole sum would be all-reduces, and take twice as long as each chip's share.
    assert found["all-gather"] + found["reduce-scatter"] > 0.9 * sum(found.values())


TOO_LARGE = (
    "--config=qwen3_0p6b_sft", "--config.model.num_hidden_layers=1", "--config.train.batch_size=256",
    "--config.train.loss_chunk=0", "--compile_for=v5e:2x2",
)  # fmt: skip


def compile_for(*arguments):
    return subprocess.run([sys.executable, "train.py", *arguments], capture_output=True, text=True)


def test_the_command_tells_by_how_much_a_step_is_too_large_and_what_makes_it_smaller():
    done = compile_for(*TOO_LARGE)
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    remedies = lines[-2].rpartition("GB more than a chip has; try ")[2].removesuffix(".").split(", or ")
    assert remedies == ["--config.train.loss_chunk=256", "--config.train.accumulate_steps=2"]
    found = json.loads(lines[-1])
    assert not found["fits"]
    assert found["hbm_bytes_per_chip"] > found["hbm_limit_bytes"]
    for remedy in remedies:
        smaller = json.loads(compile_for(*TOO_LARGE, *remedy.split()).stdout.splitlines()[-1])
        assert smaller["hbm_bytes_per_chip"] < 0.9 * found["hbm_bytes_per_chip"]


def test_a_mesh_that_the_topology_does_not_have_is_refused():
    with pytest.raises(command_line.ConfigError, match="does not make 4 devices"):
        compiled(dataclasses.replace(SMALL, mesh=MeshConfig(data=3, fsdp=1)))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_compile_with_one_layer(name):
    report = compiled(preset(name, model={"num_hidden_layers": 1, "scan_unroll": 1}), PRESETS[name])
    assert report.fits


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_presets_fit_at_full_depth(name):
    report = compiled(preset(name), PRESETS[name])
    print(f"\n{name} for {PRESETS[name]}: {report.hbm_bytes / 1e9:.1f} GB, {report.seconds:.0f} s")
    assert report.fits
