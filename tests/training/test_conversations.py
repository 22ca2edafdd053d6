"""A run on conversations with a byte-level `tokenizer.json`: it trains, continues, decodes and is begun from."""

import dataclasses
import json
import os
import shutil

import byte_level
import jax
import numpy as np
import pytest
from etils import epath

import refusion_jax as rf
from refusion_jax.config import ConfigError
from refusion_jax.data import load_tokenizer
from refusion_jax.training import loop
from refusion_jax.training.metrics import read_metrics
from refusion_jax.training.run_directory import WorkdirError, read_run_config

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory):
    return byte_level.write(tmp_path_factory.mktemp("tokenizer") / "t", generation={"eos_token_id": [322, 320]})


@pytest.fixture(scope="module")
def config(tiny_config, tokenizer_directory, tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "chats.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i % 5}."}]}
        for i in range(40)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    data = dataclasses.replace(
        tiny_config.data, source="json", train_files=(str(file),), eval_examples=4, tokenizer=str(tokenizer_directory)
    )
    return dataclasses.replace(tiny_config, data=data)


@pytest.fixture(scope="module")
def run(config, tmp_path_factory, quick_compilation):
    workdir = tmp_path_factory.mktemp("runs") / "chats"
    loop.train(config, workdir)
    return workdir


def test_what_the_tokenizer_decides(run, tokenizer_directory):
    tokenizer = load_tokenizer(tokenizer_directory)
    model = read_run_config(epath.Path(run)).model
    assert model.eos_token_ids == tokenizer.eos_token_ids == (322, 320)
    assert (model.vocab_size, model.mask_token_id) == (tokenizer.vocab_size, tokenizer.mask_token_id) == (327, 326)
    assert {path.name: path.read_bytes() for path in (run / "tokenizer").iterdir()} == tokenizer.files
    about = json.loads((run / "checkpoints" / "20" / "about" / "metadata").read_text())
    assert about["tokenizer"].keys() == tokenizer.files.keys()


def test_it_learns_and_decodes_conversations(run):
    records = read_metrics(run)
    assert records[-1]["ar_loss"] < 0.8 * records[0]["ar_loss"]
    model = rf.load(run)
    prompt = model.tokenizer.render(
        [{"role": "user", "content": "7?"}], add_generation_prompt=True, enable_thinking=True
    )
    result = rf.generate(model, [prompt], model.decode)
    assert result.text == [model.tokenizer.decode(result.tokens[0])]


@pytest.mark.slow
def test_it_continues_without_the_tokenizer_it_began_with(run, config, tmp_path, monkeypatch):
    workdir = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints" / "20")
    monkeypatch.setattr("refusion_jax.data.pipeline.load_tokenizer", lambda path: pytest.fail("the run has its own"))
    loop.train(config, workdir)
    got, expected = rf.load(workdir).params, rf.load(run).params
    assert all(map(np.array_equal, *map(jax.tree.leaves, (got, expected))))
    with pytest.raises(WorkdirError, match=r"data\.enable_thinking is True there and False here"):
        loop.train(dataclasses.replace(config, data=dataclasses.replace(config.data, enable_thinking=False)), workdir)


@pytest.mark.slow
def test_another_run_begins_with_its_weights_and_tokenizer(run, config, tmp_path):
    train = dataclasses.replace(config.train, steps=1, log_every=1, init_from=str(run))
    data = dataclasses.replace(config.data, tokenizer="")
    optimizer = dataclasses.replace(config.optimizer, warmup_steps=1)
    loop.train(dataclasses.replace(config, train=train, data=data, optimizer=optimizer), tmp_path / "run")
    assert sorted(os.listdir(tmp_path / "run" / "tokenizer")) == sorted(os.listdir(run / "tokenizer"))


@pytest.mark.parametrize(
    ("configured", "mask"),
    [({"mask_token_id": 5}, 5), ({"mask_token_id": None}, 326), ({}, 326), ({"mask_token_id": "x"}, 326), ([], 326)],
)
def test_a_hugging_face_directory_s_tokenizer_and_mask(config, tokenizer_directory, tmp_path, configured, mask):
    directory = shutil.copytree(tokenizer_directory, tmp_path / "hf")
    (directory / "config.json").write_text(json.dumps(configured))
    begun = dataclasses.replace(config, train=dataclasses.replace(config.train, init_from=str(directory)))
    tokenizer = loop._given_tokenizer(begun, epath.Path(tmp_path / "nowhere"))
    assert tokenizer.mask_token_id == loop.resolve(config, tokenizer).model.mask_token_id == mask


def test_a_mask_beyond_the_tokenizer_is_refused(config, tokenizer_directory):
    with pytest.raises(ConfigError, match=r"^The mask token of the weights, 900, is beyond .* 325 tokens;"):
        loop.resolve(config, load_tokenizer(tokenizer_directory, 900))
