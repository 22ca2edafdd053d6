"""The training view: recorded cases of the authors' code, and the definition checked token by token in plain Python."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from refusion_jax import slots
from refusion_jax.config import SlotsConfig
from refusion_jax.huggingface import read_model_config, read_params
from refusion_jax.modeling import Transformer
from refusion_jax.objectives import hybrid_loss

REFERENCE = Path(__file__).parent / "data" / "reference"
LENGTH, ROWS = 128, 4


def recorded(case):
    """A recorded batch and its draws, padded to one static shape; one example per row."""
    tokens = np.array(case["input_ids"], np.int32)
    rows, length = tokens.shape
    padded = np.zeros((ROWS, LENGTH), np.int32)
    padded[:rows, :length] = tokens
    totals = np.zeros(ROWS, np.int32)
    totals[:rows] = np.array(case["attention_mask"]).sum(1)
    prompts = np.zeros((ROWS, 1), np.int32)
    prompts[:rows, 0] = case["prompt_lengths"]
    index = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
    batch = slots.Batch(
        tokens=padded,
        segment_ids=(index < totals[:, None]).astype(np.int32),
        position_ids=index,
        prompt_lengths=prompts,
        response_lengths=totals[:, None] - prompts,
        example_ids=np.zeros((ROWS, 1), np.int32),
        epochs=np.zeros((ROWS, 1), np.int32),
    )
    sizes, p = np.full((ROWS, 1), 4, np.int32), np.full((ROWS, 1), 0.5, np.float32)
    mask_uniforms, order_keys = np.ones((2, ROWS, LENGTH), np.float32)
    for row, draw in enumerate(case["draws"]):
        sizes[row], p[row] = draw["slot_size"], draw["p_mask"]
        for slot, uniform in enumerate(draw["slot_uniforms"]):
            start = prompts[row, 0] + slot * draw["slot_size"]
            span = slice(start, min(start + draw["slot_size"], totals[row]))
            mask_uniforms[row, span] = uniform
            if slot in draw["clean_order"]:
                order_keys[row, span] = draw["clean_order"].index(slot)
    return batch, slots.Draws(sizes, p, mask_uniforms, order_keys)


@pytest.fixture(scope="module")
def cases():
    return json.loads((REFERENCE / "cases" / "training.json").read_text())


@pytest.fixture(scope="module")
def model():
    config = read_model_config(REFERENCE / "checkpoint")
    return Transformer(config), read_params(REFERENCE / "checkpoint", config)


def test_recorded_views(cases):
    view_of = jax.jit(lambda batch, draws: slots.training_view(batch, draws, mask_token_id=2))
    for number, case in enumerate(cases):
        batch, draws = recorded(case)
        view = view_of(batch, draws)
        rows, length = np.array(case["input_ids"]).shape
        for name in ("tokens", "targets", "is_masked", "position_ids"):
            expected = np.array(case["buffer_tokens" if name == "tokens" else name])
            got = np.asarray(getattr(view, name))[:rows, :length]
            assert np.array_equal(got, expected), f"case {number}: {name}"
        assert list(batch.response_lengths[:rows, 0]) == case["response_lengths"]


def test_recorded_losses(cases, model):
    module, params = model

    @jax.jit
    def losses(params, batch, draws, num_examples):
        view = slots.training_view(batch, draws, mask_token_id=2)
        logits = module.apply({"params": params}, view.tokens, view.position_ids, view.visibility)
        return hybrid_loss(logits, view, num_examples, SlotsConfig())

    for number, case in enumerate(cases):
        batch, draws = recorded(case)
        loss = losses(params, batch, draws, len(case["draws"]))
        expected = {"ar": case["ar_loss"] or 0.0, "mdm": case["mdm_loss"]}
        expected["total"] = case["total_loss"] if case["total_loss"] is not None else case["mdm_loss"]
        for name, value in expected.items():
            got = float(getattr(loss, name))
            assert abs(got - value) <= 1e-4 * abs(value) + 1e-6, f"case {number}: {name} {got} is not {value}"
