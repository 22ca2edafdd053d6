"""Held-out measurements, with stand-ins for the model."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from refusion_jax.config import DecodeConfig, MeshConfig, SlotsConfig
from refusion_jax.data import load_dataset
from refusion_jax.sharding import make_mesh
from refusion_jax.training import evaluation
from refusion_jax.training.step import HeldOutSums


@pytest.fixture(scope="module")
def dataset(tiny_config):
    return load_dataset(tiny_config.data, seed=0)


def test_split_example(dataset):
    tokenizer = dataset.tokenizer
    for index, example in enumerate(dataset.held_out_examples):
        prompt, response = evaluation.split_example(dataset, index)
        assert prompt == tokenizer.encode(example.prompt)
        assert response == [*tokenizer.encode(example.response), tokenizer.eos_token_id]


def test_held_out_loss_weights_batches_by_examples(dataset, tiny_config):
    """Batches of 3 rows of one example: of 8 examples the last batch has 2."""
    config = dataclasses.replace(
        tiny_config,
        data=dataclasses.replace(tiny_config.data, pack=False),
        train=dataclasses.replace(tiny_config.train, batch_size=3),
    )
    config = dataclasses.replace(
        config,
        slots=SlotsConfig(ar_weight=0.5, mdm_weight=2.0),
        train=dataclasses.replace(config.train, eval_draws=2),
    )
    seen = []

    def evaluate(params, batch, seed):
        seen.append((params, int(seed), batch.example_ids[batch.response_lengths > 0].tolist()))
        examples = float(np.sum(batch.response_lengths > 0))
        return HeldOutSums(
            ar=3 * examples + int(seed), ar_targets=4.0, mdm=examples**2, examples=examples, bound=6.0, tokens=examples
        )

    got = evaluation.held_out_loss(evaluate, "params", dataset, config, make_mesh(MeshConfig()))
    ar, mdm = (2 * 24 + 3) / (6 * 4), 2 * (9 + 9 + 4) / 16
    assert got == {"eval_loss": 0.5 * ar + 2 * mdm, "eval_ar_loss": ar, "eval_mdm_loss": mdm, "eval_mdm_bound": 36 / 16}
    assert {params for params, _, _ in seen} == {"params"}
    for seed in (0, 1):
        ids = [i for _, drawn, batch in seen for i in batch if drawn == evaluation.EVAL_SEED + seed]
        assert sorted(ids) == list(range(8))


def test_held_out_answers_count_whole_responses_that_fit(dataset, monkeypatch):
    golds = [evaluation.split_example(dataset, index) for index in range(6)]
    longest = sorted(len(prompt) for prompt, _ in golds)[-2]  # so that the longest prompt does not fit
    module = SimpleNamespace(config=SimpleNamespace(context_length=longest + 8))
    fitting = [(prompt, gold) for prompt, gold in golds if len(prompt) <= longest]
    assert len(fitting) == 5

    def decode_prompts(module, params, prompts, configs, seed):
        assert prompts == [prompt for prompt, _ in fitting]
        assert configs == [DecodeConfig(gen_length=7, slot_size=4)] * 5
        right, cut, longer, other, right_too = (gold for _, gold in fitting)
        responses = [right, cut[:-1], [*longer, 5], [*other[:-2], 5, other[-1]], right_too]
        return SimpleNamespace(tokens=responses, forwards=[2] * 5)

    monkeypatch.setattr(evaluation, "decode_prompts", decode_prompts)
    got = evaluation.held_out_answers(module, None, dataset, DecodeConfig(gen_length=7, slot_size=4), 6)
    assert got == {"exact_match": 0.4, "tokens_per_forward": sum(len(gold) for _, gold in fitting) / 10}


def test_nothing_that_fits_measures_nothing(dataset):
    module = SimpleNamespace(config=SimpleNamespace(context_length=64))
    assert evaluation.held_out_answers(module, None, dataset, DecodeConfig(gen_length=64), 6) == {}
    assert evaluation.held_out_answers(module, None, dataset, DecodeConfig(gen_length=4, slot_size=4), 0) == {}
