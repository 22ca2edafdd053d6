"""Loading, logits and generation as a caller meets them."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refusion_jax as rf
from refusion_jax import api
from refusion_jax.data import Tokenizer
from refusion_jax.decoding.batching import check_request

pytestmark = pytest.mark.usefixtures("quick_compilation")

REFERENCE = Path(__file__).parent / "data" / "reference"
PROMPTS = ["S:7+1+7+5?", "R:abc?", "Q:12,7?", "A:klmn?"]


@pytest.fixture(scope="module")
def model(tiny_run):
    return rf.load(tiny_run)


@pytest.fixture(scope="module")
def answers(model):
    return rf.generate(model, PROMPTS, batch_size=4)


@pytest.fixture
def copied_run(tiny_run, tmp_path):
    return shutil.copytree(tiny_run, tmp_path / "run")


# ---- load ----------------------------------------------------------------------------------------------------------


def test_load_a_run(model, tiny_config):
    assert model.decode == tiny_config.decode
    assert model.config.vocab_size == model.tokenizer.vocab_size
    assert model.config.mask_token_id == model.tokenizer.mask_token_id
    assert model.config.eos_token_ids == (model.tokenizer.eos_token_id,)
    assert model.module.config == model.config
    assert model.params["embed_tokens"]["embedding"].shape == (model.config.vocab_size, 32)
    assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(model.params))


def test_load_a_hugging_face_directory(tmp_path, tiny_run):
    model = rf.load(REFERENCE / "checkpoint")
    assert model.tokenizer is None
    assert model.decode == rf.DecodeConfig()
    case = np.load(REFERENCE / "cases" / "forward.npz")
    got = rf.logits(model, case["00.tokens"], case["00.position_ids"])
    np.testing.assert_allclose(got, case["00.logits"], atol=1e-4)

    with_tokenizer = shutil.copytree(REFERENCE / "checkpoint", tmp_path / "model")
    shutil.copy(tiny_run / "tokenizer" / "tokenizer.model", with_tokenizer)
    assert rf.load(str(with_tokenizer)).tokenizer.encode("S:1?") == Tokenizer.load(with_tokenizer).encode("S:1?")


def test_load_errors(tmp_path, copied_run):
    def message(path):
        with pytest.raises(rf.CheckpointError) as caught:
            rf.load(path)
        return str(caught.value)

    assert "is not a directory; give a run directory or a Hugging Face directory." in message(tmp_path / "nothing")
    assert "is not a directory" in message(copied_run / "config.json")
    (tmp_path / "empty").mkdir()
    assert "config.json is missing" in message(tmp_path / "empty")

    config = json.loads((copied_run / "config.json").read_text())
    tied = config | {"model": config["model"] | {"tie_word_embeddings": True}}
    (copied_run / "config.json").write_text(json.dumps(tied))
    assert "does not match its config.json" in message(copied_run)
    (copied_run / "config.json").write_text(json.dumps(config | {"trian": {}}))
    assert "Unknown config field 'trian'. Did you mean 'train'?" in message(copied_run)
    (copied_run / "config.json").write_text("{")
    assert "config.json is not the configuration of a run" in message(copied_run)
    (copied_run / "config.json").unlink()
    assert "config.json cannot be read (No such file or directory)" in message(copied_run)


def test_a_run_without_a_checkpoint(copied_run):
    shutil.rmtree(copied_run / "checkpoints")
    (copied_run / "checkpoints").mkdir()
    with pytest.raises(rf.CheckpointError, match="holds no finished checkpoint; train longer, or lower checkpoint"):
        rf.load(copied_run)


# ---- logits --------------------------------------------------------------------------------------------------------


def test_logits_are_those_of_the_module(model):
    tokens, position_ids = [[5, 6, 7, 8]], [[0, 9, 2, 3]]
    got = rf.logits(model, tokens, position_ids)
    assert got.shape == (1, 4, model.config.vocab_size)
    assert got.dtype == jnp.float32
    expected = model.module.apply({"params": model.params}, jnp.array(tokens), jnp.array(position_ids))
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert not np.allclose(got, rf.logits(model, tokens, [[0, 1, 2, 3]]), atol=1e-3)


@pytest.mark.parametrize(
    ("tokens", "position_ids", "sentence"),
    [
        ([[1, 2]], [[0, 1, 2]], "tokens have shape (1, 2) and position_ids (1, 3); both must be (batch, length)."),
        ([1, 2], [0, 1], "tokens have shape (2,) and position_ids (2,); both must be (batch, length)."),
        ([[1, 1_000]], [[0, 1]], "tokens must lie in [0, 47), the vocabulary."),
        ([[-1, 1]], [[0, 1]], "tokens must lie in [0, 47), the vocabulary."),
    ],
)
def test_logits_refuses(tokens, position_ids, sentence, model):
    with pytest.raises(rf.ConfigError) as caught:
        rf.logits(model, tokens, position_ids)
    assert str(caught.value) == sentence.replace("47", str(model.config.vocab_size))


# ---- generate ------------------------------------------------------------------------------------------------------


def test_text_and_token_prompts_have_the_same_answers(model, answers):
    tokens = [model.tokenizer.encode(prompt) for prompt in PROMPTS]
    mixed = [tokens[0], PROMPTS[1], tuple(tokens[2]), np.array(tokens[3])]
    assert rf.generate(model, mixed, batch_size=4) == answers
    assert answers.text == [model.tokenizer.decode(response) for response in answers.tokens]
    assert [len(field) for field in vars(answers).values()] == [4] * 7


def test_a_model_without_tokenizer_answers_in_tokens(model, answers):
    bare = dataclasses.replace(model, tokenizer=None)
    tokens = [model.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert rf.generate(bare, tokens, batch_size=4) == dataclasses.replace(answers, text=None)
    with pytest.raises(rf.ConfigError, match="The model has no tokenizer; give prompts as lists of token IDs"):
        rf.generate(bare, PROMPTS)


def test_one_config_per_prompt(model, answers):
    """A mixture gives each prompt what it gets when all have its settings."""
    default = model.decode
    shorter = dataclasses.replace(default, gen_length=8, slot_size=8, serial_num_blocks=1, algorithm="paper")
    of_shorter = rf.generate(model, PROMPTS, shorter, batch_size=4)
    mixed = rf.generate(model, PROMPTS, [default, shorter, shorter, default], batch_size=4)
    chosen = [answers, of_shorter, of_shorter, answers]
    assert mixed.committed == [result.committed[i] for i, result in enumerate(chosen)]
    assert mixed.forwards == [result.forwards[i] for i, result in enumerate(chosen)]
    assert max(map(len, of_shorter.committed)) <= 8 < max(map(len, answers.committed))


def test_samples_depend_on_seed_and_index_alone(model):
    hot = dataclasses.replace(model.decode, temperature=1.0)
    prompts = [PROMPTS[0]] * 7
    progress = []
    samples = rf.generate(model, prompts, hot, seed=3, batch_size=4, on_progress=progress.append)
    assert progress == [4, 7]
    assert len(set(map(tuple, samples.tokens))) > 1
    assert rf.generate(model, prompts, hot, seed=3, batch_size=3).tokens == samples.tokens
    assert rf.generate(model, prompts, hot, seed=4, batch_size=4).tokens != samples.tokens


def test_a_vocabulary_padded_beyond_the_tokenizer_has_no_text_there(model, monkeypatch):
    size = model.tokenizer.vocab_size
    letter = model.tokenizer.encode("R")
    generation = rf.Generation([[*letter, size + 3, *letter]], None, [[]], [[]], [1], ["length"], [1.0])
    monkeypatch.setattr(api, "decode_prompts", lambda *arguments: generation)
    assert rf.generate(model, ["S:1?"]).text == ["RR"]


def test_no_prompts(model):
    result = rf.generate(model, [])
    assert (result.tokens, result.text, result.forwards) == ([], [], [])


@pytest.mark.parametrize(
    ("prompts", "arguments", "sentence"),
    [
        ("S:1?", {}, "prompts is a single text; give a list of prompts."),
        (["S:1?"], {"batch_size": 0}, "batch_size is 0; decode at least one row at once."),
        (["S:1?"] * 3, {"config": [rf.DecodeConfig()] * 2}, "2 configs for 3 prompts; give one, or one per prompt."),
        (["\ud800"], {}, "Prompt 0: The prompt has half a surrogate pair, which is no Unicode text."),
        (["S:1?", ""], {}, "Prompt 1: The prompt is empty; give at least one token."),
        ([[5], [6], [5, 64_000]], {}, "Prompt 2: Prompt token 64000 lies outside the vocabulary of"),
        (["S:1?", "R:" + "a" * 143], {}, "Prompt 1: The prompt has 145 tokens, with gen_length 16 that makes 161"),
    ],
)
def test_generate_refuses(prompts, arguments, sentence, model):
    with pytest.raises(rf.ConfigError) as caught:
        rf.generate(model, prompts, **arguments)
    assert str(caught.value).startswith(sentence)


def test_the_longest_prompt_that_fits(model):
    prompt = "R:" + "a" * 142
    assert len(model.tokenizer.encode(prompt)) + model.decode.rounded_length == model.config.max_position_embeddings
    check_request(model.tokenizer.encode(prompt), model.decode, model.config)


@pytest.mark.parametrize(
    ("prompts", "arguments", "sentence"),
    [
        ([5, 6, 7], {}, "prompts is a single list of token IDs"),
        ([[5.0, 6.5]], {}, "Prompt 0: The prompt holds something other than token IDs"),
        (["S:1?", "S:\u4e2d?"], {}, "Prompt 1: The prompt has characters that the tokenizer does not know."),
        (["S:1?"], {"seed": -1}, "seed is -1; it must be a whole number"),
        (["S:1?"], {"seed": 2**40}, "seed is 1099511627776; it must be a whole number"),
        (["S:1?"], {"batch_size": 1.5}, "batch_size is 1.5"),
        (["S:1?"], {"config": [{"gen_length": 8}]}, "config holds something other than a DecodeConfig"),
    ],
)
def test_generate_refuses_other_types(prompts, arguments, sentence, model):
    with pytest.raises(rf.ConfigError, match=sentence):
        rf.generate(model, prompts, **arguments)


def test_a_huge_batch_size_costs_nothing(model, answers):
    assert rf.generate(model, iter(PROMPTS), batch_size=10**9).tokens == answers.tokens


def test_numpy_settings_and_prompts(model, answers):
    config = dataclasses.replace(
        model.decode,
        gen_length=np.int64(model.decode.gen_length),
        slot_threshold=np.float64(model.decode.slot_threshold),
    )
    prompts = [np.array(model.tokenizer.encode(prompt)) for prompt in PROMPTS]
    assert rf.generate(model, prompts, config, batch_size=4).tokens == answers.tokens


@pytest.mark.parametrize("position", [-1, 10**6])
def test_logits_refuse_positions_the_model_lacks(model, position):
    with pytest.raises(rf.ConfigError, match="position_ids must lie in"):
        rf.logits(model, [[4, 5]], [[0, position]])


def test_a_run_whose_parameters_do_not_fit_its_configuration(copied_run):
    config = json.loads((copied_run / "config.json").read_text())
    config["model"]["hidden_size"] = 48
    (copied_run / "config.json").write_text(json.dumps(config))
    with pytest.raises(rf.CheckpointError, match=r"embed_tokens.*has shape \(\d+, 32\), not \(\d+, 48\)"):
        rf.load(copied_run)


def test_a_run_without_a_resolved_configuration(copied_run):
    (copied_run / "config.json").write_text("{}")
    with pytest.raises(rf.CheckpointError, match="vocab_size is 0"):
        rf.load(copied_run)
