"""Logits against `transformers` on the CPU in float32; `make test-parity` installs it and runs these."""

import json

import numpy as np
import pytest
from parity import transformers_models as reference

import refusion_jax as rf
from refusion_jax.config import DTYPES
from refusion_jax.huggingface import export_checkpoint

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module", autouse=True)
def _needs_pytorch():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")


@pytest.mark.parametrize("shards", [1, reference.NUM_SHARDS])
@pytest.mark.parametrize("name", reference.MODELS)
def test_logits(name, shards, tmp_path):
    """Sorted and permuted position IDs, to 2e-4; logits spread over several units."""
    theirs = reference.make_model(name)
    reference.save_model(theirs, tmp_path, shards)
    assert len(list(tmp_path.glob("*.safetensors"))) >= shards
    ours = rf.load(tmp_path)
    tokens, positions = reference.draw_inputs(theirs.config)
    for position_ids in positions.values():
        expected = reference.compute_logits(theirs, tokens, position_ids)
        assert expected.std() > 0.3
        np.testing.assert_allclose(rf.logits(ours, tokens, position_ids), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", reference.RECORDED)
def test_the_recordings_are_what_transformers_computes(name, tmp_path):
    reference.record(name, tmp_path)
    recorded = np.load(reference.RECORDINGS / name / reference.CASE_NAME)
    again = np.load(tmp_path / name / reference.CASE_NAME)
    assert set(recorded) == set(again)
    for array in again:
        np.testing.assert_allclose(recorded[array], again[array], atol=1e-5, rtol=0)
    configs = [json.loads((place / name / "config.json").read_text()) for place in (reference.RECORDINGS, tmp_path)]
    assert configs[0]["architectures"] == configs[1]["architectures"]


@pytest.mark.usefixtures("quick_compilation")
def test_a_trained_model_leaves_for_transformers(tiny_run, tmp_path):
    """The same logits from what is exported, and the same tokens for the same texts."""
    import transformers

    model = rf.load(tiny_run)
    export_checkpoint(model.params, model.config, tmp_path / "out", model.tokenizer, max_shard_size=20_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    tokens, positions = reference.draw_inputs(theirs.config)
    for position_ids in positions.values():
        expected = reference.compute_logits(theirs, tokens, position_ids)
        np.testing.assert_allclose(rf.logits(model, tokens, position_ids), expected, atol=2e-4, rtol=0)
    assert theirs.config.mask_token_id == model.config.mask_token_id
    assert theirs.generation_config.eos_token_id == model.config.eos_token_ids[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("S:1+2+5?", "Q:17,13?", "R:aab?"):
        assert tokenizer(text)["input_ids"] == model.tokenizer.encode(text)
        assert tokenizer.decode(model.tokenizer.encode(text)) == text
    assert tokenizer.mask_token_id == model.tokenizer.mask_token_id
    assert tokenizer.eos_token_id == model.tokenizer.eos_token_id


@pytest.mark.parametrize("name", ["qwen3-tied", "llama3"])
def test_left_to_right_decoding(name, tmp_path):
    """Token for token what `generate` makes greedily, of prompts of several lengths in one batch."""
    theirs = reference.make_model(name)
    reference.save_model(theirs, tmp_path, 1)
    model = rf.load(tmp_path)
    prompts = [np.random.default_rng(n).integers(5, model.config.vocab_size, n).tolist() for n in (1, 4, 9)]
    config = rf.DecodeConfig(gen_length=24)
    found = rf.generate(model, prompts, config, method=rf.Method("autoregressive"))
    expected = [reference.generate_greedily(theirs, prompt, 24, model.config.eos_token_ids) for prompt in prompts]
    assert found.tokens == expected and len({token for tokens in expected for token in tokens}) > 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["qwen3-yarn", "qwen3-tied", "llama3", "llama-bias", "qwen2"])
def test_there_and_back(name, dtype, tmp_path):
    """What `transformers` saved, exported again in a type: it reads back every bit, in our names for its tensors."""
    import torch
    import transformers

    theirs = reference.make_model(name).to(getattr(torch, dtype))
    theirs.save_pretrained(tmp_path / "theirs")
    model = rf.load(tmp_path / "theirs")
    assert model.config.param_dtype == dtype
    export_checkpoint(model.params, model.config, tmp_path / "ours", max_shard_size=20_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=getattr(torch, dtype))
    expected, got = theirs.state_dict(), again.state_dict()
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[tensor], got[tensor]) for tensor in expected)
