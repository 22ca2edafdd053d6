"""`generate` with the methods of other systems, as a caller meets it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import refusion_jax as rf
from refusion_jax.decoding.rules import SLOT_SCORES

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROMPTS = ["Hello", "How many?", "a"]
CONFIG = rf.DecodeConfig(gen_length=8, slot_size=4, slot_threshold=0.3)


@pytest.fixture(scope="module")
def model(chat_model):
    """Its checkpoint says what it was trained for."""
    return dataclasses.replace(chat_model, objective="autoregressive")


@pytest.fixture(scope="module")
def answers(model):
    return rf.generate(model, PROMPTS, CONFIG)


def test_the_method_is_that_of_the_objective(model, chat_model, answers):
    assert answers.forwards == [len(tokens) for tokens in answers.tokens]
    for changed in ({"method": rf.Method("autoregressive")}, {"allow_objective": "autoregressive"}):
        assert rf.generate(model, PROMPTS, CONFIG, **changed) == answers
    assert rf.generate(chat_model, PROMPTS, CONFIG, method=rf.Method("autoregressive")) == answers
    slots = rf.generate(chat_model, PROMPTS, CONFIG)
    assert slots == rf.generate(chat_model, PROMPTS, CONFIG, method=rf.Method())
    hybrid = dataclasses.replace(chat_model, objective="hybrid")
    assert slots == rf.generate(hybrid, PROMPTS, CONFIG) != answers
    assert answers == rf.generate(hybrid, PROMPTS, CONFIG, method=rf.Method("autoregressive"), allow_objective="hybrid")


def test_texts_and_lengths(model, answers):
    assert all(isinstance(text, str) for text in answers.text)
    lengths = [7, 8, 3]  # not rounded up to slots
    configs = [dataclasses.replace(CONFIG, gen_length=length) for length in lengths]
    mixed = rf.generate(model, PROMPTS, configs, batch_size=2)
    assert mixed.tokens == [tokens[:length] for tokens, length in zip(answers.tokens, lengths, strict=True)]
    own = dataclasses.replace(model, decode=dataclasses.replace(CONFIG, algorithm="paper"))
    assert rf.generate(own, PROMPTS) == answers  # whose algorithm is ReFusion's alone


@pytest.mark.parametrize(
    "method",
    [
        rf.Method("llada", block_length=4, threshold=0.5),
        rf.Method("dream", cache="prefix", steps=4),
        rf.Method("block_diffusion", block_length=4),
    ],
    ids=lambda method: method.name,
)
def test_every_method_answers(method, chat_model):
    model = dataclasses.replace(chat_model, objective=method.objective)
    result = rf.generate(model, PROMPTS, CONFIG, method=method, num_samples=2, on_progress=print)
    assert len(result.tokens) == 6 and result.tokens[::2] == result.tokens[1::2]
    assert all(1 <= forwards <= 8 for forwards in result.forwards)
    assert set(result.finish_reason) <= {"eos", "length"}
    assert [text is not None for text in result.text] == [True] * 6
    pairs = zip(result.tokens, result.forwards, strict=True)
    assert result.tpf == [len(tokens) / forwards for tokens, forwards in pairs]


@pytest.mark.parametrize(
    "method",
    [rf.Method("autoregressive"), pytest.param(rf.Method(), marks=pytest.mark.slow)],
    ids=lambda method: method.name,
)
def test_weights_that_are_not_finite_are_refused(method, chat_model):
    broken = dataclasses.replace(chat_model, params=jax.tree.map(lambda leaf: leaf * jnp.nan, chat_model.params))
    with pytest.raises(rf.ConfigError, match="logits for prompt 0 are not all numbers; look for weights of the check"):
        rf.generate(broken, PROMPTS[:1], CONFIG, method=method)


def test_samples_and_seeds(model):
    config = dataclasses.replace(CONFIG, temperature=2.0)
    two = rf.generate(model, PROMPTS, config, num_samples=2, seed=[1, 2, 3], batch_size=2)
    assert two.tokens[0] != two.tokens[1]
    again = rf.generate(model, PROMPTS, config, seed=[1, 2, 3], batch_size=2)
    assert again.tokens == two.tokens[::2]
    assert rf.generate(model, PROMPTS, config, seed=9, batch_size=2).tokens != again.tokens


def test_a_stop_text_ends_a_response(model, answers):
    stop = answers.text[0][2:4]
    stopped = rf.generate(model, PROMPTS, dataclasses.replace(CONFIG, stop=(stop,)))
    assert stopped.text[0] == answers.text[0][: answers.text[0].index(stop)]
    assert stopped.finish_reason[0] == "stop"
    assert stopped.forwards[0] == len(stopped.committed[0]) < answers.forwards[0]


def test_a_prefix_is_the_beginning_of_every_prompt(model):
    joined = rf.generate(model, [f"Be brief. {prompt}" for prompt in PROMPTS], CONFIG)
    assert rf.generate(model, PROMPTS, CONFIG, prefix="Be brief. ") == joined
    config = dataclasses.replace(CONFIG, stop=(joined.text[0][1:3],))
    stopped = rf.generate(model, PROMPTS, config, prefix="Be brief. ")
    assert stopped.finish_reason[0] == "stop"
    assert stopped == rf.generate(model, [f"Be brief. {prompt}" for prompt in PROMPTS], config)


def test_statistics_progress_and_rows_as_memory_allows(model, answers):
    statistics, progress = rf.Statistics(), []
    result = rf.generate(model, PROMPTS, CONFIG, batch_size="auto", statistics=statistics, on_progress=progress.append)
    assert result == answers and progress == [1, 2, 3]
    assert statistics.tokens == statistics.forwards == statistics.positions == sum(map(len, answers.tokens))


def test_a_stream_of_prepared_and_other_prompts(model, answers):
    prepared = rf.prepare(model, PROMPTS[0], CONFIG)
    assert prepared.response_length == 8
    requests = [rf.StreamRequest(0, prepared, CONFIG), rf.StreamRequest(1, PROMPTS[1], CONFIG)]
    sizes = {"prompt_length": 16, "response_length": 8}
    stream = rf.generate_stream(model, iter(requests), batch_size=2, **sizes)
    assert [answer.tokens for answer in stream] == answers.tokens[:2]
    method = rf.Method("llada", steps=4)
    options = {"method": method, "allow_objective": "autoregressive"}
    other = rf.prepare(model, PROMPTS[0], CONFIG, method=method)
    assert (
        next(rf.generate_stream(model, [rf.StreamRequest(0, other, CONFIG)], batch_size=8, **sizes, **options)).forwards
        <= 4
    )
    for_slots = rf.prepare(model, PROMPTS[0], CONFIG, method=rf.Method())
    with pytest.raises(rf.ConfigError, match="Prompt 0 was prepared for another method than 'autoregressive'"):
        next(rf.generate_stream(model, [rf.StreamRequest(0, for_slots, CONFIG)], **sizes))
    with pytest.raises(rf.ConfigError, match="Prompt 4 is in the stream already"):
        list(rf.generate_stream(model, [rf.StreamRequest(4, prepared, CONFIG)] * 2, **sizes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "llada"}, "method is 'llada'; give a Method, such as"),
        (
            {"method": rf.Method("llada")},
            "method is 'llada', but the checkpoint was trained with the objective 'autoreg",
        ),
        ({"method": rf.Method()}, "use 'autoregressive', or allow_objective='autoregressive'"),
        ({"allow_objective": "hybrid"}, "allow_objective is 'hybrid', but the checkpoint was trained with"),
        (
            {"rules": rf.Rules(slot_score=SLOT_SCORES["margin"])},
            "rules is for slots, which the method 'autoregressive'",
        ),
        ({"watch": rf.Watch(on_slot=print)}, r"watch\.on_slot is for slots"),
        ({"watch": rf.Watch(on_prefix=print)}, r"watch\.on_prefix is for slots"),
        ({"config": dataclasses.replace(CONFIG, algorithm="paper")}, r"Prompt 0: decode\.algorithm is 'paper', which"),
        (
            {"config": dataclasses.replace(CONFIG, gen_length=250)},
            "Prompt 1: The prompt has .* beyond the maximum of 256",
        ),
        (
            {"prompts": ["a", {"segments": ["a", {"hole": 4}]}]},
            "Prompt 1: The method 'autoregressive' does not fill hol",
        ),
        (
            {"method": rf.Method("llada", block_length=3), "allow_objective": "autoregressive"},
            r"Prompt 0: method\.block_length is 3, which does not divide gen_length \(8\): use gen_length 6 or 9",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(options, message, model):
    with pytest.raises(rf.ConfigError, match=message):
        rf.generate(model, **{"prompts": PROMPTS, "config": CONFIG} | options)


def test_a_conversation_is_a_prompt_like_any_other(model):
    class Chatty:
        def __getattr__(self, name):
            return getattr(model.tokenizer, name)

        def render(self, messages, add_generation_prompt, enable_thinking):
            return f"{messages[0]['content']}:"

    chatty = dataclasses.replace(model, tokenizer=Chatty())
    talks = [{"messages": [{"role": "user", "content": text}]} for text in PROMPTS]
    assert rf.generate(chatty, talks, CONFIG) == rf.generate(model, [f"{text}:" for text in PROMPTS], CONFIG)
