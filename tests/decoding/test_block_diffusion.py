"""Block diffusion against a plain loop that recomputes prompt, blocks before and the block itself in every step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import UNTIED, noise_table, random_model
from reference_decoders import softmax

from refusion_jax.config import DecodeConfig
from refusion_jax.decoding import Job
from refusion_jax.decoding.batching import row_keys
from refusion_jax.decoding.block_diffusion import decode_loop, prefill
from refusion_jax.decoding.layout import prepare_layout
from refusion_jax.decoding.method_rows import make_rows
from refusion_jax.decoding.revealing import random_scores
from refusion_jax.methods import Method
from refusion_jax.modeling import Transformer, Visibility

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROMPT_LENGTH, CAPACITY, ROWS, SUPPRESSED = 8, 16, 8, 4
MARGIN = 1e-4  # closer decisions may fall differently in two float32 programs
MODEL, MASK = UNTIED, UNTIED.mask_token_id
GREEDY = DecodeConfig(slot_size=1, suppress_special=True)


def blocks(**settings):
    return Method("block_diffusion", **{"block_length": 4} | settings)


# Methods, the settings they are asked with, and the lengths of responses.
CASES = {
    "one token per step": (blocks(), {}, (4, 8, 12, 16)),
    "two steps or four per block": (blocks(steps=8), {}, (8, 16)),
    "an uneven quota": (blocks(steps=12), {}, (16,)),
    "one step per block": (blocks(steps=4), {}, (16,)),
    "threshold": (blocks(threshold=0.5), {}, (4, 8, 12, 16)),
    "factor": (blocks(factor=1.5), {}, (4, 8, 12, 16)),
    "entropy": (blocks(ordering="entropy"), {}, (8, 16)),
    "margin": (blocks(ordering="margin", threshold=0.6), {}, (8, 16)),
    "random": (blocks(ordering="random"), {}, (8, 16)),
    "sampled": (blocks(), {"temperature": 0.7}, (4, 8, 12, 16)),
    "one block": (blocks(block_length=0), {}, (3, 7, 16)),
    "blocks of one": (blocks(block_length=1), {}, (3, 7, 16)),
}


def random_jobs(seed, lengths, settings, count=ROWS - 1):
    rng, jobs = np.random.default_rng(seed), []
    for index in range(count):
        prompt = rng.integers(MODEL.vocab_size - 1, size=1 + index % PROMPT_LENGTH).tolist()
        config = dataclasses.replace(GREEDY, gen_length=int(rng.choice(lengths)), **settings)
        jobs.append(Job(index, 0, prepare_layout(prompt, config, MODEL), config, seed=3))
    return jobs


def rows_of(jobs, method, rows=ROWS):
    return make_rows(jobs, rows, PROMPT_LENGTH, SUPPRESSED, method, MODEL)


def decode(seed, jobs, method, rows=ROWS):
    module, params, _ = random_model(MODEL, seed)
    sampling = any(job.config.temperature > 0 for job in jobs)
    asked = rows_of(jobs, method, rows)
    state, shape = prefill(module, params, asked, CAPACITY), (method.block_length, method.scores)
    return jax.device_get(decode_loop(module, params, asked, state, *shape, sampling).responses)


class Plain:
    """One row's decode."""

    def __init__(self, model, method, job):
        self.model, self.method = model, method
        self.prompt, self.length = job.layout.tokens.tolist(), job.layout.response_length
        self.block, self.steps = method.blocks(self.length)
        self.key = np.asarray(row_keys([job], 1))[0]
        self.temperature = np.float32(job.config.temperature)
        self.noise = noise_table(self.key, CAPACITY, 32, MODEL.vocab_size) if self.temperature else None
        self.tokens, self.probabilities, self.by = ({} for _ in range(3))
        self.forwards = self.positions = self.cached = 0
        self.margin = np.inf
        for start in range(0, self.length, self.block):
            for step in range(self.block):
                masks = [i for i in range(start, start + self.block) if i not in self.tokens]
                if masks and not self.ended:
                    self.step(start, step, masks)

    @property
    def ended(self):
        beginning = [self.tokens.get(i) for i in range(self.length)]
        whole = beginning[: beginning.index(None)] if None in beginning else beginning
        return any(token in MODEL.eos_token_ids for token in whole)

    def step(self, start, step, masks):
        positions = [len(self.prompt) + i for i in masks]
        logits = self.logits(start + self.block)[positions]
        scores = logits.copy()
        scores[:, [MODEL.pad_token_id, MASK]] = -np.inf
        scores += self.temperature * self.noise[self.forwards, positions] if self.temperature else 0
        best = np.sort(scores)[:, -2:]
        choice, probability = scores.argmax(axis=1), softmax(logits)
        sure = probability[np.arange(len(masks)), choice]
        revealed = self.revealed(self.scores(probability, sure, positions), step)
        self.margin = min(self.margin, *(best[revealed, 1] - best[revealed, 0]))
        for index in revealed:
            place = masks[index]
            self.tokens[place], self.probabilities[place] = int(choice[index]), sure[index]
            self.by[place] = self.forwards
        completes = step == 0 and start > 0
        self.forwards += 1
        self.positions += self.block * (1 + completes)
        self.cached += len(self.prompt) + start - self.block * completes

    def logits(self, length):
        """Of a forward over everything up to `length` response tokens: the prompt is causal, blocks see themselves."""
        tokens = [*self.prompt, *(self.tokens.get(i, MASK) for i in range(length))]
        order = np.array([*range(-len(self.prompt), 0), *(i // self.block for i in range(length))])
        return self.model.forward(tokens, np.arange(len(tokens)), order[None] <= order[:, None])

    def scores(self, probability, sure, positions):
        if self.method.scores == "entropy":
            entropy = -(probability * np.log(probability)).sum(axis=1)
            return 1 - entropy / np.log(MODEL.vocab_size)
        if self.method.scores == "margin":
            return np.diff(np.sort(probability)[:, -2:])[:, 0]
        if self.method.scores == "random":
            count = len(positions)
            draws = np.full(count, self.forwards, np.int32)
            return np.asarray(random_scores(np.tile(self.key, (count, 1)), draws, np.array(positions, np.int32)))
        return sure

    def revealed(self, scores, step):
        """Indices of the best; the distance to another decision goes into the margin."""
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        best = scores[order]
        if self.method.threshold:
            self.margin = min(self.margin, *abs(best - self.method.threshold))
            count = int((best >= self.method.threshold).sum())
        elif self.method.factor:
            bounds = (np.arange(len(best)) + 2) * (1 - best)
            self.margin = min(self.margin, *abs(bounds - self.method.factor))
            count = max([0, *(np.flatnonzero(bounds < self.method.factor) + 1)])
        else:
            count = self.block // self.steps + (step < self.block % self.steps)
        count = max(count, 1)
        if count < len(best):
            self.margin = min(self.margin, best[count - 1] - best[count])
        return order[:count]


@pytest.mark.parametrize("case", CASES)
def test_random_models(case):
    method, settings, lengths = CASES[case]
    compared, ends = 0, set()
    for seed in range(3):
        jobs = random_jobs(seed, lengths, settings)
        found, model = decode(seed, jobs, method), random_model(MODEL, seed)[2]
        for row, job in enumerate(jobs):
            plain = Plain(model, method, job)
            if plain.margin < MARGIN:
                continue
            compared += 1
            ends.add(plain.ended)
            places = sorted(plain.tokens)
            assert np.flatnonzero(found.committed[row]).tolist() == places
            assert found.tokens[row, places].tolist() == [plain.tokens[i] for i in places]
            assert found.commit_forwards[row, places].tolist() == [plain.by[i] for i in places]
            expected = [plain.probabilities[i] for i in places]
            np.testing.assert_allclose(found.probabilities[row, places], expected, rtol=2e-3, atol=1e-6)
            counts = found.forwards[row], found.positions[row], found.cached[row]
            assert counts == (plain.forwards, plain.positions, plain.cached)
    # The cases reach what they are for.
    assert compared >= 8 and ends == {False, True}


def test_the_buffer_has_the_keys_and_values_of_clean_tokens():
    """As one forward over the whole sequence computes them, whatever the masks were when a block was decoded."""
    module, params, _ = random_model(MODEL, 0)
    method = blocks(steps=8)
    asked = rows_of(random_jobs(0, (16,), {}), method)
    asked = asked.replace(eos_ids=np.full_like(asked.eos_ids, MODEL.vocab_size))  # every row goes to its end
    state = decode_loop(module, params, asked, prefill(module, params, asked, CAPACITY), 4, "confidence", False)
    lengths = np.asarray(state.cache.lengths)
    assert lengths[:-1].tolist() == (asked.prompt_lengths[:-1] + 12).tolist()
    for row, prompt_length in enumerate(asked.prompt_lengths[:-1]):
        tokens = np.zeros((1, PROMPT_LENGTH + CAPACITY), np.int32)
        whole = np.concatenate([asked.prompts[row, :prompt_length], state.responses.tokens[row]])
        tokens[0, : len(whole)] = whole
        keys, values = keys_and_values(params, tokens, prompt_length)
        count = lengths[row]
        np.testing.assert_allclose(state.cache.keys[:, row, :, :count], keys[:, 0, :, :count], atol=1e-4)
        np.testing.assert_allclose(state.cache.values[:, row, :, :count], values[:, 0, :, :count], atol=1e-4)


@jax.jit
def keys_and_values(params, tokens, prompt_length):
    """Of a causal prompt and blocks of four tokens behind it; what stands behind all of them, nothing sees."""
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    order = jnp.where(index < prompt_length, index, prompt_length + (index - prompt_length) // 4)
    seen = Visibility(segment=jnp.ones_like(index), order=order, group=jnp.zeros_like(index))
    return Transformer(MODEL).apply({"params": params}, tokens, index, seen, (), True, method="encode")[1]


def test_a_row_does_not_depend_on_the_others():
    method, jobs = blocks(threshold=0.5), random_jobs(5, (4, 8, 16), {"temperature": 0.7}, ROWS)
    together = decode(0, jobs, method)
    for row in (0, ROWS - 1):
        alone = decode(0, jobs[row : row + 1], method, rows=1)
        jax.tree.map(lambda one, all_rows, row=row: np.testing.assert_allclose(one[0], all_rows[row], rtol=1e-4),
                     alone, together)  # fmt: skip


def test_rows_that_fill_a_batch_up_do_nothing():
    found = decode(0, random_jobs(1, (8,), {}, 2), blocks())
    assert not found.committed[2:].any() and not found.forwards[2:].any() and not found.positions[2:].any()


def test_steps_and_thresholds_compile_nothing(count_compilations):
    jobs = random_jobs(1, (16,), {})
    decode(0, jobs, blocks())
    with count_compilations() as names:
        for method in (blocks(steps=8), blocks(threshold=0.3), blocks(threshold=0.9), blocks(factor=2.0)):
            decode(0, jobs, method)
    assert "jit(decode_loop)" not in names and "jit(prefill)" not in names
