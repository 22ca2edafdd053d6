"""Texts, templates and stop texts: how prompts are laid out, and how answers become text again."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import refusion_jax as rf
from refusion_jax.data.sentencepiece_tokenizer import train_tokenizer
from refusion_jax.modeling import Transformer
from refusion_jax.prompts import encode, prepare_prompt

pytestmark = pytest.mark.usefixtures("quick_compilation")

EOS = 1
# Both algorithms and samples in every call, so that one program serves all; no EOS, so that every hole is filled.
SETTINGS = {"gen_length": 16, "slot_size": 4, "slot_threshold": 0.2, "token_threshold": 0.2, "suppress_ids": (EOS,)}
GREEDY = rf.DecodeConfig(**SETTINGS)
SAMPLED = rf.DecodeConfig(**SETTINGS, temperature=1.2)
PAPER = rf.DecodeConfig(**SETTINGS, algorithm="paper", temperature=0.8)
TEMPLATE = {"segments": ["def add(a, b):\n", {"hole": 6}, "  return", {"hole": 5}]}
ROWS = 4


@pytest.fixture(scope="module")
def model(quick_compilation):
    """Random weights, large enough for lively texts."""
    tokenizer = train_tokenizer(["def add(a, b):\n  return 0123456789+=xyz"], "char", 64)
    config = rf.ModelConfig(
        vocab_size=tokenizer.vocab_size + 2,  # two tokens without text
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.6,
    )
    module, tokens = Transformer(config), jnp.zeros((1, 1), jnp.int32)
    params = nn.unbox(jax.jit(module.init)(jax.random.key(1), tokens, tokens))["params"]
    return rf.Model(config, module, params, tokenizer, GREEDY)


def generate(model, prompts, config=GREEDY, **arguments):
    """`rf.generate` with companions, so that all calls share one program; their answers are left out."""
    configs = config if isinstance(config, list) else [config] * len(prompts)
    companions = [[5], [6]]
    result = rf.generate(model, [*prompts, *companions], [*configs, SAMPLED, PAPER], batch_size=ROWS, **arguments)
    count = len(prompts) * arguments.get("num_samples", 1)
    values = {name: value if value is None else value[:count] for name, value in vars(result).items()}
    return rf.Generation(**values)


def bare(model):
    return dataclasses.replace(model, tokenizer=None)


# ---- templates -----------------------------------------------------------------------------------------------------


def test_a_template_is_its_fixed_text_with_the_holes_filled(model):
    beginning = {"segments": [{"hole": 3}, "return x", {"hole": 4}, "\n"]}
    out = generate(model, [TEMPLATE, beginning, "x="])
    assert [list(map(len, holes)) for holes in out.holes] == [[6, 5], [3, 4], [16]]
    assert out.finish_reason == ["length"] * 3
    for index in range(3):
        assert out.tokens[index] == [token for hole in out.holes[index] for token in hole]
        assert out.hole_texts[index] == [model.tokenizer.decode(hole) for hole in visible(model, out.holes[index])]
    first, second = out.hole_texts[0]
    assert out.text[0] == f"def add(a, b):\n{first}  return{second}"
    first, second = out.hole_texts[1]
    assert out.text[1] == f"{first}return x{second}\n"
    assert out.text[2] == out.hole_texts[2][0]
    assert out.position_ids[0] == [*range(15, 21), *range(29, 34)]
    assert out.position_ids[1] == [0, 1, 2, 11, 12, 13, 14]


def visible(model, holes):
    """Without the tokens that have no text."""
    return [[token for token in hole if token < model.tokenizer.vocab_size] for hole in holes]


def test_an_eos_ends_a_hole(model):
    """Fixed text after it stands; a template ends with "eos" when every hole does."""
    free = dataclasses.replace(SAMPLED, suppress_ids=(), temperature=1.5)
    out = generate(model, [TEMPLATE] * 20, free)
    reasons = set()
    for holes, text, texts, reason in zip(out.holes, out.text, out.hole_texts, out.finish_reason, strict=True):
        assert all(EOS not in hole[:-1] for hole in holes)
        assert all(hole[-1] == EOS or len(hole) == length for hole, length in zip(holes, (6, 5), strict=True))
        ended = [hole[-1] == EOS for hole in holes]
        assert reason == ("eos" if all(ended) else "length")
        assert text == f"def add(a, b):\n{texts[0]}  return{texts[1]}"
        reasons.add(tuple(ended))
    assert {(True, False), (False, False), (False, True)} <= reasons


def test_holes_may_be_given_by_class_and_text_by_tokens(model):
    tokens = model.tokenizer.encode("  return")
    other = {"segments": ("def add(a, b):\n", rf.Hole(6), tokens, {"hole": 5})}
    one, two = generate(model, [TEMPLATE]), generate(model, [other])
    assert one == two and "  return" in two.text[0]


def test_token_templates_need_no_tokenizer(model):
    tokens = {"segments": [model.tokenizer.encode(part) if isinstance(part, str) else part
                           for part in TEMPLATE["segments"]]}  # fmt: skip
    with_text, without = generate(model, [tokens]), generate(bare(model), [tokens])
    assert with_text == generate(model, [TEMPLATE])
    assert without == dataclasses.replace(with_text, text=None, hole_texts=None)
    with pytest.raises(rf.ConfigError, match=r"Prompt 0: The model has no tokenizer; give prompts as lists of token"):
        generate(bare(model), [TEMPLATE])


def test_fixed_text_alone_returns_at_once(model):
    out = generate(model, [{"segments": ["ab", "=", [5]]}, "x=", {"segments": ["x="]}])
    assert [out.forwards[index] for index in (0, 2)] == [0, 0] and out.forwards[1] > 0
    assert [out.tokens[index] for index in (0, 2)] == [[], []]
    assert [out.holes[index] for index in (0, 2)] == [[], []]
    assert [out.finish_reason[index] for index in (0, 2)] == ["length"] * 2
    assert [out.text[index] for index in (0, 2)] == ["ab=" + model.tokenizer.decode([5]), "x="]
    assert out.text[1] == generate(model, ["x="]).text[0]


def test_fixed_text_alone_and_nothing_else(model):
    statistics = rf.Statistics()
    out = rf.generate(model, [{"segments": ["ab"]}] * 3, num_samples=2, batch_size=ROWS, statistics=statistics)
    assert (out.text, out.forwards, statistics.iterations) == (["ab"] * 6, [0] * 6, 0)


def test_empty_texts_in_templates(model):
    out = generate(model, [{"segments": ["", "x=", "", {"hole": 16}, ""]}, "x="])
    assert out.tokens[0] == out.tokens[1]
    assert out.text[0] == "x=" + out.text[1]


def test_templates_mix_with_every_setting(model):
    """Each gets in company what it gets alone."""
    configs = [GREEDY, dataclasses.replace(PAPER, temperature=0.0), dataclasses.replace(GREEDY, slot_size=2)]
    together = generate(model, [TEMPLATE] * 3, configs)
    for index, config in enumerate(configs):
        alone = generate(model, [TEMPLATE], config)
        assert (together.holes[index], together.order[index]) == (alone.holes[0], alone.order[0])
    assert len({str(holes) for holes in together.holes}) > 1


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ({}, 'A template is {"segments": [...]}: a list of texts and {"hole": length}; a conversation is'),
        ({"segments": "x="}, 'A template is {"segments": [...]}'),
        ({"segments": ["x"], "stop": ["y"]}, 'A template is {"segments": [...]}'),
        (
            {"segments": ["x", {"hole": 3, "stop": "y"}]},
            'A segment has the fields hole, stop; {"hole": length} has one',
        ),
        ({"segments": ["x", {}]}, 'A segment has the fields none; {"hole": length} has one.'),
        ({"segments": ["x", {"length": 3}]}, "A segment has the fields length; "),
        ({"segments": ["x", 5]}, 'A segment is 5; it must be text, token IDs or {"hole": length}.'),
        ({"segments": ["x", {"hole": 0}]}, "A hole has the size 0; it must be a whole number of at least 1."),
        ({"segments": ["x", {"hole": "3"}]}, "A hole has the size '3'"),
        ({"segments": ["x", [1.5], {"hole": 2}]}, "The prompt holds something other than token IDs"),
        ({"segments": ["x", "\u4e2d", {"hole": 2}]}, "The prompt has characters that the tokenizer does not know."),
        ({"segments": []}, "The prompt is empty; give at least one token."),
        ({"segments": ["", []]}, "The prompt is empty; give at least one token."),
        ({"segments": [{"hole": 3}]}, "The template has no fixed text; give at least one token."),
        ({"segments": ["x", {"hole": 3}, "", {"hole": 2}]}, "Two holes stand next to each other, of 3 and 2 tokens"),
        (
            {"segments": ["x", {"hole": 50}, "y", {"hole": 13}]},
            "The prompt has 2 tokens, with 63 to fill that makes 65",
        ),
        ({"segments": ["x" * 65]}, "The prompt has 65 tokens, with 0 to fill that makes 65"),
        ({"segments": ["x", {"hole": 3}, [99]]}, "Prompt token 99 lies outside the vocabulary of"),
    ],
)
def test_templates_that_are_refused(model, prompt, sentence):
    with pytest.raises(rf.ConfigError) as caught:
        prepare_prompt(model.tokenizer, model.config, prompt, GREEDY)
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)
    with pytest.raises(rf.ConfigError) as caught:
        rf.generate(model, ["x", prompt], GREEDY)
    assert str(caught.value).startswith("Prompt 1: " + sentence)


def test_prepare_tells_what_a_prompt_needs(model):
    prepared = rf.prepare(model, TEMPLATE, GREEDY)
    assert (prepared.prompt_length, prepared.response_length) == (23, 11)
    assert prepared.texts == ("def add(a, b):\n", None, "  return", None)
    plain = rf.prepare(model, "x=", GREEDY)
    assert (plain.prompt_length, plain.response_length, plain.texts) == (2, 16, None)
    rf.prepare(model, "x" * 40, GREEDY, prefix="y" * 8)
    with pytest.raises(rf.ConfigError, match=r"The prompt has 40 tokens, with 16 .* The shared prefix takes 9 of"):
        rf.prepare(model, "x" * 40, GREEDY, prefix="y" * 9)


def test_encoding(model):
    assert encode(model.tokenizer, "ab") == model.tokenizer.encode("ab")
    assert encode(None, (5, 6)) == [5, 6]
    for tokens in ([True], [5.0], ["a"], [None]):
        with pytest.raises(rf.ConfigError, match="something other than token IDs"):
            encode(model.tokenizer, tokens)


# ---- a shared prefix -----------------------------------------------------------------------------------------------


def test_a_prefix_by_text(model):
    prefix, prompts = "x = 1\n", ["y=", TEMPLATE, {"segments": [{"hole": 3}, "x"]}]
    joined = [
        prefix + "y=",
        {"segments": [prefix + TEMPLATE["segments"][0], *TEMPLATE["segments"][1:]]},
        {"segments": [prefix, {"hole": 3}, "x"]},
    ]
    got, expected = generate(model, prompts, prefix=prefix), generate(model, joined)
    for name in ("tokens", "holes", "hole_texts", "position_ids", "order", "forwards"):
        assert getattr(got, name) == getattr(expected, name), name
    # The prefix is no part of an answer.
    assert [prefix + text for text in got.text[1:]] == expected.text[1:]
    assert got == generate(model, prompts, prefix=model.tokenizer.encode(prefix))
    assert got.tokens != generate(model, prompts).tokens


def test_prefixes_that_cannot_be_used(model):
    with pytest.raises(rf.ConfigError, match="characters that the tokenizer does not know"):
        rf.generate(model, ["x"], prefix="\u4e2d")
    with pytest.raises(rf.ConfigError, match="has no tokenizer"):
        rf.generate(bare(model), [[5]], prefix="x")
    with pytest.raises(rf.ConfigError, match=r"Prompt 1: The prompt has 9 tokens, with 16 .* prefix takes 40 of"):
        rf.generate(model, ["x", "x" * 9], prefix="y" * 40)
    for tokens in ([99], [5, -1]):
        with pytest.raises(rf.ConfigError, match="outside the vocabulary"):
            rf.generate(model, ["x"], prefix=tokens)


# ---- stop texts ----------------------------------------------------------------------------------------------------


def fewest_that_spell(model, tokens, stops):
    for count in range(len(tokens) + 1):
        text = model.tokenizer.decode(visible(model, [tokens[:count]])[0])
        if any(stop in text for stop in stops):
            return tokens[:count], text
    raise AssertionError("the stop texts are not there")


PROMPTS = ["x=", "1+", "def", "y=", "(", "return ", "ab", "z"]


@pytest.fixture(scope="module")
def unstopped(model):
    """Eight lively responses of 16 tokens each, decoded four at once."""
    out = generate(model, PROMPTS, SAMPLED)
    assert all(len(set(text)) >= 6 for text in out.text)
    return out


@pytest.mark.parametrize("every", [1, 3, 10**6])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_response_ends_before_its_stop_text(model, unstopped, every, length):
    """Whether or not it is noticed early; stop texts may begin and end anywhere in slots."""
    configs = [
        dataclasses.replace(SAMPLED, stop=("never", text[place : place + length]))
        for place, text in zip(range(2, 10), unstopped.text, strict=True)
    ]
    out = generate(model, PROMPTS, configs, watch=rf.Watch(every=every))
    for index, config in enumerate(configs):
        whole, stop = unstopped.text[index], config.stop[1]
        tokens, _ = fewest_that_spell(model, unstopped.tokens[index], [stop])
        assert out.tokens[index] == out.holes[index][0] == tokens
        assert out.text[index] == out.hole_texts[index][0] == whole[: whole.index(stop)]
        assert out.finish_reason[index] == "stop"


def test_what_is_looked_at_often_is_stopped_early(model, unstopped):
    """From left to right, and never left to others to notice."""
    one_by_one = dataclasses.replace(SAMPLED, serial_num_blocks=4)
    whole = generate(model, PROMPTS, one_by_one)
    configs = [dataclasses.replace(one_by_one, stop=(text[1:3],)) for text in whole.text]
    often, seldom = (generate(model, PROMPTS, configs, watch=rf.Watch(every=every)) for every in (1, 10**6))
    assert (often.tokens, often.text, often.finish_reason) == (seldom.tokens, seldom.text, seldom.finish_reason)
    assert often.finish_reason == ["stop"] * len(PROMPTS)
    assert [few < many for few, many in zip(often.forwards, whole.forwards, strict=True)] == [True] * len(PROMPTS)


def test_a_stop_text_that_does_not_come_changes_nothing(model, unstopped):
    out = generate(model, PROMPTS, dataclasses.replace(SAMPLED, stop=("never",)), watch=rf.Watch(every=2))
    assert out == unstopped


def test_a_stop_text_of_one_prompt_is_no_other_ones(model, unstopped):
    configs = [SAMPLED] * len(PROMPTS)
    configs[2] = dataclasses.replace(SAMPLED, stop=(unstopped.text[2][3:5],))
    out = generate(model, PROMPTS, configs, watch=rf.Watch(every=1))
    assert out.finish_reason == ["stop" if index == 2 else "length" for index in range(len(PROMPTS))]
    assert out.text[:2] + out.text[3:] == unstopped.text[:2] + unstopped.text[3:]


def test_a_stop_text_behind_the_eos_is_not_met(model):
    free = dataclasses.replace(SAMPLED, suppress_ids=())
    out = generate(model, ["x="] * 20, free)
    ended = [index for index, reason in enumerate(out.finish_reason) if reason == "eos" and len(out.text[index]) > 1]
    assert ended
    stopping = [dataclasses.replace(free, stop=(text[-1:] or "never",)) for text in out.text]
    stopped = generate(model, ["x="] * 20, stopping)
    assert all(stopped.finish_reason[index] == "stop" for index in ended)
    assert all(stopped.tokens[index][-1] != EOS for index in ended)


def test_stop_texts_need_a_tokenizer(model):
    with pytest.raises(rf.ConfigError, match=r"Prompt 0: decode.stop needs a tokenizer, which the model does not have"):
        rf.generate(bare(model), [[5]], dataclasses.replace(SAMPLED, stop=("x",)))


def test_a_stop_text_in_a_template_ends_its_hole(model):
    """Whether or not it is noticed early."""
    whole = generate(model, [TEMPLATE], SAMPLED)
    first = whole.hole_texts[0][0]
    stopping = dataclasses.replace(SAMPLED, stop=(first[1:3],))
    early, late = (generate(model, [TEMPLATE], stopping, watch=watch(every)) for every in (1, 10**6))
    for out in (early, late):
        assert out.hole_texts[0][0] == first[: first.index(first[1:3])]
        assert out.finish_reason == ["stop"]
    assert (early.holes, early.text) == (late.holes, late.text)


def watch(every):
    """With a callback, so that every forward may be the last before a look."""
    return rf.Watch(every=every, on_prefix=lambda event: None)


@pytest.mark.parametrize("every", [1, 10**6])
def test_a_stop_text_is_not_met_across_holes(model, every):
    whole = generate(model, [TEMPLATE], SAMPLED)
    stop = whole.hole_texts[0][0][-1] + whole.hole_texts[0][1][0]
    assert not any(stop in text for text in whole.hole_texts[0])
    out = generate(model, [TEMPLATE], dataclasses.replace(SAMPLED, stop=(stop,)), watch=watch(every))
    assert (out.holes, out.text, out.finish_reason) == (whole.holes, whole.text, ["length"])


@pytest.mark.parametrize("config", [GREEDY, PAPER], ids=["greedy", "paper, sampled"])
def test_all_that_is_said_of_a_stopped_response_ends_where_it_stopped(model, config):
    """When the stop text was noticed, and so how far the row went on, does not matter."""
    prompts = [[5], [6, 7], [8]]
    free = generate(model, prompts, config)
    stops = [text[3:5] for text in free.text]
    configs = [dataclasses.replace(config, stop=(stop,)) for stop in stops]
    early, late = (generate(model, prompts, configs, watch=rf.Watch(every=every)) for every in (1, 10**6))
    assert early == late
    assert early.finish_reason == ["stop"] * 3
    for index in range(3):
        count = len(early.tokens[index])
        assert early.committed[index] == early.tokens[index] == free.tokens[index][:count]
        assert early.order[index] == free.order[index][:count]
        assert early.position_ids[index] == free.position_ids[index][:count]
        assert early.log_probabilities[index] == pytest.approx(free.log_probabilities[index][:count])
        assert early.forwards[index] == max(early.order[index]) + 1
        assert early.tpf[index] == count / early.forwards[index]


def test_suppressing_everything_is_refused(model):
    config = dataclasses.replace(GREEDY, suppress_ids=tuple(range(2, model.config.vocab_size)), suppress_special=True)
    prepare_prompt(model.tokenizer, model.config, [5], config)  # EOS is left
    config = dataclasses.replace(config, suppress_ids=tuple(range(model.config.vocab_size)))
    with pytest.raises(rf.ConfigError, match="tokens are suppressed; leave at least one out of suppress_ids"):
        prepare_prompt(model.tokenizer, model.config, [5], config)
