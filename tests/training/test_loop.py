"""Whole runs of a tiny model: what they write, that they learn, continue, and refuse before the first step."""

import dataclasses
import json
import os
import shutil
import signal
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from tensorboardX.proto.event_pb2 import Event

import refusion_jax as rf
from refusion_jax.config import Config, ConfigError
from refusion_jax.data import DataError, load_dataset, load_tokenizer, make_batches
from refusion_jax.huggingface import CheckpointError
from refusion_jax.training import loop
from refusion_jax.training.checkpoint import Checkpoints
from refusion_jax.training.metrics import MetricsWriter, read_metrics
from refusion_jax.training.run_directory import WorkdirError, read_run_config

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEYS = {"step", "loss", "ar_loss", "mdm_loss", "learning_rate", "grad_norm", "tokens_per_second"}


def with_values(config: Config, section, **values):
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})


def read_events(directory):
    """(tag, step) -> value of all TensorBoard files: length, its checksum, an event and its checksum each."""
    scalars = {}
    for path in sorted((directory / "tensorboard").iterdir()):
        content, start = path.read_bytes(), 0
        while start < len(content):
            length = int.from_bytes(content[start : start + 8], "little")
            event = Event.FromString(content[start + 12 : start + 12 + length])
            scalars |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
            start += length + 16
    return scalars


def test_what_a_run_writes(tiny_run, tiny_config):
    names = ["checkpoints", "config.json", "metrics.jsonl", "summary.json", "tensorboard", "tokenizer"]
    assert sorted(os.listdir(tiny_run)) == names
    assert sorted(os.listdir(tiny_run / "checkpoints")) == ["10", "20"]
    tokenizer = load_tokenizer(tiny_run / "tokenizer")
    model = dataclasses.replace(
        tiny_config.model,
        vocab_size=tokenizer.vocab_size,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_ids=(tokenizer.eos_token_id,),
        mask_token_id=tokenizer.mask_token_id,
    )
    assert read_run_config(tiny_run) == dataclasses.replace(tiny_config, model=model)


def test_metrics(tiny_run, tiny_config):
    records = read_metrics(tiny_run)
    assert [record["step"] for record in records] == [4, 8, 12, 16, 20]
    schedule = loop.learning_rate_schedule(tiny_config.optimizer, 20)
    for record in records:
        assert record.keys() >= KEYS
        assert record["loss"] == pytest.approx(record["ar_loss"] + record["mdm_loss"], rel=1e-5)
        assert record["learning_rate"] == pytest.approx(float(schedule(record["step"] - 1)))
        assert record["grad_norm"] > 0
        assert record["tokens_per_second"] > 0
    assert {"eval_loss", "eval_ar_loss", "eval_mdm_loss"} <= records[-1].keys()
    assert not any("eval_loss" in record for record in records[:-1])


def test_the_loss_falls(tiny_run):
    first, last = read_metrics(tiny_run)[0], read_metrics(tiny_run)[-1]
    # The denoising term varies a lot with the draws; the next-token term falls from the logarithm of the vocabulary.
    assert last["ar_loss"] < 0.8 * first["ar_loss"]
    assert last["eval_loss"] < 0.8 * 2 * np.log(read_run_config(tiny_run).model.vocab_size)


def test_tensorboard_has_the_same_numbers(tiny_run):
    scalars = read_events(tiny_run)
    records = read_metrics(tiny_run)
    expected = {(name, r["step"]): value for r in records for name, value in r.items() if name != "step"}
    assert scalars.keys() == expected.keys()
    np.testing.assert_allclose([scalars[key] for key in expected], list(expected.values()), rtol=1e-6)


def test_summary(tiny_run):
    summary, last = json.loads((tiny_run / "summary.json").read_text()), read_metrics(tiny_run)[-1]
    same = ("step", "loss", "ar_loss", "mdm_loss", "learning_rate", "grad_norm", "eval_loss")
    assert {name: summary[name] for name in same} == {name: last[name] for name in same}
    assert 0 < summary["compile_seconds"] < summary["train_seconds"]
    assert summary["tokens_per_second"] > 0
    assert 0 <= summary["data_wait_share"] <= 1


def test_a_run_that_was_trained_says_so_and_stays(tiny_run, tiny_config, tmp_path, capsys):
    copy = shutil.copytree(tiny_run, tmp_path / "run")
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    loop.train(tiny_config, copy)
    assert f"{copy} has already been trained for 20 steps." in capsys.readouterr().out
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_an_interrupted_run_ends_as_if_nothing_had_happened(tiny_run, tiny_config, tmp_path, monkeypatch, capsys):
    workdir, steps = tmp_path / "run", []

    def interrupted(self):
        steps.append(None)
        if len(steps) == 15:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MetricsWriter, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.train(tiny_config, workdir)
    assert [record["step"] for record in read_metrics(workdir)] == [4, 8, 12]
    assert os.listdir(workdir / "checkpoints") == ["10"]
    assert not (workdir / "summary.json").exists()
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 16, "lo')

    states = []
    save = Checkpoints.save
    monkeypatch.setattr(
        Checkpoints, "save", lambda self, state, *more: (states.append(jax.device_get(state)), save(self, state, *more))
    )
    loop.train(tiny_config, workdir)
    assert "Continuing from step 10." in capsys.readouterr().out

    kept = [{name: r[name] for name in KEYS - {"tokens_per_second"}} for r in read_metrics(workdir)]
    assert kept == [{name: r[name] for name in KEYS - {"tokens_per_second"}} for r in read_metrics(tiny_run)]
    seconds = [record["seconds"] for record in read_metrics(workdir)]
    assert seconds == sorted(seconds)
    # The interrupted part's are on disk too: nothing waits in a buffer.
    assert {step for tag, step in read_events(workdir) if tag == "loss"} == {4, 8, 12, 16, 20}
    assert (workdir / "config.json").read_bytes() == (tiny_run / "config.json").read_bytes()

    restored, uninterrupted = rf.load(workdir).params, rf.load(tiny_run).params
    assert jax.tree.structure(restored) == jax.tree.structure(uninterrupted)
    for leaves in zip(*map(jax.tree.leaves, (restored, uninterrupted, states[-1].params)), strict=True):
        assert np.array_equal(leaves[0], leaves[1])  # bit for bit what the run without interruption has
        assert np.array_equal(leaves[0], leaves[2])  # and what was trained is what is loaded
    assert int(states[-1].step) == 20


@pytest.mark.parametrize(
    ("section", "values", "difference"),
    [
        ("optimizer", {"learning_rate": 0.5}, "optimizer.learning_rate is 0.02 there and 0.5 here"),
        ("train", {"steps": 40}, "train.steps is 20 there and 40 here"),
        ("model", {"hidden_size": 64}, "model.hidden_size is 32 there and 64 here"),
        ("slots", {"sizes": (4,)}, "slots.sizes is [4, 8, 16, 32] there and [4] here"),
    ],
)
def test_another_configuration_is_refused_by_field(section, values, difference, tiny_run, tiny_config):
    before = sorted(tiny_run.rglob("*"))
    with pytest.raises(WorkdirError) as caught:
        loop.train(with_values(tiny_config, section, **values), tiny_run)
    assert f"{tiny_run} already holds a run with another configuration ({difference})" in str(caught.value)
    assert sorted(tiny_run.rglob("*")) == before


def json_config(tiny_config, tmp_path, examples, **values):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    values = {"source": "json", "train_files": (str(path),), "eval_examples": 2} | values
    return with_values(tiny_config, "data", **values)


EXAMPLE = {"query": "abc", "response": "def"}


@pytest.mark.parametrize(
    ("examples", "values", "sentence"),
    [
        ([EXAMPLE] * 2, {}, "data.eval_examples is 2, but the training files have 2 examples"),
        ([{"query": "abc", "response": " "}], {}, "no example to train on; of 1 read, 0 have an empty prompt and 1"),
        ([{"query": "a" * 200, "response": "b"}] * 4, {}, "None of the 2 examples can be used: 2 are longer than 96"),
        ([EXAMPLE, {"query": "abc"}], {}, "line 2: expected the fields 'query' and 'response', or 'messages', or"),
        ([EXAMPLE] * 4, {"tokenizer_vocab_size": 8}, "A tokenizer of 8 tokens is too small"),
        ([EXAMPLE] * 4, {"train_files": ("nowhere.jsonl",)}, "nowhere.jsonl: there is no such file."),
        ([EXAMPLE] * 4, {"tokenizer": "nowhere.model"}, "nowhere.model: there is no such tokenizer file."),
    ],
)
def test_data_that_cannot_be_used_is_refused_before_anything_is_written(
    examples, values, sentence, tiny_config, tmp_path
):
    with pytest.raises(DataError) as caught:
        loop.train(json_config(tiny_config, tmp_path, examples, **values), tmp_path / "run")
    assert sentence in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_too_small_is_refused(tiny_config, tmp_path):
    with pytest.raises(ConfigError, match=r"^model\.vocab_size is 40, too small for the tokenizer's \d+ tokens; use 0"):
        loop.train(with_values(tiny_config, "model", vocab_size=40), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_batch_that_cannot_be_split_is_refused(tiny_config, tmp_path, monkeypatch):
    mesh = SimpleNamespace(shape={"data": 3, "fsdp": 1, "tensor": 1}, size=3)
    monkeypatch.setattr(loop, "make_mesh", lambda config: mesh)
    with pytest.raises(ConfigError, match=r"^train\.batch_size is 4, not divisible by the 3 devices "):
        loop.train(tiny_config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_configured_vocabulary_may_be_larger(tiny_config, tiny_run):
    tokenizer = load_tokenizer(tiny_run / "tokenizer")
    resolved = loop.resolve(with_values(tiny_config, "model", vocab_size=64), tokenizer)
    assert resolved.model.vocab_size == 64
    assert loop.resolve(tiny_config, tokenizer).model.vocab_size == tokenizer.vocab_size


# ---- what a run survives -------------------------------------------------------------------------------------------


def short(tiny_config, **sections):
    """Six steps with a record and a checkpoint of each."""
    config = with_values(tiny_config, "train", steps=6, log_every=1)
    config = with_values(config, "checkpoint", save_every=1, keep=10)
    for section, values in sections.items():
        config = with_values(config, section, **values)
    return config


def test_a_run_that_diverges_ends_with_its_checkpoints_as_they_were(tiny_config, tmp_path, capsys):
    workdir = tmp_path / "run"
    config = short(tiny_config, optimizer={"learning_rate": 1e38, "clip_norm": 1e30}, train={"max_skipped": 2})
    with pytest.raises(loop.DivergedError) as caught:
        loop.train(config, workdir)
    out = capsys.readouterr().out
    first = int(out.partition("Step ")[2].partition(":")[0])
    assert f"Step {first}: the loss or its gradient is not finite; nothing was updated (1 such in a row, 2 end" in out
    assert str(caught.value).startswith(f"Step {first + 1}: the loss or its gradient is not finite, as in the 2 steps")
    whole = sorted(map(int, os.listdir(workdir / "checkpoints")))
    assert whole and max(whole) < first + 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(rf.load(workdir).params))


@pytest.mark.slow
def test_a_signal_saves_the_step_under_way(tiny_config, tmp_path, monkeypatch, capsys):
    workdir = tmp_path / "run"
    config = short(tiny_config, checkpoint={"save_every": 100})
    monkeypatch.setattr(loop.StopRequest, "after", lambda self, step: signal.SIGTERM if step == 3 else None)
    loop.train(config, workdir)
    assert "Stopped by SIGTERM after step 3 of 6; saved. The same command continues." in capsys.readouterr().out
    assert os.listdir(workdir / "checkpoints") == ["3"]
    assert not (workdir / "summary.json").exists()
    monkeypatch.setattr(loop.StopRequest, "after", lambda self, step: signal.SIGINT if step == 5 else None)
    with pytest.raises(KeyboardInterrupt):
        loop.train(config, workdir)
    assert sorted(os.listdir(workdir / "checkpoints")) == ["3", "5"]


@pytest.mark.slow
def test_a_run_goes_on_with_other_settings_that_compute_the_same(tiny_run, tiny_config, tmp_path, capsys):
    workdir = shutil.copytree(tiny_run, tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints" / "20")
    config = with_values(tiny_config, "mesh", data=-1, fsdp=1)
    config = with_values(with_values(config, "train", eval_every=5), "checkpoint", keep_best=1, save_every=3)
    config = with_values(config, "data", cache_dir=str(tmp_path / "cache"))
    loop.train(config, workdir)
    assert "Continuing from step 10." in capsys.readouterr().out
    got, expected = rf.load(workdir).params, rf.load(tiny_run).params
    assert all(map(np.array_equal, *map(jax.tree.leaves, (got, expected))))
    assert read_run_config(epath.Path(workdir)).checkpoint.keep_best == 1


@pytest.mark.slow
def test_passes_over_the_data_are_counted_in_steps(tiny_config, tmp_path, capsys):
    """Every example has been trained on as often as asked for when the last step is done."""
    config = with_values(with_values(tiny_config, "data", synthetic_examples=48), "train", epochs=2, steps=0)
    loop.train(config, tmp_path)
    steps = read_run_config(tmp_path).train.steps
    assert json.loads((tmp_path / "summary.json").read_text())["step"] == steps
    assert f"Passes over the data: 2, in {steps} steps." in capsys.readouterr().out
    dataset = load_dataset(config.data, seed=0)
    batches = make_batches(config.data, dataset.train, seed=0, batch_size=4)
    seen = np.concatenate([batches[step]["example_ids"].ravel() for step in range(steps)])
    assert np.all(np.bincount(seen[seen >= 0], minlength=len(dataset.train)) == 2)
    loop.train(config, tmp_path)
    assert "has already been trained" in capsys.readouterr().out


@pytest.mark.slow
def test_data_that_changed_since_the_checkpoint_are_refused(tiny_config, tmp_path):
    examples = [{"query": "abc" * n, "response": "cba"} for n in range(1, 9)]
    config = short(json_config(tiny_config, tmp_path, examples), train={"steps": 2})
    workdir = tmp_path / "run"
    loop.train(config, workdir)
    shutil.rmtree(workdir / "checkpoints" / "2")
    json_config(tiny_config, tmp_path, examples[::-1])
    with pytest.raises(CheckpointError, match="was trained on other data"):
        loop.train(config, workdir)
    loop.train(with_values(config, "checkpoint", accept_changed_data=True), workdir)
    assert (workdir / "summary.json").exists()


@pytest.mark.slow
def test_a_profile_is_written(tiny_config, tmp_path, capsys):
    workdir = tmp_path / "run"
    loop.train(short(tiny_config, train={"profile_steps": (2, 3)}), workdir)
    assert f"Profile of steps 2 to 3: {workdir}/profile." in capsys.readouterr().out
    assert list((workdir / "profile").rglob("*.xplane.pb"))


# ---- beginning with given weights ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_begins_with_the_weights_and_tokenizer_of_another(tiny_run, tiny_config, tmp_path):
    config = with_values(tiny_config, "optimizer", warmup_steps=1)  # the first step's rate is 0
    config = with_values(config, "train", init_from=str(tiny_run), steps=1, log_every=1)
    loop.train(config, tmp_path / "run")
    got, expected = rf.load(tmp_path / "run"), rf.load(tiny_run)
    assert all(map(np.array_equal, *map(jax.tree.leaves, (got.params, expected.params))))
    assert got.tokenizer.files == expected.tokenizer.files


def test_weights_of_another_model_are_refused(tiny_run, tiny_config, tmp_path):
    config = with_values(tiny_config, "train", init_from=str(tiny_run))
    with pytest.raises(CheckpointError) as caught:
        loop.train(with_values(config, "model", num_hidden_layers=2), tmp_path / "run")
    sentence = f"{tiny_run} holds the weights of another model: model.num_hidden_layers is 1 there and 2 here."
    assert str(caught.value) == sentence
    assert not (tmp_path / "run").exists()
    with pytest.raises(CheckpointError, match=r"^nowhere, which train\.init_from names, is not a directory\.$"):
        loop.train(with_values(tiny_config, "train", init_from="nowhere"), tmp_path / "other")


@pytest.mark.slow
def test_adapters_are_saved_alone_resumed_and_merged(tiny_run, tiny_config, tmp_path, monkeypatch):
    adapters = {"rank": 2, "targets": ("q_proj", "down_proj")}
    config = short(tiny_config, train={"init_from": str(tiny_run)}, lora=adapters)
    loop.train(config, tmp_path / "whole")
    monkeypatch.setattr(loop.StopRequest, "after", lambda self, step: signal.SIGTERM if step == 3 else None)
    loop.train(config, tmp_path / "run")
    monkeypatch.undo()
    loop.train(config, tmp_path / "run")
    got, whole, base = (rf.load(path) for path in (tmp_path / "run", tmp_path / "whole", tiny_run))
    assert all(map(np.array_equal, *map(jax.tree.leaves, (got.params, whole.params))))
    changed = {
        jax.tree_util.keystr(path)
        for (path, leaf), other in zip(
            jax.tree_util.tree_leaves_with_path(got.params), jax.tree.leaves(base.params), strict=True
        )
        if not np.array_equal(leaf, other)
    }
    assert changed == {"['layers']['self_attn']['q_proj']['kernel']", "['layers']['mlp']['down_proj']['kernel']"}
    saved = ocp.StandardCheckpointHandler().metadata(epath.Path(tmp_path / "run" / "checkpoints" / "6" / "params"))
    assert sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(getattr(saved, "tree", saved))) == 2 * (32 * 2 + 2 * 32)


@pytest.mark.slow
def test_adapters_of_weights_that_changed_are_refused(tiny_run, tiny_config, tmp_path):
    base = shutil.copytree(tiny_run, tmp_path / "base")
    config = short(tiny_config, train={"init_from": str(base), "steps": 2}, lora={"rank": 1})
    loop.train(config, tmp_path / "run")
    shutil.rmtree(base / "checkpoints" / "20")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    for use in (lambda: loop.train(config, tmp_path / "run"), lambda: rf.load(tmp_path / "run")):
        with pytest.raises(CheckpointError, match=r"adapts other weights than train\.init_from now holds"):
            use()


@pytest.mark.slow
def test_a_directory_in_use_is_refused(tiny_config, tmp_path, monkeypatch):
    workdir, evaluate = tmp_path / "run", loop.held_out_loss

    def meanwhile(*arguments):
        with pytest.raises(WorkdirError) as caught:
            loop.train(short(tiny_config), workdir)
        assert str(caught.value).startswith(f"Another process is training in {workdir}; wait")
        return evaluate(*arguments)

    monkeypatch.setattr(loop, "held_out_loss", meanwhile)
    loop.train(short(tiny_config), workdir)
    assert (workdir / "summary.json").exists()
    loop.train(short(tiny_config), workdir)  # nobody is left in it


def test_special_tokens_that_are_not_the_tokenizers_are_refused(tiny_config, tmp_path):
    with pytest.raises(
        ConfigError, match=r"^model\.eos_token_ids is \(0,\), but the tokenizer's is \(1,\), which decides"
    ):
        loop.train(with_values(tiny_config, "model", eos_token_ids=(0,)), tmp_path / "run")
    assert not (tmp_path / "run").exists()
