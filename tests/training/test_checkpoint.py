"""Run directories: claiming, checkpoints, and what is said when they do not fit."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.config import CheckpointConfig, Config, OptimizerConfig, TrainConfig
from refusion_jax.huggingface import CheckpointError
from refusion_jax.training.checkpoint import (
    Checkpoints,
    WorkdirError,
    claim_workdir,
    read_run_config,
    restore_params,
    write_json,
)
from refusion_jax.training.state import TrainState


def make_state(step, scale=1.0):
    params = {"layers": {"kernel": jnp.arange(6.0).reshape(2, 3) * scale}, "norm": {"scale": jnp.ones(3) * scale}}
    return TrainState(jnp.int32(step), params, {"mu": jax.tree.map(lambda leaf: leaf * 10, params)})


def assert_equal(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert all(map(np.array_equal, jax.tree.leaves(got), jax.tree.leaves(expected)))


def test_the_newest_checkpoint_comes_back_and_older_ones_go(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=2))
    for step in (5, 10, 15):
        checkpoints.save(make_state(step, scale=step))
    checkpoints.close()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["10", "15"]
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=2))
    assert_equal(checkpoints.restore(make_state(0, scale=0.0)), make_state(15, scale=15))
    checkpoints.close()


def test_without_a_checkpoint_the_state_stays(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    state = make_state(0)
    assert checkpoints.restore(state) is state
    checkpoints.close()


def test_an_unfinished_checkpoint_is_passed_over(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(make_state(5))
    checkpoints.close()
    unfinished = tmp_path / "checkpoints" / "9.orbax-checkpoint-tmp-1"
    (unfinished / "params").mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    assert int(checkpoints.restore(make_state(0)).step) == 5
    checkpoints.close()


def test_a_checkpoint_of_another_model_is_refused(tmp_path, tiny_run, tiny_config):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(make_state(5))
    other = make_state(0)
    del other.params["norm"]
    with pytest.raises(CheckpointError, match=r"^Checkpoint 5 of .*checkpoints cannot be read: "):
        checkpoints.restore(other)
    checkpoints.close()
    model = dataclasses.replace(tiny_config.model, vocab_size=24)
    with pytest.raises(CheckpointError, match=r"^Checkpoint 5 of .*checkpoints does not match its config.json: "):
        restore_params(tmp_path, model)


def test_a_work_directory_is_claimed_once(tmp_path):
    config, workdir = Config(), tmp_path / "runs" / "one"
    claim_workdir(workdir, config)
    claim_workdir(workdir, config)
    assert os.listdir(workdir) == ["config.json"]
    assert read_run_config(workdir) == config
    other = Config(train=TrainConfig(steps=7_000, seed=3), optimizer=OptimizerConfig(learning_rate=0.5, beta1=0.5))
    with pytest.raises(WorkdirError) as caught:
        claim_workdir(workdir, other)
    message = str(caught.value)
    assert message.startswith(f"{workdir} already holds a run with another configuration (optimizer.beta1 is 0.9 there")
    assert (
        "optimizer.learning_rate is 0.003 there and 0.5 here; train.seed is 0 there and 3 here; and 1 more)" in message
    )
    assert read_run_config(workdir) == config


@pytest.mark.parametrize("content", ["{", "", "[]", '{"model": {}}'])
def test_a_directory_that_cannot_be_claimed(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(WorkdirError, match=rf"^{tmp_path} "):
        claim_workdir(tmp_path, Config())
    assert (tmp_path / "config.json").read_text() == content


def test_a_file_in_place_of_the_directory(tmp_path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(WorkdirError, match="cannot be used as a work directory"):
        claim_workdir(tmp_path / "run", Config())


def test_write_json_never_leaves_half_a_file(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"b": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["summary.json"]
