"""--compile_for without a compiler: what is refused, and what would be compiled."""

import dataclasses
import importlib.util
import math
import os
import sys
from pathlib import Path

import jax
import pytest

from refusion_jax import command_line, decode, train
from refusion_jax.compilation import commands
from refusion_jax.compilation.programs import (
    DecodeShape,
    chip_bytes,
    decode_programs,
    described_config,
    known_vocabulary,
    train_program,
)
from refusion_jax.config import Config, ConfigError, DataConfig, DecodeConfig, ModelConfig, TrainConfig
from refusion_jax.decoding import Rules
from refusion_jax.sharding import AXES, decoding_mesh
from refusion_jax.training.flops import flops_per_token

MODEL = ModelConfig(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=256,
)  # fmt: skip
CONFIG = Config(
    model=MODEL,
    data=DataConfig(max_length=96),
    train=TrainConfig(batch_size=8, accumulate_steps=2, loss_chunk=100),
    decode=DecodeConfig(gen_length=32),
)
ONE_CHIP = decoding_mesh(1, 1, jax.devices())


@pytest.fixture
def run(capsys):
    """Runs a command: (exit status, stdout, stderr)."""

    def run(command, *arguments):
        status = 0
        try:
            command_line.run(command.main, command.FLAGS, arguments=arguments)
        except SystemExit as caught:
            status = caught.code
        return status, *capsys.readouterr()

    return run


def test_standard_output_that_is_closed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(ConfigError, match="Standard output is closed"):
        commands._in_child(lambda: pytest.fail("went on"))


@pytest.mark.parametrize(
    ("command", "arguments", "sentence"),
    [
        (train, ["--config=demo", "--compile_for=v9:2x2"], "names no known TPU; the known families are v5e, v5p, v6e"),
        (train, ["--config=demo", "--compile_for=v5e:2x3"], "the first two are even numbers"),
        (train, ["--compile_for=v5e:2x2"], "--config is missing"),
        (train, ["--config=demo"], "--workdir is missing"),
        (decode, ["--config=demo", "--compile_for=v9:2x2"], "names no known TPU"),
        (decode, ["--compile_for=v5e:2x2"], "needs one of --checkpoint and --config"),
        (decode, ["--config=demo", "--checkpoint=x", "--compile_for=v5e:2x2"], "not both: the model to compile"),
        (decode, ["--config=demo", "--checkpoint=x", "--prompt=a"], "--config needs --compile_for"),
        (decode, ["--checkpoint=x", "--prompt=a", "--compile_prompt_length=3"], "needs --compile_for"),
        (decode, ["--checkpoint=x", "--config.train.steps=3"], "--config is missing"),
        (decode, ["--prompt=a"], "--checkpoint is missing"),
        (train, ["--config=demo", "--workdir=a", "--compile_for=v5e:2x2"], "does not read --workdir; leave it out"),
        (train, ["--config=demo", "--num_processes=2", "--process_id=0", "--compile_for=v5e:2x2"],
         "does not read --num_processes, --process_id; leave them out"),
        (decode, ["--config=demo", "--prompt=a", "--compile_for=v5e:2x2"], "does not read --prompt; leave it out"),
        (decode, ["--config=demo", "--noordered", "--compile_for=v5e:2x2"], "does not read --ordered"),
        (decode, ["--checkpoint=nowhere/", "--compile_for=v5e:2x2"], "config.json"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_ends_with_one_line_and_status_2(command, arguments, sentence, run):
    status, _, err = run(command, *arguments)
    assert status == 2
    assert err.startswith("error: ") and err.count("\n") == 1
    assert sentence in err


@pytest.mark.parametrize("command", [train, decode])
def test_without_libtpu_the_command_that_installs_it_is_named(command, run, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, _, err = run(command, f"--config={command_line.find_config('demo')}", "--compile_for=v5e:2x2")
    assert status == 2
    root = os.path.relpath(Path(train.__file__).parents[1])
    assert f"pip install -e '{root}[tpu]'" in err


READ = {
    "config", "compile_for", "checkpoint", "compile_prompt_length", "batch_size", "slot_score", "dtype", "quantize",
    "kv_dtype", "data_parallel", "tensor_parallel", *(field.name for field in dataclasses.fields(DecodeConfig)),
}  # fmt: skip


@pytest.mark.parametrize("command", [train, decode])
def test_every_flag_is_read_by_compiling_or_refused_beside_it(command, run):
    for name in set(command.FLAGS) - READ:
        flag = command.FLAGS[name]
        value = {"bool": "true", "int": "1", "float": "1"}.get(flag.flag_type(), "a")
        status, _, err = run(command, "--config=demo", f"--{name}={value}", "--compile_for=v5e:2x2")
        assert status == 2 and f"does not read --{name};" in err


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize(("command", "name"), [(train, "compile_training"), (decode, "compile_decoding")])
def test_the_exit_status_is_that_of_compiling(command, name, status, run, monkeypatch):
    monkeypatch.setattr(command, name, lambda *arguments: status)
    assert run(command, "--config=demo", "--compile_for=v5e:2x2")[0] == status


def test_decoding_is_compiled_for_as_many_chips_as_asked_for(run, monkeypatch):
    asked = []
    monkeypatch.setattr(decode, "compile_decoding", lambda *arguments: asked.append(arguments[2:]) or 0)
    run(decode, "--config=demo", "--compile_for=v5e:2x2")
    run(decode, "--config=demo", "--compile_for=v5e:2x2", "--data_parallel=2", "--tensor_parallel=-1")
    assert asked == [("v5e:2x2", 1, 1), ("v5e:2x2", 2, -1)]


def test_the_vocabulary_of_a_tokenizer_that_is_not_there_is_about_the_size_asked_for(capsys):
    config = dataclasses.replace(
        CONFIG, model=ModelConfig(), data=dataclasses.replace(CONFIG.data, tokenizer_vocab_size=1_001)
    )
    assert commands._with_vocabulary(config).model.vocab_size == 1_008
    assert "taken as 1,008" in capsys.readouterr().out
    assert known_vocabulary(CONFIG) is CONFIG


@pytest.mark.slow
def test_a_training_step_is_described_by_its_run():
    program = train_program(CONFIG, jax.devices()[:1])
    numbers = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 16 + 2 * 16 + 2 * 8) + 2 * 64 * 16 + 16
    assert program.held["parameters"] == 4 * numbers
    assert program.held["optimizer"] >= 8 * numbers
    assert program.tokens == 8 * 96
    assert program.model_flops == 8 * 96 * flops_per_token(MODEL, 96)
    assert program.dynamic_trips == (math.ceil(4 * 96 / 100),)
    assert program.compile().memory_analysis().argument_size_in_bytes >= sum(program.held.values())


def test_a_step_that_takes_all_positions_at_once_has_no_loop_of_unknown_length():
    config = dataclasses.replace(CONFIG, train=TrainConfig(batch_size=8, loss_chunk=0))
    assert train_program(config, jax.devices()[:1]).dynamic_trips == ()


def test_decoding_is_described_by_its_stream():
    shape = DecodeShape(4, 40, CONFIG.decode, Rules())
    prefill, forward = decode_programs(MODEL, shape, ONE_CHIP, 2**30)
    assert prefill.tokens == 64  # one of four rows, a prompt of up to 64 tokens
    assert forward.tokens == 4 * 64
    buffer = 2 * 2 * 4 * 8 * (64 + 64) * 4  # keys and values, layers, rows, head_dim, length, bytes
    assert forward.held["KV buffer"] == buffer + 4 * 4
    assert forward.dynamic_trips == (1, 4 * 4)
    assert prefill.compile().memory_analysis().argument_size_in_bytes >= sum(prefill.held.values())


def test_weights_and_buffer_in_int8_are_described_as_such():
    model = dataclasses.replace(MODEL, kv_dtype="int8")
    _, forward = decode_programs(model, DecodeShape(4, 40, CONFIG.decode, Rules(), "int8"), ONE_CHIP, 2**30)
    assert forward.held["KV buffer"] == 2 * 2 * 4 * (64 + 64) * (8 + 4) + 4 * 4
    kernels, outputs = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 16) + 64 * 16, 2 * (3 * 16 + 2 * 8 + 2 * 16) + 64
    kept = 64 * 16 + 16 + 2 * (2 * 16 + 2 * 8)  # the embedding table and norms
    assert forward.held["parameters"] == kernels + 4 * (outputs + kept)


def test_flags_say_the_types_to_compile_for(run, monkeypatch):
    told = []
    monkeypatch.setattr(decode, "compile_decoding", lambda config, shape, *_: told.append((config, shape)) or 0)
    types = ["--dtype=bfloat16", "--quantize=int8", "--kv_dtype=int8"]
    assert run(decode, "--config=demo", "--compile_for=v5e:2x2", *types)[0] == 0
    assert run(decode, "--config=demo", "--compile_for=v5e:2x2")[0] == 0
    models, shapes = ([each[place] for each in told] for place in (0, 1))
    assert [(model.dtype, model.param_dtype, model.kv_dtype) for model in (each.model for each in models)] == [
        ("bfloat16", "bfloat16", "int8"), ("float32", "float32", ""),
    ]  # fmt: skip
    assert [shape.quantize for shape in shapes] == ["int8", ""]


def test_rows_are_as_many_as_fit_where_the_number_is_left_open():
    few, many = (
        decode_programs(MODEL, DecodeShape("auto", 40, CONFIG.decode, Rules()), ONE_CHIP, free)[1].tokens
        for free in (2**23, 2**33)
    )
    assert few < many == 256 * 64


def test_more_positions_than_the_model_has_are_refused():
    with pytest.raises(ConfigError, match="more than the 256 positions of the model"):
        decode_programs(MODEL, DecodeShape(4, 250, CONFIG.decode, Rules()), ONE_CHIP, 2**30)


def test_what_chips_cannot_share_is_refused():
    mesh = jax.sharding.AbstractMesh((1, 1, 2), AXES)
    with pytest.raises(ConfigError, match=r"mesh\.tensor is 2, which does not divide the model's 2 query heads, 1 key"):
        decode_programs(MODEL, DecodeShape(4, 40, CONFIG.decode, Rules()), mesh, 2**30)


def test_a_run_directory_is_described_without_its_weights(tiny_run, tiny_config):
    assert described_config(str(tiny_run)).model.hidden_size == tiny_config.model.hidden_size


def test_bytes_of_a_chip_are_those_of_its_share():
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    assert chip_bytes([jax.ShapeDtypeStruct((6, 2), jax.numpy.bfloat16, sharding=sharding)]) == 24
