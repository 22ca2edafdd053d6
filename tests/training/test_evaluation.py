"""Held-out measurements, with stand-ins for the model."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from refusion_jax.config import DecodeConfig, MeshConfig, ModelConfig, SlotsConfig
from refusion_jax.data import load_dataset
from refusion_jax.decoding import Answer
from refusion_jax.methods import Method
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
            ar=3 * examples + int(seed),
            ar_targets=4.0,
            mdm=examples**2,
            examples=examples,
            bound=6.0,
            nats=5.0,
            tokens=examples,
        )

    got = evaluation.held_out_loss(evaluate, "params", dataset, config, make_mesh(MeshConfig()))
    ar, mdm = (2 * 24 + 3) / (6 * 4), 2 * (9 + 9 + 4) / 16
    assert got == {
        "eval_loss": 0.5 * ar + 2 * mdm,
        "eval_ar_loss": ar,
        "eval_mdm_loss": mdm,
        "eval_mdm_bound": 36 / 16,
        "eval_nats_per_token": 30 / 16,
    }
    assert {params for params, _, _ in seen} == {"params"}
    for seed in (0, 1):
        ids = [i for _, drawn, batch in seen for i in batch if drawn == evaluation.EVAL_SEED + seed]
        assert sorted(ids) == list(range(8))


@pytest.mark.parametrize(
    ("objective", "left"),
    [
        ("autoregressive", {"eval_loss", "eval_ar_loss", "eval_nats_per_token"}),
        ("dream", {"eval_loss", "eval_mdm_loss", "eval_mdm_bound", "eval_nats_per_token"}),
    ],
)
def test_held_out_losses_that_an_objective_has(objective, left, dataset, tiny_config):
    config = dataclasses.replace(tiny_config, train=dataclasses.replace(tiny_config.train, objective=objective))
    sums = HeldOutSums(ar=1.0, ar_targets=1.0, mdm=1.0, examples=1.0, bound=1.0, nats=1.0, tokens=1.0)
    got = evaluation.held_out_loss(lambda *_: sums, "params", dataset, config, make_mesh(MeshConfig()))
    assert got.keys() == left


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


def test_held_out_answers_end_with_the_first_eos(tiny_config, monkeypatch):
    config = dataclasses.replace(tiny_config.data, pad_responses=16)
    dataset = load_dataset(config, seed=0)
    golds = [evaluation.split_example(dataset, index)[1] for index in range(2)]
    assert all(len(gold) % 16 == 0 for gold in golds) and golds[0][-2:] == [1, 1]
    first, other = (gold[: gold.index(1) + 1] for gold in golds)
    responses = SimpleNamespace(tokens=[first, [*other[:-1], 5, 1]], forwards=[1, 1])
    monkeypatch.setattr(evaluation, "decode_prompts", lambda *_, seed: responses)
    module = SimpleNamespace(config=SimpleNamespace(context_length=128))
    assert evaluation.held_out_answers(module, None, dataset, DecodeConfig(gen_length=8), 2)["exact_match"] == 0.5


def test_held_out_answers_of_another_method(dataset, monkeypatch):
    golds = [evaluation.split_example(dataset, index) for index in range(3)]
    module = SimpleNamespace(config=ModelConfig(vocab_size=99, max_position_embeddings=256))
    asked = []

    def decode_method(module, params, jobs, method, *, batch_size):
        asked.extend(jobs)
        assert (method, batch_size) == (Method("llada", steps=7), 3)
        responses = [golds[0][1], golds[1][1][:-1], golds[2][1]]
        for job, tokens in reversed(list(zip(jobs, responses, strict=True))):
            yield Answer(
                job.index, job.sample, tokens, text=None, holes=[tokens], hole_texts=None, committed=tokens,
                position_ids=[], order=[], probabilities=[], forwards=5, finish_reason="eos", tpf=1.0,
            )  # fmt: skip

    monkeypatch.setattr(evaluation, "decode_method", decode_method)
    config = DecodeConfig(gen_length=7, slot_size=4)
    got = evaluation.held_out_answers(module, None, dataset, config, 3, 8, Method("llada", steps=7))
    lengths = [len(golds[0][1]), len(golds[1][1]) - 1, len(golds[2][1])]
    assert got == {"exact_match": 2 / 3, "tokens_per_forward": sum(lengths) / 15}
    assert [job.layout.tokens.tolist() for job in asked] == [prompt for prompt, _ in golds]
    assert [(job.index, job.seed, job.layout.response_length) for job in asked] == [(i, 8, 7) for i in range(3)]


def test_nothing_that_fits_measures_nothing(dataset):
    module = SimpleNamespace(config=SimpleNamespace(context_length=64))
    assert evaluation.held_out_answers(module, None, dataset, DecodeConfig(gen_length=64), 6) == {}
    assert evaluation.held_out_answers(module, None, dataset, DecodeConfig(gen_length=4, slot_size=4), 0) == {}
