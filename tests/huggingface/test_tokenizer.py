"""The tokenizer beside a config.json: its mask, and files that lead elsewhere."""

import dataclasses
import json

import byte_level
import pytest
from etils import epath

from refusion_jax.huggingface import CheckpointError, read_tokenizer
from refusion_jax.training import loop


def test_a_directory_without_one(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert read_tokenizer(tmp_path) is None


def test_the_mask_is_the_configuration_s(tmp_path):
    byte_level.write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"mask_token_id": 5}))
    assert read_tokenizer(tmp_path).mask_token_id == 5


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_leads_out_is_refused_for_decoding_and_training_alike(name, tmp_path, tiny_config):
    directory = byte_level.write(tmp_path / "model")
    (directory / name).rename(tmp_path / name)
    (directory / name).symlink_to(tmp_path / name)
    begun = dataclasses.replace(tiny_config, train=dataclasses.replace(tiny_config.train, init_from=str(directory)))
    for read in (lambda: read_tokenizer(directory), lambda: loop._given_tokenizer(begun, epath.Path(tmp_path / "run"))):
        with pytest.raises(CheckpointError, match="leads out of"):
            read()
