"""Run directories: claiming, checkpoints, and what is said when they do not fit."""

import dataclasses
import json
import os
import shutil
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from refusion_jax.config import CheckpointConfig, Config, ModelConfig, OptimizerConfig, TrainConfig, to_dict
from refusion_jax.files import write_json
from refusion_jax.huggingface import CheckpointError
from refusion_jax.training.checkpoint import About, Checkpoints
from refusion_jax.training.run_directory import WorkdirError, claim_workdir, read_run_config
from refusion_jax.training.state import TrainState

ABOUT = About({"model": to_dict(ModelConfig(hidden_size=32))}, "data", {"tokenizer.model": b"tokenizer"})


def make_state(step, scale=1.0):
    params = {"layers": {"kernel": jnp.arange(6.0).reshape(2, 3) * scale}, "norm": {"scale": jnp.ones(3) * scale}}
    none = jnp.int32(0)
    return TrainState(jnp.int32(step), params, {"mu": jax.tree.map(lambda leaf: leaf * 10, params)}, None, none, none)


def open_checkpoints(workdir, about=ABOUT, **values):
    return Checkpoints(epath.Path(workdir), CheckpointConfig(**values), about)


def assert_equal(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert all(map(np.array_equal, jax.tree.leaves(got), jax.tree.leaves(expected)))


def test_the_newest_checkpoint_comes_back_and_older_ones_go(tmp_path):
    checkpoints = open_checkpoints(tmp_path, keep=2)
    for step in (5, 10, 15):
        checkpoints.save(make_state(step, scale=step))
    checkpoints.close()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["10", "15"]
    checkpoints = open_checkpoints(tmp_path, keep=2)
    assert_equal(checkpoints.restore(make_state(0, scale=0.0)), make_state(15, scale=15))
    checkpoints.close()


def test_without_a_checkpoint_the_state_stays(tmp_path):
    checkpoints = open_checkpoints(tmp_path)
    state = make_state(0)
    assert checkpoints.restore(state) is state
    checkpoints.close()


def test_an_unfinished_checkpoint_is_passed_over(tmp_path):
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(make_state(5))
    checkpoints.close()
    unfinished = tmp_path / "checkpoints" / "9.orbax-checkpoint-tmp-1"
    (unfinished / "params").mkdir(parents=True)
    checkpoints = open_checkpoints(tmp_path)
    assert int(checkpoints.restore(make_state(0)).step) == 5
    checkpoints.close()


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(make_state(5))
    checkpoints.close()
    other = make_state(0)
    other.params["norm"] = {"weight": jnp.ones(4)}
    where = f"Checkpoint 5 of {tmp_path}/checkpoints"
    with closing(open_checkpoints(tmp_path)) as checkpoints, pytest.raises(CheckpointError) as caught:
        checkpoints.restore(other)
    assert str(caught.value).startswith(f"{where} does not match its config.json: norm/weight is missing (expe")
    about = dataclasses.replace(ABOUT, config={"model": to_dict(ModelConfig(hidden_size=64, remat="full"))})
    with closing(open_checkpoints(tmp_path, about)) as checkpoints, pytest.raises(CheckpointError) as caught:
        checkpoints.restore(make_state(0))
    assert str(caught.value) == (f"{where} is of another architecture: model.hidden_size is 32 there and 64 here.")


def test_a_checkpoint_of_other_data_is_refused_unless_told(tmp_path):
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(make_state(5))
    checkpoints.close()
    about = dataclasses.replace(ABOUT, data_fingerprint="other")
    with closing(open_checkpoints(tmp_path, about)) as checkpoints, pytest.raises(CheckpointError) as caught:
        checkpoints.restore(make_state(0))
    assert "was trained on other data" in str(caught.value)
    assert "checkpoint.accept_changed_data" in str(caught.value)
    with closing(open_checkpoints(tmp_path, about, accept_changed_data=True)) as checkpoints:
        assert int(checkpoints.restore(make_state(0)).step) == 5


def test_which_checkpoints_stay(tmp_path):
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: 2.0, 5: 3.0, 6: None, 7: 9.0}
    with closing(open_checkpoints(tmp_path, keep=1, keep_every=3, keep_best=2)) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(make_state(step), None if loss is None else {"eval_loss": loss, "exact_match": 0.5})
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [2, 3, 4, 6, 7]
    with closing(open_checkpoints(tmp_path / "more", keep=1, keep_best=1, best_metric="exact_match")) as checkpoints:
        for step, match in enumerate((0.1, 0.7, 0.3), 1):
            checkpoints.save(make_state(step), {"eval_loss": match, "exact_match": match})
    assert sorted(os.listdir(tmp_path / "more" / "checkpoints")) == ["2", "3"]


def saved_twice(workdir):
    with closing(open_checkpoints(workdir)) as checkpoints:
        for step in (5, 10):
            checkpoints.save(make_state(step, scale=step))
    return workdir / "checkpoints" / "10"


def files(checkpoint):
    return sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != "files.json")


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("harm", [cut, flip, os.unlink])
def test_a_damaged_checkpoint_is_passed_over_whichever_file_it_is(harm, tmp_path, capfd):
    whole = saved_twice(tmp_path / "whole")
    some = [path for path in files(whole) if path.stat().st_size][::4]
    assert len(some) > 2
    for number, path in enumerate(some):
        workdir = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", workdir)
        harm(workdir / path.relative_to(tmp_path / "whole"))
        with closing(open_checkpoints(workdir)) as checkpoints:
            assert_equal(checkpoints.restore(make_state(0)), make_state(5, scale=5))
            checkpoints.save(make_state(10, scale=7))  # its place is free
        assert f"Warning: Checkpoint 10 of {workdir}/checkpoints is damaged (its file " in capfd.readouterr().err
        assert os.listdir(workdir / "damaged") == ["10"]
        assert sorted(os.listdir(workdir / "checkpoints")) == ["10", "5"]


def test_damage_that_no_list_of_files_tells_is_found_in_reading(tmp_path, capfd):
    checkpoint = saved_twice(tmp_path)
    (checkpoint / "files.json").unlink()
    for path in files(checkpoint / "rest"):
        path.unlink()
    with closing(open_checkpoints(tmp_path)) as checkpoints:
        assert int(checkpoints.restore(make_state(0)).step) == 5
    assert "Checkpoint 10 of" in capfd.readouterr().err
    assert os.listdir(tmp_path / "damaged") == ["10"]


def test_without_any_whole_checkpoint_nothing_begins_anew(tmp_path):
    checkpoint = saved_twice(tmp_path)
    for directory in (checkpoint, checkpoint.parent / "5"):
        (directory / "files.json").unlink()
        for path in files(directory / "rest"):
            path.unlink()
    with closing(open_checkpoints(tmp_path)) as checkpoints, pytest.raises(CheckpointError) as caught:
        checkpoints.restore(make_state(0))
    assert str(caught.value) == f"None of the checkpoints in {checkpoint.parent} can be read; move them away to begin."


def test_what_cannot_be_written_is_said_and_earlier_ones_stay(tmp_path, monkeypatch):
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(make_state(5))
    checkpoints._manager.wait_until_finished()
    write = ocp.StandardCheckpointHandler.async_save

    async def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ocp.StandardCheckpointHandler, "async_save", full)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.save(make_state(10))
        checkpoints.close()
    assert f"A checkpoint cannot be written to {tmp_path}/checkpoints: " in str(caught.value)
    assert "No space left on device" in str(caught.value)
    monkeypatch.setattr(ocp.StandardCheckpointHandler, "async_save", write)
    with closing(open_checkpoints(tmp_path)) as checkpoints:
        assert int(checkpoints.restore(make_state(0)).step) == 5


def test_a_work_directory_is_claimed_once(tmp_path):
    config, workdir = Config(), tmp_path / "runs" / "one"
    claim_workdir(workdir, config)
    claim_workdir(workdir, config)
    assert os.listdir(workdir) == ["config.json"]
    assert read_run_config(workdir) == config
    older = json.loads((workdir / "config.json").read_text())
    del older["train"]["max_skipped"], older["lora"]  # saved before there were such settings
    (workdir / "config.json").write_text(json.dumps(older))
    claim_workdir(workdir, config)
    other = Config(train=TrainConfig(steps=7_000, seed=3), optimizer=OptimizerConfig(learning_rate=0.5, beta1=0.5))
    with pytest.raises(WorkdirError) as caught:
        claim_workdir(workdir, other)
    message = str(caught.value)
    assert message.startswith(f"{workdir} already holds a run with another configuration (optimizer.beta1 is 0.9 there")
    assert (
        "optimizer.learning_rate is 0.003 there and 0.5 here; train.seed is 0 there and 3 here; and 1 more)" in message
    )
    assert read_run_config(workdir) == config


@pytest.mark.parametrize("content", ["{", "", "[]", '{"model": {"hidden_size": 7}}'])
def test_a_directory_that_cannot_be_claimed(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(WorkdirError, match=rf"^{tmp_path}[ /]"):
        claim_workdir(tmp_path, Config())
    assert (tmp_path / "config.json").read_text() == content


def test_a_file_in_place_of_the_directory(tmp_path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(WorkdirError, match="run cannot be written to: File exists"):
        claim_workdir(tmp_path / "run", Config())


def test_write_json_never_leaves_half_a_file(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"b": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["summary.json"]
