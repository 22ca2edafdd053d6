"""Exports read back bit for bit, imports decode, and the command line of both."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors import safe_open

import refusion_jax as rf
from refusion_jax import command_line
from refusion_jax.config import LoraConfig, ModelConfig, TrainConfig
from refusion_jax.huggingface import CheckpointError, __main__, export_checkpoint, parse_size, read_model_config
from refusion_jax.modeling import Transformer
from refusion_jax.modeling.quantization import quantize
from refusion_jax.training.imported import write_run
from refusion_jax.training.loop import train
from refusion_jax.training.weights import initial_params

pytestmark = pytest.mark.usefixtures("quick_compilation")

QWEN3 = ModelConfig(
    vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=128, eos_token_ids=(1, 4),
)  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MODELS = {
    "qwen3": {},
    "qwen3 tied": {"tie_word_embeddings": True, "biases": ATTENTION},
    "qwen2": {"qk_norm": False, "biases": ATTENTION[:3], "eos_token_ids": (1,)},
    "llama": {"qk_norm": False, "rope_type": "llama3", "rope_scaling": 4.0, "rope_ramp": (4.0, 1.0),
              "rope_original_length": 64},
    "llama biases": {"qk_norm": False, "biases": (*ATTENTION, "gate_proj", "up_proj", "down_proj"), "head_dim": 4},
    "qwen3 yarn": {"rope_type": "yarn", "rope_scaling": 2.0, "rope_ramp": (32.0, 1.0), "rope_original_length": 128},
    "qwen3 linear": {"rope_scaling": 2.0, "rope_theta": 1e6},
}  # fmt: skip


def make(dtype="float32", **changes):
    """A configuration, and random parameters, biases among them."""
    config = dataclasses.replace(QWEN3, dtype=dtype, param_dtype=dtype, **changes)
    tokens = jnp.zeros((1, 1), jnp.int32)
    shapes = nn.unbox(jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens, tokens)["params"])
    rng = np.random.default_rng(0)
    return config, jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype), shapes)


def assert_same_bits(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for ours, theirs in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        assert ours.dtype == theirs.dtype and np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.parametrize("name", MODELS)
def test_an_export_reads_back(name, tmp_path):
    config, params = make(**MODELS[name])
    export_checkpoint(params, config, tmp_path / "model")
    model = rf.load(tmp_path / "model")
    assert model.config == config
    assert_same_bits(model.params, params)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    described = json.loads((tmp_path / "model" / "config.json").read_text())
    assert described["model_type"] == name.split()[0]
    assert described["architectures"] == [f"{name.split()[0].capitalize()}ForCausalLM"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tied", [False, True])
def test_half_precision_in_several_files(dtype, tied, tmp_path):
    config, params = make(dtype, tie_word_embeddings=tied)
    export_checkpoint(params, config, tmp_path / "model", max_shard_size=2_500)
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 3
    assert [file.name for file in files] == [
        f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))
    ]
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    sizes = []
    for file in files:
        with safe_open(file, framework="flax") as opened:
            assert opened.metadata() == {"format": "pt"}
            held = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        assert {name for name, there in index["weight_map"].items() if there == file.name} == set(held)
        assert "lm_head.weight" not in held or not tied
        sizes.append(sum(tensor.nbytes for tensor in held.values()))
    assert max(sizes) <= 2_500 and sum(sizes) == index["metadata"]["total_size"]
    model = rf.load(tmp_path / "model")
    assert model.config == config
    assert_same_bits(model.params, params)


@pytest.mark.parametrize("write", [export_checkpoint, lambda *of: write_run(of[2], of[1], of[0], None)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_in_int8_is_refused(tied, write, tmp_path):
    config, params = make(tie_word_embeddings=tied)
    with pytest.raises(CheckpointError) as caught:
        write(quantize(params), config, tmp_path / "model")
    assert str(caught.value) == (
        "The parameters are quantised to int8, from which the model's own weights cannot be had again; load it without "
        "quantize, and write that."
    )
    assert not any(tmp_path.iterdir())


def test_another_type(tmp_path):
    config, params = make()
    export_checkpoint(params, config, tmp_path / "model", dtype="bfloat16")
    assert_same_bits(rf.load(tmp_path / "model").params, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))
    loaded = rf.load(tmp_path / "model", dtype="float32")
    assert loaded.config == config and loaded.params["norm"]["scale"].dtype == jnp.float32
    with pytest.raises(CheckpointError, match="dtype is 'float64', not one of float32, bfloat16, float16"):
        export_checkpoint(params, config, tmp_path / "other", dtype="float64")


@pytest.mark.parametrize(
    "changes",
    [
        {"biases": ("q_proj",)},
        {"biases": ("gate_proj", "up_proj", "down_proj")},
        {"qk_norm": False, "biases": ("q_proj", "k_proj", "v_proj", "gate_proj")},
    ],
)
def test_what_no_architecture_computes(changes, tmp_path):
    config, params = make(**changes)
    with pytest.raises(CheckpointError, match=r"^No Hugging Face architecture here has model\.qk_norm"):
        export_checkpoint(params, config, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_directories_that_hold_something(tmp_path):
    config, params = make()
    (tmp_path / "empty").mkdir()
    export_checkpoint(params, config, tmp_path / "empty")
    for name in ("empty", "empty/config.json"):
        with pytest.raises(
            CheckpointError, match="exists already and is no empty directory; name a new one, or remove it"
        ):
            export_checkpoint(params, config, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"config\.json is not a directory"):
        export_checkpoint(params, config, tmp_path / "empty" / "config.json" / "x")


def test_a_failing_export_leaves_nothing(tmp_path):
    def fail(directory):
        (directory / "tokenizer.json").write_text("{}")
        raise OSError(28, "No space left on device")

    config, params = make()
    with pytest.raises(CheckpointError, match=r"model cannot be written \(No space left on device\)"):
        export_checkpoint(params, config, tmp_path / "model", SimpleNamespace(bos_token_id=None, export=fail))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 kb", 1_500), ("2MiB", 2**21), ("7", 7), ("1TB", 10**12)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5 apples", "-1GB", "0", "1e9", "0.1"])
def test_what_is_no_size(text):
    with pytest.raises(CheckpointError, match="is no size of a file; give a number of bytes, such as 5GB"):
        parse_size(text)


# ---- the command line ----------------------------------------------------------------------------------------------


def run(*arguments):
    command_line.run(__main__.main, __main__.FLAGS, arguments=__main__.named(list(map(str, arguments))))


def test_an_export_tells_what_it_was_trained_for(tmp_path):
    config, params = make()
    export_checkpoint(params, config, tmp_path / "plain")
    export_checkpoint(params, config, tmp_path / "blocks", objective="block_diffusion", block_lengths=(4, 12))
    assert rf.load(tmp_path / "plain").objective == ""
    run("import", tmp_path / "blocks", tmp_path / "same")
    run("import", tmp_path / "plain", tmp_path / "dream", "--objective=dream")
    run("import", tmp_path / "plain", tmp_path / "told", "--objective=block_diffusion", "--block_lengths=4,12")
    for name, blocks in (("blocks", (4, 12)), ("same", (4, 12)), ("told", (4, 12)), ("dream", ())):
        model = rf.load(tmp_path / name)
        assert (model.objective, model.block_lengths) == ("block_diffusion" if blocks else "dream", blocks)
    path = tmp_path / "blocks" / "config.json"
    stated = json.loads(path.read_text())
    path.write_text(json.dumps(stated | {"training_objective": "blockdiffusion"}))
    with pytest.raises(CheckpointError, match=r"training_objective 'blockdiffusion', which is none\. Did you mean 'bl"):
        rf.load(tmp_path / "blocks")
    path.write_text(json.dumps(stated | {"training_block_lengths": [4, 0]}))
    with pytest.raises(CheckpointError, match=r"training_block_lengths \[4, 0\]; a block has at least one token"):
        rf.load(tmp_path / "blocks")


@pytest.mark.parametrize(
    ("source", "flags", "message"),
    [
        ("llada", ["--objective=dream"], "--objective is 'dream', but * says that it was trained for 'llada'; leave"),
        (
            "llada",
            ["--block_lengths=4"],
            "--block_lengths is 4, which belongs to the objective block_diffusion, not to 'l",
        ),
        (
            "blocks",
            ["--block_lengths=8"],
            "--block_lengths is 8, but * says that it was trained in blocks of 4, 12; leave",
        ),
        ("plain", ["--objective=block_diffusion"], "--block_lengths is missing: block diffusion decodes in blocks of"),
        ("plain", ["--objective=block_diffusion", "--block_lengths=4,x"], "--block_lengths is 4,x; give whole numbers"),
    ],
)
def test_what_an_import_is_told_must_fit(source, flags, message, tmp_path, capsys):
    config, params = make()
    about = {"llada": ("llada", ()), "blocks": ("block_diffusion", (4, 12)), "plain": ("", ())}[source]
    export_checkpoint(params, config, tmp_path / "model", objective=about[0], block_lengths=about[1])
    with pytest.raises(SystemExit) as end:
        run("import", tmp_path / "model", tmp_path / "run", *flags)
    error = capsys.readouterr().err
    assert end.value.code == 2 and not (tmp_path / "run").exists()
    assert all(part in error for part in message.split("*"))


@pytest.mark.slow
def test_a_run_becomes_a_directory_and_a_run_again(tiny_run, tiny_config, tmp_path, capsys):
    run("export", tiny_run, tmp_path / "model", "--max-shard-size=10KB")
    assert capsys.readouterr().out == f"Written to {tmp_path / 'model'}.\n"
    original, exported = rf.load(tiny_run), rf.load(tmp_path / "model")
    assert_same_bits(exported.params, original.params)
    assert exported.config == original.config
    assert exported.tokenizer.encode("S:1?") == original.tokenizer.encode("S:1?")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1

    run("import", tmp_path / "model", tmp_path / "run")
    imported = rf.load(tmp_path / "run")
    assert_same_bits(imported.params, original.params)
    assert imported.config == original.config
    assert rf.generate(imported, ["S:1?"], original.decode).tokens == rf.generate(original, ["S:1?"]).tokens
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints", "config.json", "tokenizer"]
    assert {"params", "about", "files.json"} <= {
        path.name for path in (tmp_path / "run" / "checkpoints" / "0").iterdir()
    }

    training = dataclasses.replace(tiny_config.train, steps=2, init_from=str(tmp_path / "run"))
    train(dataclasses.replace(tiny_config, train=training), tmp_path / "continued")
    assert rf.load(tmp_path / "continued").config == original.config


def test_types_of_an_import(tmp_path):
    config, params = make("bfloat16")
    export_checkpoint(params, config, tmp_path / "model")
    run("import", tmp_path / "model", tmp_path / "run")
    assert_same_bits(rf.load(tmp_path / "run").params, params)
    run("import", tmp_path / "model", tmp_path / "wide", "--dtype=float32")
    assert rf.load(tmp_path / "wide").params["norm"]["scale"].dtype == jnp.float32
    run("export", tmp_path / "run", tmp_path / "back", "--dtype", "float16")
    assert read_model_config(tmp_path / "back").param_dtype == "float16"


@pytest.mark.slow
def test_adapters_are_merged(tiny_run, tiny_config, tmp_path):
    training = TrainConfig(
        steps=2, batch_size=4, log_every=1, eval_every=0, eval_decode_examples=0, init_from=str(tiny_run)
    )
    train(dataclasses.replace(tiny_config, train=training, lora=LoraConfig(rank=2)), tmp_path / "adapted")
    run("export", tmp_path / "adapted", tmp_path / "model")
    adapted = rf.load(tmp_path / "adapted")
    assert_same_bits(rf.load(tmp_path / "model").params, adapted.params)
    assert not np.array_equal(
        adapted.params["layers"]["self_attn"]["q_proj"]["kernel"],
        rf.load(tiny_run).params["layers"]["self_attn"]["q_proj"]["kernel"],
    )
    half = rf.load(tmp_path / "adapted", dtype="bfloat16")
    assert_same_bits(half.params, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), adapted.params))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "The arguments are ''; say export RUN DIR or import DIR RUN."),
        (["export", "x"], "The arguments are 'export x'; say export RUN DIR or import DIR RUN."),
        (["exprot", "x", "y"], "The arguments are 'exprot x y'; say export RUN DIR or import DIR RUN."),
        (["export", "{model}", "{model}/inside"], "which is read; name a directory elsewhere."),
        (["export", "/nothing", "{new}"], "/nothing is not a directory; give a run directory"),
        (["export", "a", "b", "c"], "Unexpected argument 'c'"),
        (["import", "{model}", "{model}"], "exists already and is no empty directory"),
        (["export", "{model}", "{new}", "--max-shard-size=many"], "'many' is no size of a file"),
        (["export", "{model}", "{new}", "--dtype=int8"], "dtype is 'int8', not one of float32, bfloat16, float16."),
    ],
)
def test_bad_input_is_one_line(arguments, sentence, tmp_path, capsys, checkpoint):
    places = {"model": checkpoint, "new": tmp_path / "new"}
    with pytest.raises(SystemExit) as caught:
        run(*(argument.format(**places) for argument in arguments))
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and sentence in error
    assert list(tmp_path.iterdir()) == []


def test_an_import_onto_a_full_disk_is_one_line_and_leaves_nothing(checkpoint, tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise ValueError("RESOURCE_EXHAUSTED: Error writing ...: No space left on device\n  and more")

    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    with pytest.raises(SystemExit) as caught:
        run("import", checkpoint, tmp_path / "run")
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.endswith("No space left on device.\n") and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["export", "import"])
def test_what_is_interrupted_leaves_nothing(command, number, tmp_path):
    """The signal comes when the first file of a temporary directory is there."""
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 20_000}
    config, params = make(**wide)
    export_checkpoint(params, config, tmp_path / "model")
    line = [sys.executable, "-m", "refusion_jax.huggingface", command, tmp_path / "model", tmp_path / "target"]
    process = subprocess.Popen(list(map(str, line)), cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list(tmp_path.glob("target.*.tmp/*")):
        time.sleep(0.02)
    process.send_signal(number)
    assert process.communicate(timeout=120)[1].splitlines()[-1:] == ["Interrupted."]
    assert process.returncode == 128 + number
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_module_runs(checkpoint, tmp_path):
    command = [sys.executable, "-m", "refusion_jax.huggingface", "export", str(checkpoint), str(tmp_path / "model")]
    root = Path(__file__).parents[2]
    subprocess.run(command, check=True, cwd=root, capture_output=True)
    assert_same_bits(rf.load(tmp_path / "model").params, rf.load(checkpoint).params)


def test_an_import_begins_a_run_of_more_tokens(tmp_path):
    """A Hugging Face directory's vocabulary may grow; a run's may not."""
    config, params = make()
    export_checkpoint(params, config, tmp_path / "model")
    wider = dataclasses.replace(config, vocab_size=60)
    assert initial_params(str(tmp_path / "model"), wider)["embed_tokens"]["embedding"].shape == (60, 16)
    run("import", tmp_path / "model", tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"model\.vocab_size is 50 there and 60 here"):
        initial_params(str(tmp_path / "run"), wider)


def test_the_tokenizer_is_written(tiny_run, tmp_path):
    config, params = make()
    tokenizer = rf.load(tiny_run).tokenizer
    tokenizer.bos_token_id = 3
    export_checkpoint(params, config, tmp_path / "model", tokenizer)
    assert rf.load(tmp_path / "model").tokenizer.encode("S:1?") == tokenizer.encode("S:1?")
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 3, "eos_token_id": [1, 4], "pad_token_id": 0}
