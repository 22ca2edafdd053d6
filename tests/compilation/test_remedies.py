"""What is said to make a program smaller: settings that would be accepted, and that are not in force already."""

import itertools

import pytest

from refusion_jax.compilation.programs import AbstractProgram, DecodeShape
from refusion_jax.compilation.remedies import decoding_remedies, larger_chips, training_remedies
from refusion_jax.compilation.report import Report
from refusion_jax.compilation.topologies import read_topology
from refusion_jax.config import (
    Config,
    DataConfig,
    DecodeConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from refusion_jax.decoding import Rules

GB = 10**9
HELD = {"parameters": GB, "optimizer": 2 * GB}
MODEL = ModelConfig(vocab_size=64, remat="none")


def report(name="v5e:2x2", held=HELD, data=1, fsdp=4, tensor=1, needed=40 * GB):
    mesh = {"data": data, "fsdp": fsdp, "tensor": tensor}
    program = AbstractProgram("training step", None, mesh, held, 512, 1, ())
    return Report(program, read_topology(name), 2.0, {"needed": needed}, None)


def config(
    remat="none", batch_size=16, accumulate_steps=1, loss_chunk=256, moments_dtype="float32", optimizer="adamw", rank=0,
    param_dtype="float32", layers=3, fsdp=-1, init_from="",
):  # fmt: skip
    return Config(
        model=ModelConfig(remat=remat, vocab_size=64, param_dtype=param_dtype, num_hidden_layers=layers),
        data=DataConfig(),
        mesh=MeshConfig(fsdp=fsdp),
        train=TrainConfig(
            batch_size=batch_size, accumulate_steps=accumulate_steps, loss_chunk=loss_chunk,
            init_from="runs/a" if rank else init_from,
        ),
        optimizer=OptimizerConfig(name=optimizer, moments_dtype=moments_dtype),
        lora=LoraConfig(rank=rank),
    )  # fmt: skip


REMAT, MOMENTS = "--config.model.remat=full", "--config.optimizer.moments_dtype=bfloat16"
PARAMETERS = "--config.model.param_dtype=bfloat16"
TOO_LARGE = {"held": {"parameters": 20 * GB, "optimizer": 200 * GB}}
NO_ROOM = {"needed": 5 * GB}  # of which a billion are activations


@pytest.mark.parametrize(
    ("settings", "shape", "first"),
    [
        ({}, {}, [REMAT, "--config.train.accumulate_steps=2"]),
        ({"loss_chunk": 0}, {}, ["--config.train.loss_chunk=256", REMAT]),
        ({"loss_chunk": 0, "batch_size": 8, "layers": 1}, {}, ["--config.train.accumulate_steps=2", MOMENTS]),
        ({"remat": "full", "batch_size": 24, "accumulate_steps": 2}, {},
         ["--config.train.accumulate_steps=6", MOMENTS]),
        # Sums of gradients would take more than half the activations.
        ({"remat": "full"}, NO_ROOM, [MOMENTS, "--config.train.batch_size=8"]),
        ({"remat": "full", "moments_dtype": "bfloat16"}, NO_ROOM, ["--config.train.batch_size=8", PARAMETERS]),
        ({"remat": "full", "accumulate_steps": 4}, {"data": 2, "fsdp": 2},
         ["--config.mesh.data=1 --config.mesh.fsdp=4", MOMENTS]),
        ({"remat": "full", "accumulate_steps": 4}, {"name": "2*v5e:2x2", "data": 2, "fsdp": 2}, [MOMENTS, PARAMETERS]),
        ({}, TOO_LARGE, [MOMENTS, PARAMETERS]),
        ({"optimizer": "adafactor", "init_from": "a"}, TOO_LARGE, [PARAMETERS, "--config.lora.rank=16"]),
        ({"optimizer": "adafactor", "param_dtype": "bfloat16"}, TOO_LARGE,
         ["--compile_for=v5e:4x2, twice as many chips", "--compile_for=v6e:2x2, whose chips have more memory"]),
        ({"moments_dtype": "bfloat16", "param_dtype": "bfloat16", "fsdp": 4, "batch_size": 4}, TOO_LARGE,
         ["--compile_for=v5e:4x2 --config.mesh.fsdp=8 --config.train.batch_size=8, twice as many chips",
          "--compile_for=v6e:2x2, whose chips have more memory"]),
        ({"rank": 4, "remat": "full", "batch_size": 4}, {},
         [PARAMETERS, "--compile_for=v5e:4x2 --config.train.batch_size=8, twice as many chips"]),
    ],
)  # fmt: skip
def test_remedies_are_what_would_still_help(settings, shape, first):
    assert training_remedies(config(**settings), report(**shape))[:2] == first


def test_there_are_always_two():
    choices = itertools.product(
        ("none", "full"), (4, 16), (1, 4), ("float32", "bfloat16"), ("adamw", "adafactor"), (0, 4),
        ("float32", "bfloat16"), ("v5e:2x2", "v6e:2x2", "v5p:2x2x1"), (HELD, TOO_LARGE["held"]),
    )  # fmt: skip
    for remat, rows, parts, moments, optimizer, rank, parameters, name, held in choices:
        if rows < 4 * parts:
            continue
        settings = config(remat, rows, parts, 256, moments, optimizer, rank, parameters)
        found = training_remedies(settings, report(name, held))
        assert len(found) >= 2, (settings, name)


@pytest.mark.parametrize(
    ("name", "larger"), [("v5e:4x8", "v6e:4x8"), ("2*v6e:4x8", "2*v5p:4x8x1"), ("v5p:2x2x1", None)]
)
def test_larger_chips_have_a_name_that_is_known(name, larger):
    found = larger_chips(read_topology(name))
    assert found == ([f"--compile_for={larger}, whose chips have more memory"] if larger else [])
    if larger:
        assert read_topology(larger).chips == read_topology(name).chips


@pytest.mark.parametrize(
    ("batch_size", "parameters", "tensor", "first"),
    [
        (8, GB, 1, ["--batch_size=4", "--kv_dtype=int8"]),
        (1, GB, 1, ["--kv_dtype=int8", "--quantize=int8"]),
        ("auto", GB, 1, ["--kv_dtype=int8", "--quantize=int8"]),
        (8, 20 * GB, 1, ["--quantize=int8", "--tensor_parallel=2"]),
        # The model has two key heads.
        (8, 20 * GB, 2, ["--quantize=int8", "--compile_for=v6e:2x2, whose chips have more memory"]),
    ],
)
def test_remedies_of_decoding(batch_size, parameters, tensor, first):
    shape = DecodeShape(batch_size, 32, DecodeConfig(), Rules())
    made = report(held={"parameters": parameters, "KV buffer": 10}, fsdp=1, tensor=tensor)
    assert decoding_remedies(MODEL, shape, made)[:2] == first


def test_shorter_texts_need_smaller_buckets():
    made = report(held={"parameters": GB, "KV buffer": 10}, fsdp=1)
    long = DecodeShape(1, 100, DecodeConfig(gen_length=200), Rules())
    assert decoding_remedies(MODEL, long, made)[3:5] == ["--gen_length=128", "--compile_prompt_length=64"]
    blocks = DecodeShape(1, 32, DecodeConfig(gen_length=192, slot_size=64, serial_num_blocks=3), Rules())
    assert not any("gen_length" in remedy for remedy in decoding_remedies(MODEL, blocks, made))
