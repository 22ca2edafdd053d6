"""Left-to-right decoding against a plain loop that recomputes the whole sequence for every token."""

import dataclasses

import jax
import numpy as np
import pytest
from random_models import TIED, UNTIED, noise_table, random_model
from reference_decoders import softmax

from refusion_jax.config import DecodeConfig
from refusion_jax.decoding import Job
from refusion_jax.decoding.autoregressive import decode_loop, prefill
from refusion_jax.decoding.batching import row_keys
from refusion_jax.decoding.layout import prepare_layout
from refusion_jax.decoding.method_rows import make_rows
from refusion_jax.methods import Method

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROMPT_LENGTH, CAPACITY, ROWS, SUPPRESSED = 8, 16, 8, 4
MARGIN = 1e-4  # closer decisions may fall differently in two float32 programs
MODELS = {"untied": UNTIED, "tied": TIED}
GREEDY = DecodeConfig(slot_size=1)
SETTINGS = {
    "greedy": GREEDY,
    "sampled": dataclasses.replace(GREEDY, temperature=0.8),
    "filtered": dataclasses.replace(GREEDY, temperature=1.5, top_k=5, top_p=0.8, suppress_ids=(2, 4)),
}


def random_jobs(rng, config, model, count):
    jobs = []
    for index in range(count):
        prompt = rng.integers(model.vocab_size, size=rng.integers(1, PROMPT_LENGTH, endpoint=True)).tolist()
        own = dataclasses.replace(config, gen_length=int(rng.integers(1, CAPACITY, endpoint=True)))
        jobs.append(Job(index, 0, prepare_layout(prompt, own, model), own, seed=3))
    return jobs


def decode(name, seed, jobs, rows=ROWS, sampling=True):
    module, params, _ = random_model(MODELS[name], seed)
    asked = make_rows(jobs, rows, PROMPT_LENGTH, SUPPRESSED, Method("autoregressive"), module.config)
    state = prefill(module, params, asked, CAPACITY)
    return jax.device_get(decode_loop(module, params, asked, state, sampling).responses)


def plain_decode(model, eos_ids, job, noise):
    """The response, its probabilities, and the smallest distance of any choice from the next best."""
    tokens, probabilities, margin, config = job.layout.tokens.tolist(), [], np.inf, job.config
    while len(probabilities) < job.layout.response_length:
        logits = model.forward(tokens, np.arange(len(tokens)), np.tri(len(tokens), dtype=bool))[-1]
        scores = filtered(logits, config) + np.float32(config.temperature) * noise[0, len(tokens)]
        second, first = np.sort(scores)[-2:]
        margin = min(margin, first - second)
        tokens.append(int(scores.argmax()))
        probabilities.append(softmax(logits)[tokens[-1]])
        if tokens[-1] in eos_ids:
            break
    return tokens[-len(probabilities) :], probabilities, margin


def filtered(logits, config):
    """Without the suppressed tokens, all but the `top_k`, and of these all but the nucleus."""
    scores = logits.copy()
    scores[list(config.suppress_ids)] = -np.inf
    if config.temperature > 0:
        best_first = np.argsort(-scores)[: config.top_k if config.top_k > 0 else None]
        mass = softmax(scores / config.temperature)[best_first]
        kept = best_first[: np.searchsorted(np.cumsum(mass) / mass.sum(), config.top_p) + 1]
        scores[np.setdiff1d(np.arange(len(scores)), kept)] = -np.inf
    return scores


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_random_models(name, settings):
    compared, ends = 0, set()
    for seed in range(2):
        _, _, model = random_model(MODELS[name], seed)
        eos_ids = MODELS[name].eos_token_ids
        jobs = random_jobs(np.random.default_rng(seed), SETTINGS[settings], MODELS[name], ROWS - 1)
        found = decode(name, seed, jobs, sampling=settings != "greedy")
        for row, job in enumerate(jobs):
            noise = noise_table(np.asarray(row_keys([job], 1))[0], 1, 64, MODELS[name].vocab_size)
            tokens, probabilities, margin = plain_decode(model, eos_ids, job, noise)
            if margin < MARGIN:
                continue
            compared += 1
            ends.add(tokens[-1] in eos_ids)
            count = len(tokens)
            assert found.tokens[row, :count].tolist() == tokens
            assert found.committed[row].tolist() == [True] * count + [False] * (CAPACITY - count)
            np.testing.assert_allclose(found.probabilities[row, :count], probabilities, rtol=1e-3, atol=1e-6)
            assert found.commit_forwards[row, :count].tolist() == list(range(count))
            # Each forward takes in one token, and reads all before it from the buffer.
            assert found.forwards[row] == found.positions[row] == count
            first = job.layout.prompt_length - 1
            assert found.cached[row] == sum(range(first, first + count))
    # The cases reach what they are for.
    assert compared >= 10 and ends == {False, True}


def test_a_row_does_not_depend_on_the_others():
    jobs = random_jobs(np.random.default_rng(7), SETTINGS["sampled"], UNTIED, ROWS)
    together = decode("untied", 0, jobs)
    for row in (0, ROWS - 1):
        alone = decode("untied", 0, jobs[row : row + 1], rows=1)
        jax.tree.map(lambda one, all_rows, row=row: np.testing.assert_allclose(one[0], all_rows[row], rtol=1e-4),
                     alone, together)  # fmt: skip


def test_rows_that_fill_a_batch_up_do_nothing():
    found = decode("tied", 0, random_jobs(np.random.default_rng(1), GREEDY, TIED, 2))
    assert not found.committed[2:].any() and not found.forwards[2:].any() and not found.cached[2:].any()


def test_settings_compile_nothing(count_compilations):
    jobs = random_jobs(np.random.default_rng(1), SETTINGS["filtered"], TIED, ROWS)
    decode("tied", 0, jobs)
    with count_compilations() as names:
        decode("tied", 1, random_jobs(np.random.default_rng(2), SETTINGS["sampled"], TIED, 3))
    assert "jit(decode_loop)" not in names and "jit(prefill)" not in names
