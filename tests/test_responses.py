"""Response tokens as text: characters that tokens cut, tokens that end a response, stop texts."""

import dataclasses
import itertools

import pytest

import refusion_jax as rf
from refusion_jax.data import train_tokenizer
from refusion_jax.decoding.events import Beginning
from refusion_jax.decoding.layout import lay_out
from refusion_jax.prompts import Prepared
from refusion_jax.responses import Detokenizer, finish

TEXTS = ["a😀b👩‍👩‍👧c", "日本語のテキスト", "naïve \ufffd café", "😀", "plain", ""]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abcdxplin ve"], "char", 400)


@pytest.fixture(scope="module")
def detokenizer(tokenizer):
    return Detokenizer(tokenizer, (tokenizer.eos_token_id, tokenizer.encode("v")[0]))


def test_beginnings_of_a_text_have_whole_characters(tokenizer, detokenizer):
    for text in TEXTS:
        tokens = tokenizer.encode(text.replace("v", ""))
        shown = [detokenizer.decode_beginning(tokens[:count]) for count in range(len(tokens) + 1)]
        assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(shown))
        assert shown[-1] == detokenizer.decode(tokens) == text.replace("v", "")
        assert set("".join(shown)) <= set(text)


def test_parts_of_a_text_have_whole_characters(tokenizer, detokenizer):
    text = "a😀日b"
    tokens = tokenizer.encode(text)
    for start, end in itertools.combinations(range(len(tokens) + 1), 2):
        assert detokenizer.decode_part(tokens[start:end]) in text
    assert detokenizer.decode_part(tokens[2:6]) == ""  # the rest of the first, and the beginning of the second
    assert detokenizer.decode_part(tokens[2:9]) == "日b"


def test_bytes_that_are_no_character_show_as_soon_as_that_is_sure(tokenizer, detokenizer):
    first, *_, last = tokenizer.encode("😀")
    for tokens in ([last, *tokenizer.encode("ab")], [first, first, *tokenizer.encode("a"), last]):
        whole = detokenizer.decode(tokens)
        shown = [detokenizer.decode_beginning(tokens[:count]) for count in range(len(tokens) + 1)]
        assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(shown))
        assert whole.startswith(shown[-1]) and "a" in shown[-1] and "\ufffd" in shown[-1]


def test_all_tokens_that_end_a_response_are_left_out(tokenizer, detokenizer):
    """Also one that has a text."""
    tokens = tokenizer.encode("abv")
    assert tokenizer.decode(tokens) == "abv"
    assert detokenizer.decode(tokens) == detokenizer.decode_beginning(tokens) == detokenizer.decode_part(tokens) == "ab"


def test_what_is_shown_never_has_to_be_taken_back(tokenizer, detokenizer):
    """Neither the beginning of a stop text nor of a character; when all is there, all is shown."""
    for text, stop in (("ab\n\nc", ("\n\n",)), ("ab\nab\n", ("\n\n", "\nabc")), ("a日本b", ("日語", "本b"))):
        tokens = tokenizer.encode(text)
        shown = [detokenizer.show(Beginning(tokens[:count], False), stop) for count in range(len(tokens) + 1)]
        shown.append(detokenizer.show(Beginning(tokens, True), stop))
        for (tokens_before, before), (tokens_after, after) in itertools.pairwise(shown):
            assert after.startswith(before) and tokens_after[: len(tokens_before)] == tokens_before
        places = [text.find(each) for each in stop if each in text]
        assert shown[-1][1] == text[: min(places, default=len(text))]
    assert detokenizer.show(Beginning(tokenizer.encode("ab\n"), False), ("\n\n",))[1] == "ab"
    assert detokenizer.show(Beginning(tokenizer.encode("ab\n"), True), ("\n\n",))[1] == "ab\n"


def answer(tokens):
    return rf.Answer(0, 0, tokens, None, [tokens], None, tokens, [], [], [], 1, "length", 1.0)


def prepared(stop=()):
    config = rf.DecodeConfig(gen_length=16, slot_size=4, stop=stop)
    return Prepared(lay_out([5], config), config)


def test_a_finished_text_is_what_there_is(tokenizer, detokenizer):
    """A character that the end of the response cuts can no longer be completed."""
    tokens = tokenizer.encode("\ufffd日本")
    assert finish(detokenizer, prepared(), answer(tokens)).text == "\ufffd日本"
    assert finish(detokenizer, prepared(), answer(tokens[:-1])).text.startswith("\ufffd日\ufffd")
    assert finish(None, prepared(), answer(tokens)) == answer(tokens)


def test_a_cancelled_response_has_no_part_of_a_character(tokenizer, detokenizer):
    tokens = tokenizer.encode("\ufffd日本")[:-1]
    cancelled = dataclasses.replace(answer(tokens), finish_reason="cancelled")
    finished = finish(detokenizer, prepared(("\ufffd\ufffd", "x")), cancelled)
    assert (finished.text, finished.tokens, finished.finish_reason) == ("\ufffd日", tokens, "cancelled")


@pytest.mark.parametrize("stop", [("bc", "d"), ("d", "abcd"), ("b", "abc"), ("abcd", "c", "bc")])
def test_of_several_stop_texts_the_one_that_is_complete_first_counts(stop, tokenizer, detokenizer):
    """What comes behind it, which may complete others, is not looked at: it need not be decoded."""
    tokens = tokenizer.encode("xabcdab")
    cut, text = next(
        (tokens[:count], tokenizer.decode(tokens[:count]))
        for count in range(len(tokens))
        if any(s in tokenizer.decode(tokens[:count]) for s in stop)
    )
    expected = text[: min(place for place in map(text.find, stop) if place >= 0)]
    for count in range(len(cut), len(tokens) + 1):  # as far as the response came before it was noticed
        finished = finish(detokenizer, prepared(stop), answer(tokens[:count]))
        assert (finished.tokens, finished.text, finished.finish_reason) == (cut, expected, "stop")
