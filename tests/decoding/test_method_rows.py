"""From jobs to rows and from responses to answers, whatever the method; also on several devices.

These are simulated, which has to be asked for before JAX starts: `test_several_devices` runs this file as a script.
"""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import TIED, UNTIED, random_model
from simulated_devices import results_of_script

from refusion_jax.config import ConfigError, DecodeConfig, MeshConfig, ModelConfig
from refusion_jax.decoding import Job, Statistics
from refusion_jax.decoding.batching import row_keys
from refusion_jax.decoding.layout import prepare_layout
from refusion_jax.decoding.method_rows import decode_method, make_rows, query_width
from refusion_jax.methods import Method
from refusion_jax.modeling import Transformer
from refusion_jax.sharding import make_mesh, tree_shardings

METHODS = {
    "autoregressive": Method("autoregressive"),
    "llada": Method("llada", block_length=4),
    "dream": Method("dream", block_length=4, threshold=0.5, cache="dual"),
    "block_diffusion": Method("block_diffusion", block_length=4, steps=8),
}
CONFIG = DecodeConfig(slot_size=1, gen_length=8)


def make_jobs(model, count=7, seed=0, **settings):
    """Prompts of one to four tokens, each with another seed and length."""
    rng, jobs = np.random.default_rng(seed), []
    for index in range(count):
        config = dataclasses.replace(CONFIG, gen_length=8 * (1 + index % 2), **settings)
        prompt = rng.integers(3, model.vocab_size - 1, 1 + index % 4).tolist()
        jobs.append(Job(index, index % 3, prepare_layout(prompt, config, model), config, seed=10 + index))
    return jobs


def decode(config, jobs, method, seed=0, **options):
    module, params, _ = random_model(config, seed)
    return list(decode_method(module, params, jobs, method, **{"batch_size": 4} | options))


def test_rows_are_what_was_asked_for():
    jobs = make_jobs(UNTIED, 3, temperature=0.5, top_k=4, top_p=0.8, suppress_ids=(4,))
    plain = dataclasses.replace(CONFIG, top_k=99)
    jobs.append(dataclasses.replace(jobs[0], config=plain))
    method = Method("llada", block_length=4, factor=1.5, guidance=0.5, unconditional="mask")
    rows = make_rows(jobs, 5, 6, 2, method, UNTIED)
    assert rows.prompts.tolist() == [
        [*job.layout.tokens.tolist(), *[UNTIED.pad_token_id] * (6 - job.layout.prompt_length)] for job in jobs
    ] + [[UNTIED.pad_token_id] * 6]
    assert rows.prompt_lengths.tolist() == [1, 2, 3, 1, 0]
    assert rows.lengths.tolist() == [8, 16, 8, 8, 0]
    assert rows.block_lengths.tolist() == rows.block_steps.tolist() == [4, 4, 4, 4, 0]
    assert rows.factors.tolist() == [1.5] * 4 + [0] and rows.guidances.tolist() == [0.5] * 4 + [0]
    assert rows.thresholds.tolist() == [0] * 5
    assert rows.temperatures.tolist() == [0.5] * 3 + [0, 0]
    np.testing.assert_allclose(rows.top_ps, [0.8] * 3 + [1, 1])
    assert rows.top_ks.tolist() == [4, 4, 4, UNTIED.vocab_size, UNTIED.vocab_size]
    np.testing.assert_array_equal(rows.keys, row_keys(jobs, 5))
    assert rows.eos_ids.tolist() == [list(UNTIED.eos_token_ids)] * 5
    assert rows.suppressed_ids.tolist() == [[4, 16]] * 3 + [[16, 16]] * 2
    assert {leaf.dtype.name for leaf in jax.tree.leaves(rows)} == {"int32", "float32", "uint32"}


def test_greedy_rows_have_no_keys_but_where_the_order_is_random():
    jobs = make_jobs(UNTIED, 2)
    assert not make_rows(jobs, 2, 4, 0, Method("llada"), UNTIED).keys.any()
    assert make_rows(jobs, 2, 4, 0, Method("llada", ordering="random"), UNTIED).keys.any(axis=1).all()


def test_the_longest_query():
    widths = {name: query_width(method, 32, 16) for name, method in METHODS.items()}
    assert widths == {"autoregressive": 1, "llada": 48, "dream": 48, "block_diffusion": 8}
    assert query_width(Method("block_diffusion"), 32, 16) == query_width(Method(), 32, 16) == 16


@pytest.mark.usefixtures("quick_compilation")
class TestAnswers:
    """One small model, so that methods compile once."""

    @pytest.mark.parametrize("name", METHODS)
    def test_answers_and_statistics(self, name):
        jobs, statistics = make_jobs(TIED, seed=2), Statistics()
        answers = decode(TIED, jobs, METHODS[name], statistics=statistics)
        assert [(answer.index, answer.sample) for answer in answers] == [(job.index, job.sample) for job in jobs]
        for answer, job in zip(answers, jobs, strict=True):
            (hole,) = answer.holes
            ends = answer.tokens[-1] in TIED.eos_token_ids
            assert answer.tokens == hole and answer.text is None
            assert not set(hole[:-1]) & set(TIED.eos_token_ids)
            assert answer.finish_reason == ("eos" if ends else "length")
            assert len(hole) == job.layout.response_length or ends
            positions = np.array(answer.position_ids) - job.layout.prompt_length
            assert [answer.committed[place] for place in np.flatnonzero(positions < len(hole))] == hole
            assert positions.tolist() == sorted(set(positions))
            assert len(answer.order) == len(answer.probabilities) == len(answer.committed)
            assert max(answer.order) == answer.forwards - 1
            assert answer.tpf == len(answer.committed) / answer.forwards
        batches = [answers[:4], answers[4:]]
        assert statistics.prompts == len(jobs)
        assert statistics.tokens == sum(len(answer.tokens) for answer in answers)
        assert statistics.forwards == sum(answer.forwards for answer in answers)
        assert statistics.iterations == sum(max(answer.forwards for answer in batch) for batch in batches)
        assert statistics.row_forwards == 4 * statistics.iterations
        assert statistics.positions == statistics.needed_positions > 0
        assert (statistics.cached > 0) == (name != "llada")
        assert statistics.decode_seconds > 0 and statistics.compile_seconds < statistics.seconds

    def test_jobs_are_taken_a_batch_at_a_time(self):
        taken = []
        jobs = (taken.append(job) or job for job in make_jobs(TIED, 6, seed=2))
        module, params, _ = random_model(TIED, 0)
        answers = decode_method(module, params, jobs, METHODS["autoregressive"], batch_size=4)
        assert taken == []
        next(answers)
        assert len(taken) == 4
        assert len(list(answers)) == 5 and len(taken) == 6
        assert list(decode_method(module, params, [], METHODS["autoregressive"], batch_size=4)) == []

    def test_draws_depend_on_seed_index_and_sample_alone(self):
        job = make_jobs(TIED, 1, temperature=2.0)[0]
        others = [dataclasses.replace(job, **{name: 9}) for name in ("seed", "index", "sample")]
        first, *others, last = decode(TIED, [job, *others, job], METHODS["autoregressive"])
        assert first == last
        assert all(answer.tokens != first.tokens for answer in others)

    def test_a_last_batch_compiles_nothing(self, count_compilations):
        jobs = [job for job in make_jobs(TIED, 10, seed=2) if job.config.gen_length == 8]
        decode(TIED, jobs[:4], METHODS["block_diffusion"])
        with count_compilations() as names:
            decode(TIED, jobs, METHODS["block_diffusion"])
        assert "jit(decode_loop)" not in names and "jit(prefill)" not in names

    def test_a_response_that_blocks_do_not_divide_is_refused(self):
        with pytest.raises(ConfigError, match="block_length is 3, which does not divide"):
            decode(TIED, make_jobs(TIED, 1), Method("llada", block_length=3))


# ---- several devices -----------------------------------------------------------------------------------------------

SPLIT = ModelConfig(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, initializer_range=0.6,
)  # fmt: skip
MESHES = {"4x1x2": (4, 1, 2), "2x2x2": (2, 2, 2), "8x1x1": (8, 1, 1)}
GREEDY = "4x1x2 autoregressive"
NAMES = [GREEDY, *(f"2x2x2 {method}" for method in METHODS), "8x1x1 llada"]


def answers_on(mesh, method, sampling):
    """In plain JSON types."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    module = Transformer(SPLIT)
    boxed = jax.jit(module.init)(jax.random.key(3), tokens, tokens)["params"]
    params = nn.unbox(boxed)
    if mesh is not None:
        params = jax.device_put(params, tree_shardings(boxed, mesh))
    jobs = [*make_jobs(SPLIT, 6), *make_jobs(SPLIT, 5, seed=1, temperature=0.7 * sampling)]
    answers = decode_method(module, params, jobs, method, batch_size=8, mesh=mesh)
    return [[answer.committed, answer.position_ids, answer.order, answer.forwards] for answer in answers]


def main(path, names):
    results = {}
    for name in names:
        shape, method = name.split()
        mesh = make_mesh(MeshConfig(*MESHES[shape]), jax.devices())
        results[name] = [answers_on(place, METHODS[method], sampling=name != GREEDY) for place in (mesh, None)]
    Path(path).write_text(json.dumps(results))


@pytest.mark.slow
def test_several_devices(tmp_path):
    for one, many in results_of_script(__file__, tmp_path / "out.json", NAMES, timeout=1200).values():
        assert len(one) == 11 and one == many


@pytest.mark.parametrize(
    ("shape", "rows", "message"),
    [({"tensor": 2}, 2, r"mesh\.tensor is 2, which does not divide"), ({"data": 2}, 3, "rows is 3, not divisible by")],
)
def test_what_a_mesh_cannot_split_is_refused(shape, rows, message):
    mesh = SimpleNamespace(shape={"data": 1, "fsdp": 1, "tensor": 1} | shape, size=2)
    with pytest.raises(ConfigError, match=message):
        next(decode_method(Transformer(TIED), {}, [], METHODS["llada"], batch_size=rows, mesh=mesh))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
