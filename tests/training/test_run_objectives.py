"""Whole runs of the other objectives: what they record, and that what they leave decodes as they were trained."""

import math

import pytest

import refusion_jax as rf
from refusion_jax.config import from_dict, loss_terms, to_dict
from refusion_jax.huggingface import export_checkpoint
from refusion_jax.training.loop import train
from refusion_jax.training.metrics import read_metrics

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.slow]


@pytest.mark.parametrize("objective", ["dream", "block_diffusion"])
def test_a_run_of_another_objective(objective, tiny_config, tmp_path):
    values = to_dict(tiny_config)
    values["train"] |= {"objective": objective, "eval_decode_examples": 2}
    values["data"]["pad_responses"] = 8
    values["slots"]["sizes"] = [4, 8]
    train(from_dict(type(tiny_config), values), tmp_path / "run")
    records = read_metrics(tmp_path / "run")
    assert records[-1]["eval_nats_per_token"] < 0.95 * math.log(47)  # tokens: it has learned something
    terms = {name for name in records[-1] if name in ("ar_loss", "mdm_loss")}
    assert terms == set(loss_terms(objective))
    evaluated = {name for name in records[-1] if name.startswith("eval_")}
    bounds = {"eval_mdm_bound"} if "mdm_loss" in terms else set()
    assert evaluated == {"eval_loss", "eval_nats_per_token", *(f"eval_{term}" for term in terms), *bounds}
    assert {"exact_match", "tokens_per_forward"} <= records[-1].keys()

    model = rf.load(tmp_path / "run")
    assert model.objective == objective
    assert model.block_lengths == ((4, 8) if objective == "block_diffusion" else ())
    config = rf.DecodeConfig(gen_length=16)
    out = rf.generate(model, ["S:1+2+3?", "Q:4,7?"], config)
    assert all(0 < forwards <= 16 for forwards in out.forwards)
    export_checkpoint(model.params, model.config, tmp_path / "exported", model.tokenizer, objective=model.objective)
    exported = rf.load(tmp_path / "exported")
    method = rf.Method("block_diffusion", block_length=8) if objective == "block_diffusion" else None
    assert rf.generate(exported, ["S:1+2+3?", "Q:4,7?"], config, method=method).tokens == out.tokens
