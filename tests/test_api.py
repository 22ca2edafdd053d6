"""Loading, logits and generation as a caller meets them."""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import refusion_jax as rf
from refusion_jax import api
from refusion_jax.config import MeshConfig
from refusion_jax.data import load_tokenizer
from refusion_jax.modeling import Visibility
from refusion_jax.responses import Detokenizer
from refusion_jax.sharding import AXES, make_mesh

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
    assert rf.load(str(with_tokenizer)).tokenizer.encode("S:1?") == load_tokenizer(with_tokenizer).encode("S:1?")


@pytest.mark.parametrize("kind", ["run", "checkpoint"])
def test_load_in_another_type_onto_a_mesh(kind, tiny_run, monkeypatch):
    path = tiny_run if kind == "run" else REFERENCE / "checkpoint"
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    plain, model = rf.load(path), rf.load(path, dtype="bfloat16", mesh=mesh)
    assert model.config == dataclasses.replace(plain.config, dtype="bfloat16", param_dtype="bfloat16")
    assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(model.params))
    assert model.mesh is mesh and plain.mesh is None
    halved = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), plain.params)
    jax.tree.map(np.testing.assert_array_equal, model.params, halved)
    with pytest.raises(rf.ConfigError, match="dtype is 'int8', not one of float32, bfloat16, float16"):
        rf.load(path, dtype="int8")
    for other in (jax.make_mesh((1,), ("data",)), jax.make_mesh((1, 1, 1), AXES, (AxisType.Explicit,) * 3)):
        with pytest.raises(rf.ConfigError, match=r"^mesh has the axes data \(.*\); give one that sharding\.make_mesh"):
            rf.load(path, mesh=other)
    divided = SimpleNamespace(shape={"data": 1, "fsdp": 1, "tensor": 3}, size=3)
    monkeypatch.setattr(api, "_check_mesh_kind", lambda mesh: None)
    with pytest.raises(rf.ConfigError, match=r"^mesh\.tensor is 3, which does not divide the model's"):
        rf.load(path, mesh=divided)


@pytest.mark.parametrize("source", ["run", "Hugging Face"])
def test_load_in_int8(source, tiny_run, model):
    path = tiny_run if source == "run" else REFERENCE / "checkpoint"
    plain = model if source == "run" else rf.load(path)
    loaded = rf.load(path, quantize="int8", kv_dtype="int8")
    assert loaded.config == dataclasses.replace(plain.config, kv_dtype="int8")
    mlp = loaded.params["layers"]["mlp"]["up_proj"]
    assert mlp["kernel"].dtype == jnp.int8 and mlp["scale"].shape == mlp["kernel"].shape[::2]
    tokens = np.arange(6, 12)[None]
    got, exact = (rf.logits(each, tokens, np.arange(6)[None]) for each in (loaded, plain))
    np.testing.assert_allclose(got, exact, atol=0.03 * np.abs(exact).max())


@pytest.mark.slow
def test_generate_in_int8(tiny_run, answers):
    loaded = rf.load(tiny_run, quantize="int8", kv_dtype="int8")
    prefix = PROMPTS[0][:2]
    alone = rf.generate(loaded, PROMPTS, batch_size=4)
    assert len(alone.committed) == len(PROMPTS)
    for ours, theirs in zip(alone.committed, answers.committed, strict=True):
        common = min(len(ours), len(theirs))
        assert np.mean(np.array(ours[:common]) == theirs[:common]) > 0.5
    shared = rf.generate(loaded, [PROMPTS[0][2:]], prefix=prefix)
    assert len(shared.committed[0]) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quantize": "int4"}, "quantize is 'int4', not one of int8."),
        ({"quantize": ""}, "quantize is '', not one of int8."),
        ({"kv_dtype": "float32"}, "kv_dtype is 'float32'; it must be 'int8', or '' for the type of activations."),
        ({"kv_dtype": "int8", "dtype": "float16"}, "model.kv_dtype is 'int8' with model.dtype 'float16', whose range"),
    ],
)
def test_types_that_cannot_be_loaded(arguments, message, tiny_run):
    with pytest.raises(rf.ConfigError) as caught:
        rf.load(tiny_run, **arguments)
    assert str(caught.value).startswith(message)


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
    ("objective", "by_default"),
    [("", "causal"), ("hybrid", "causal"), ("block_diffusion", "causal"), ("llada", "bidirectional"),
     ("dream", "bidirectional")],
)  # fmt: skip
def test_logits_see_both_sides_where_the_objective_does(objective, by_default, model):
    tokens, position_ids = jnp.array([[5, 6, 7, 8]]), jnp.array([[0, 1, 2, 3]])
    both = Visibility(*(jnp.full((1, 4), value) for value in (1, 0, 0)))
    expected = {
        "causal": model.module.apply({"params": model.params}, tokens, position_ids),
        "bidirectional": model.module.apply({"params": model.params}, tokens, position_ids, both),
    }
    model = dataclasses.replace(model, objective=objective)
    np.testing.assert_allclose(rf.logits(model, tokens, position_ids), expected[by_default], atol=1e-5)
    for visibility, logits in expected.items():
        np.testing.assert_allclose(rf.logits(model, tokens, position_ids, visibility), logits, atol=1e-5)
    assert not np.allclose(*expected.values(), atol=1e-3)


def test_logits_refuse_another_visibility(model):
    with pytest.raises(rf.ConfigError, match="visibility is 'left'; it must be 'causal' or 'bidirectional', or left o"):
        rf.logits(model, [[5]], [[0]], "left")


@pytest.mark.parametrize(
    ("tokens", "position_ids", "sentence"),
    [
        (
            [[1, 2]],
            [[0, 1, 2]],
            "tokens have shape (1, 2) and position_ids (1, 3); both must be (batch, length), neither of them 0.",
        ),
        (
            [1, 2],
            [0, 1],
            "tokens have shape (2,) and position_ids (2,); both must be (batch, length), neither of them 0.",
        ),
        (
            np.zeros((1, 0)),
            np.zeros((1, 0)),
            "tokens have shape (1, 0) and position_ids (1, 0); both must be (batch, length), neither of them 0.",
        ),
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
    assert [len(field) for field in vars(answers).values()] == [4] * 11
    assert answers.holes == [[tokens] for tokens in answers.tokens]
    assert answers.hole_texts == [[text] for text in answers.text]


def test_a_model_without_tokenizer_answers_in_tokens(model, answers):
    bare = dataclasses.replace(model, tokenizer=None)
    tokens = [model.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert rf.generate(bare, tokens, batch_size=4) == dataclasses.replace(answers, text=None, hole_texts=None)
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


@pytest.fixture(scope="module")
def hot(model):
    return dataclasses.replace(model.decode, temperature=1.0)


def test_samples_depend_on_seed_and_index_alone(model, hot):
    prompts = [PROMPTS[0]] * 7
    progress = []
    samples = rf.generate(model, prompts, hot, seed=3, batch_size=4, on_progress=progress.append)
    assert progress == [1, 2, 3, 4, 5, 6, 7]
    assert len(set(map(tuple, samples.tokens))) > 1
    assert rf.generate(model, prompts, hot, seed=3, batch_size=3).tokens == samples.tokens
    assert rf.generate(model, prompts, hot, seed=4, batch_size=4).tokens != samples.tokens


def test_one_seed_per_prompt(model, hot):
    by_seed = {seed: rf.generate(model, PROMPTS, hot, seed=seed, batch_size=4) for seed in (3, 8)}
    assert all(one != other for one, other in zip(by_seed[3].tokens, by_seed[8].tokens, strict=True))
    for seeds in ([3, 8, 8, 3], (3, 8, 8, 3), np.array([3, 8, 8, 3])):
        mixed = rf.generate(model, PROMPTS, hot, seed=seeds, batch_size=4)
        assert mixed.tokens == [by_seed[seed].tokens[index] for index, seed in enumerate([3, 8, 8, 3])]


def test_several_samples_of_each_prompt(model, hot, answers):
    """They stand next to each other, and the first is the one that is drawn alone."""
    alone = rf.generate(model, PROMPTS[:3], hot, seed=3, batch_size=4)
    three = rf.generate(model, PROMPTS[:3], hot, seed=3, batch_size=4, num_samples=3)
    assert len(three.tokens) == len(three.text) == len(three.log_probabilities) == 9
    assert three.tokens[::3] == alone.tokens and three.forwards[::3] == alone.forwards
    for index in range(3):
        assert len({tuple(tokens) for tokens in three.tokens[3 * index : 3 * index + 3]}) == 3
    two = rf.generate(model, PROMPTS[:3], hot, seed=3, batch_size=4, num_samples=2)
    assert two.tokens == [three.tokens[place] for place in (0, 1, 3, 4, 6, 7)]
    greedy = rf.generate(model, PROMPTS, batch_size=4, num_samples=np.int64(2))
    assert greedy.tokens == [tokens for tokens in answers.tokens for _ in range(2)]


def test_restricted_sampling(model, hot, answers):
    """The most probable token alone is the greedy one; suppressed tokens do not come."""
    first = dataclasses.replace(hot, top_k=1)
    nucleus = dataclasses.replace(hot, temperature=3.0, top_p=1e-6)
    four = rf.generate(model, PROMPTS, [first, nucleus, hot, first], batch_size=4)
    assert [four.tokens[index] for index in (0, 1, 3)] == [answers.tokens[index] for index in (0, 1, 3)]
    common = {token for tokens in answers.tokens for token in tokens}
    suppressing = dataclasses.replace(model.decode, suppress_ids=tuple(common))
    without = rf.generate(model, PROMPTS, suppressing, batch_size=4)
    assert common.isdisjoint(token for tokens in without.tokens for token in tokens)


def test_statistics_add_up(model, answers):
    statistics = rf.Statistics()
    for count in (1, 2):
        rf.generate(model, PROMPTS, batch_size=4, statistics=statistics)
        assert statistics.prompts == 4 * count
        assert statistics.tokens == count * sum(map(len, answers.tokens))
        assert statistics.forwards == count * sum(answers.forwards)
    assert statistics.row_forwards == 4 * statistics.iterations >= statistics.forwards
    assert statistics.needed_positions <= statistics.positions


def test_a_batch_as_large_as_memory_holds(model, answers, monkeypatch):
    """But no larger than there are prompts."""
    asked, statistics = [], rf.Statistics()

    def fitting(config, buffer_length, width, mesh):
        asked.append((config, buffer_length, width))
        return 64

    monkeypatch.setattr(api, "fitting_rows", fitting)
    assert rf.generate(model, PROMPTS, batch_size="auto", statistics=statistics) == answers
    config, buffer_length, width = asked[-1]
    assert config == model.config and width >= 16 and buffer_length == 32 + width
    assert statistics.row_forwards == 4 * statistics.iterations
    monkeypatch.setattr(api, "fitting_rows", lambda *arguments, **options: 4)
    assert rf.generate(model, PROMPTS * 3, batch_size="auto").tokens == answers.tokens * 3


def test_probabilities_are_the_models(model):
    """Of a slot's first token where it was drafted, of any other behind what was committed before it."""
    config = rf.DecodeConfig(gen_length=16, slot_size=4, slot_threshold=0.05, suppress_ids=model.config.eos_token_ids)
    whole, single = dataclasses.replace(config, slot_size=16), dataclasses.replace(config, slot_threshold=0.9)
    sampled = dataclasses.replace(single, temperature=1.0)
    out = rf.generate(model, PROMPTS, [config, single, whole, sampled], batch_size=4)
    assert out.order[1] != sorted(out.order[1]) and out.forwards[3] > out.forwards[1]
    length = 32  # one shape for all
    for index, prompt in enumerate(map(model.tokenizer.encode, PROMPTS)):
        rows = sorted(zip(out.order[index], out.position_ids[index], out.committed[index],
                          out.log_probabilities[index], strict=True))  # fmt: skip
        assert len(rows) == 16
        tokens = np.zeros((1, length), np.int32)
        position_ids = np.zeros((1, length), np.int32)
        end = len(prompt) + len(rows)
        tokens[0, :end] = [*prompt, *(token for _, _, token, _ in rows)]
        position_ids[0, :end] = [*range(len(prompt)), *(position for _, position, _, _ in rows)]
        log_probabilities = jax.nn.log_softmax(rf.logits(model, tokens, position_ids)[0])
        slot_size = 16 if index == 2 else 4
        for place, (_, position, token, got) in enumerate(rows):
            if (position - len(prompt)) % slot_size:
                assert got == pytest.approx(float(log_probabilities[len(prompt) + place - 1, token]), abs=1e-4)
            elif slot_size == 16:
                masked = tokens.copy()
                masked[0, len(prompt)] = model.config.mask_token_id
                drafted = jax.nn.log_softmax(rf.logits(model, masked, position_ids)[0, len(prompt)])
                assert got == pytest.approx(float(drafted[token]), abs=1e-4)


def test_a_vocabulary_padded_beyond_the_tokenizer_has_no_text_there(model):
    size = model.tokenizer.vocab_size
    letter = model.tokenizer.encode("R")
    detokenizer = Detokenizer(model.tokenizer, model.config.eos_token_ids)
    assert detokenizer.decode([*letter, size + 3, *letter]) == "RR"


def test_no_prompts(model):
    result = rf.generate(model, [])
    assert (result.tokens, result.text, result.forwards) == ([], [], [])


@pytest.mark.parametrize(
    ("prompts", "arguments", "sentence"),
    [
        ("S:1?", {}, "prompts is 'S:1?', no list of prompts; give a list, also of one."),
        ({"segments": ["S:1?"]}, {}, "prompts is {'segments': ['S:1?']}, no list of prompts"),
        (None, {}, "prompts is None, no list of prompts"),
        (["S:1?"], {"prefix": 5}, "prefix is 5; give a text or a list of token IDs."),
        (["S:1?"], {"prefix": "1" * 200}, "The prefix has 200 tokens, which leaves no room in 160 positions"),
        (["S:1?"], {"rules": "margin"}, "rules is 'margin'; give a Rules object."),
        (["S:1?"], {"watch": None}, "watch is None; give a Watch object."),
        (["S:1?"], {"statistics": "x"}, "statistics is 'x'; give a Statistics object."),
        (["S:1?"], {"on_progress": "x"}, "on_progress is 'x'; give a function."),
        (["S:1?"], {"batch_size": 0}, "batch_size is 0; decode at least one row at once, or say 'auto'."),
        (["S:1?"], {"batch_size": "all"}, "batch_size is 'all'; decode at least one row at once, or say 'auto'."),
        (["S:1?"], {"num_samples": 0}, "num_samples is 0; ask for at least one."),
        (["S:1?"], {"num_samples": 1.5}, "num_samples is 1.5; ask for at least one."),
        (["S:1?"], {"num_samples": "2"}, "num_samples is '2'; ask for at least one."),
        (["S:1?"], {"seed": [1, 2]}, "2 seeds for 1 prompts; give one, or one per prompt."),
        (["S:1?"] * 2, {"seed": [1, -2]}, "seed is -2; it must be a whole number in [0, 2**31)."),
        (["S:1?"] * 3, {"config": [rf.DecodeConfig()] * 2}, "2 configs for 3 prompts; give one, or one per prompt."),
        (["\ud800"], {}, "Prompt 0: The prompt has half a surrogate pair, which is no Unicode text."),
        (["S:1?", ""], {}, "Prompt 1: The prompt is empty; give at least one token."),
        ([[5], [6], [5, 64_000]], {}, "Prompt 2: Prompt token 64000 lies outside the vocabulary of"),
        (["S:1?", "R:" + "a" * 143], {}, "Prompt 1: The prompt has 145 tokens, with 16 to fill that makes 161"),
    ],
)
def test_generate_refuses(prompts, arguments, sentence, model):
    with pytest.raises(rf.ConfigError) as caught:
        rf.generate(model, prompts, **arguments)
    assert str(caught.value).startswith(sentence)


def test_the_longest_prompt_that_fits(model):
    prepared = rf.prepare(model, "R:" + "a" * 142, model.decode)
    assert prepared.prompt_length + prepared.response_length == model.config.max_position_embeddings == 160


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


# ---- streams -------------------------------------------------------------------------------------------------------


def stream(model, requests, rows=4, **options):
    shape = {"prompt_length": 12, "response_length": 16, "sampling": False, "infilling": False}
    return rf.generate_stream(model, requests, batch_size=rows, **(shape | options))


def test_a_stream_gives_what_a_list_does(model, answers):
    requests = [rf.StreamRequest(10 + i, prompt, model.decode) for i, prompt in enumerate(PROMPTS)]
    got = sorted(stream(model, iter(requests)), key=lambda answer: answer.index)
    assert [answer.index for answer in got] == [10, 11, 12, 13]
    for field in ("tokens", "text", "committed", "order", "forwards", "finish_reason", "position_ids"):
        assert [getattr(answer, field) for answer in got] == getattr(answers, field), field
    prepared = [dataclasses.replace(r, prompt=rf.prepare(model, r.prompt, r.config)) for r in requests]
    assert sorted(stream(model, prepared), key=lambda answer: answer.index) == got


def test_a_stream_takes_requests_as_rows_become_free(model):
    """It may be longer than memory: here it has no end."""
    pulled = 0

    def requests():
        nonlocal pulled
        for index in itertools.count():
            pulled += 1
            yield rf.StreamRequest(index, PROMPTS[index % 4], model.decode)

    seen = []
    endless = stream(model, requests())
    assert pulled == 0
    for answer in itertools.islice(endless, 30):
        seen.append(answer.index)
        # Four in rows, and the next one.
        assert pulled - len(seen) <= 5
    assert len(set(seen)) == 30 and max(seen) < 35
    endless.close()


def test_fixed_texts_in_a_stream_are_answered_as_they_are_taken(model):
    pulled = 0

    def requests():
        nonlocal pulled
        for index in range(200):
            pulled += 1
            yield rf.StreamRequest(index, {"segments": ["S:1?"]}, model.decode)

    for count, answer in enumerate(stream(model, requests())):
        assert (answer.index, answer.text, answer.forwards) == (count, "S:1?", 0)
        assert pulled - count <= 6


def test_answers_come_as_they_finish(model):
    """All samples of a prompt, and short ones before a long one that began before them."""
    short = dataclasses.replace(model.decode, gen_length=1, slot_size=1, serial_num_blocks=1)
    long = dataclasses.replace(
        model.decode, slot_size=1, slot_threshold=1.0, token_threshold=1.0, suppress_ids=model.config.eos_token_ids
    )
    requests = [rf.StreamRequest(0, PROMPTS[0], long)]
    requests += [rf.StreamRequest(index, PROMPTS[index % 4], short) for index in range(1, 7)]
    names = [(a.index, a.sample) for a in stream(model, requests, num_samples=2, suppressed=1)]
    assert len(names) == 14 == len(set(names))
    assert names[-2:] in ([(0, 0), (0, 1)], [(0, 1), (0, 0)])


def test_an_unusable_request_is_named_when_it_is_taken(model):
    requests = [rf.StreamRequest(5, PROMPTS[0], model.decode), rf.StreamRequest(9, "S:\u4e2d?", model.decode)]
    with pytest.raises(rf.ConfigError) as caught:
        list(stream(model, requests))
    assert str(caught.value) == "Prompt 9: The prompt has characters that the tokenizer does not know."
    with pytest.raises(rf.ConfigError, match="The stream was made for prompt_length 32, too little for 40; make it"):
        list(stream(model, [rf.StreamRequest(0, [5] * 40, model.decode)]))
    with pytest.raises(rf.ConfigError, match="num_samples is 0"):
        list(stream(model, [], num_samples=0))


def test_no_requests(model):
    assert list(stream(model, [])) == []


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


def test_a_stream_has_no_more_rows_than_answers(model, monkeypatch):
    rows = []

    class Stopped(Exception):
        pass

    def stream(*_, **keywords):
        rows.append(keywords["rows"])
        raise Stopped

    monkeypatch.setattr(api, "Stream", stream)
    for most, samples in ((None, 1), (3, 1), (3, 5)):
        with pytest.raises(Stopped):
            next(
                rf.generate_stream(
                    model, iter([]), prompt_length=4, response_length=8, batch_size=8, most_requests=most,
                    num_samples=samples,
                )
            )  # fmt: skip
    assert rows == [8, 4, 8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_length": 10**9}, "prompt_length is 1000000000; it must be a whole number of at most 160"),
        ({"response_length": "x"}, "response_length is 'x'; it must be a whole number of at most 160"),
        ({"requests": ["S:1?"]}, "A request is 'S:1?'; give a StreamRequest."),
        ({"requests": [rf.StreamRequest(0, "S:1?", "x")]}, "The config of prompt 0 is 'x'; give a DecodeConfig."),
        ({"num_samples": 0}, "num_samples is 0; ask for at least one."),
    ],
)
def test_streams_that_are_refused(model, arguments, message):
    arguments = {"requests": [], "prompt_length": 8, "response_length": 16} | arguments
    with pytest.raises(rf.ConfigError) as caught:
        list(rf.generate_stream(model, **arguments))
    assert str(caught.value).startswith(message)
