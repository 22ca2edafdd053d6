"""What is told of responses as text: slots and beginnings that cut characters, and several tokens that end one."""

import dataclasses
import itertools
import random

import numpy as np
import pytest

import refusion_jax as rf
from refusion_jax.decoding import Job
from refusion_jax.decoding.generation import Row
from refusion_jax.decoding.layout import lay_out
from refusion_jax.modeling import Transformer
from refusion_jax.responses import Detokenizer
from refusion_jax.watching import Observer, Watch

pytestmark = pytest.mark.usefixtures("quick_compilation")

TEXT = "a😀日本語b\ufffdテ👍🏽\n\nc"


class Cancelled:
    """A stream that only notes which responses were ended."""

    def __init__(self):
        self.reasons = {}

    def cancel(self, name, reason="cancelled"):
        self.reasons[name] = reason


def observe(tokenizer, holes, stop=(), slot_size=3, seed=0):
    """Commits texts slot by slot in a random order: (slot events, prefix events, reasons for ending)."""
    tokens = [tokenizer.encode(text) for text in holes]
    config = rf.DecodeConfig(slot_size=slot_size, stop=stop)
    parts = itertools.chain.from_iterable(([5], rf.Hole(len(hole))) for hole in tokens)
    layout = lay_out(list(parts), config)
    values = np.array([token for hole in tokens for token in hole])
    slots, prefixes, stream = [], [], Cancelled()
    watch = Watch(on_slot=slots.append, on_prefix=prefixes.append, every=1)
    eos_ids = (tokenizer.eos_token_id,)
    observer = Observer(stream, watch, eos_ids, Detokenizer(tokenizer, eos_ids))
    job, committed, nothing = Job(3, 1, layout, config), np.zeros(len(values), bool), np.zeros(len(values), np.int32)
    starts = sorted(set(layout.slot_starts.tolist()))
    random.Random(seed).shuffle(starts)
    for start in starts:
        committed = committed | (layout.slot_starts == start)
        observer(job, Row(np.where(committed, values, 99), nothing, committed, nothing, 1, nothing, 0))
        if stream.reasons:
            break
    return slots, prefixes, stream.reasons


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("slot_size", [1, 2, 3, 5, 64])
def test_text_is_told_in_whole_characters(chat_model, slot_size, seed):
    slots, prefixes, _ = observe(chat_model.tokenizer, [TEXT], slot_size=slot_size, seed=seed)
    assert all(event.text in TEXT for event in slots)
    texts = [event.text for event in prefixes]
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))
    assert texts[-1] == TEXT and all(TEXT.startswith(text) for text in texts)
    assert prefixes[-1].tokens == chat_model.tokenizer.encode(TEXT)
    if slot_size == 1:
        assert all(event.text == "" or ord(event.text) < 128 for event in slots)


@pytest.mark.parametrize("seed", range(5))
def test_holes_keep_their_characters_apart(chat_model, seed):
    texts = ["日本", "a😀", "\u8a9e"]
    slots, prefixes, _ = observe(chat_model.tokenizer, texts, seed=seed)
    assert {event.hole for event in slots} == {0, 1, 2}
    assert prefixes[-1].text == "".join(texts)
    assert all("".join(texts).startswith(event.text) for event in prefixes)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("stop", ["\n\n", "本語", "語b\ufffd"])
def test_told_text_ends_before_a_stop_text(chat_model, stop, seed):
    """It never holds a part of one that would have to be taken back."""
    _, prefixes, reasons = observe(chat_model.tokenizer, [TEXT], stop=(stop, "never"), slot_size=2, seed=seed)
    wanted = TEXT[: TEXT.index(stop)]
    assert reasons == {(3, 1): "stop"}
    assert all(wanted.startswith(event.text) for event in prefixes) and prefixes[-1].text == wanted
    spelled = chat_model.tokenizer.decode(prefixes[-1].tokens)
    assert stop in spelled and TEXT.startswith(spelled)


def only(model, tokens):
    """Suppresses all other tokens."""
    return tuple(token for token in range(model.config.vocab_size) if token not in tokens)


@pytest.mark.parametrize("stop", [(), ("aa", "ab", "ba")])
def test_told_text_is_the_answers(chat_model, stop):
    """With bytes in an order that makes few characters, of plain prompts and templates."""
    tokens = {*chat_model.tokenizer.encode("a😀b本"), *chat_model.config.eos_token_ids}
    config = dataclasses.replace(chat_model.decode, temperature=3.0, suppress_ids=only(chat_model, tokens), stop=stop)
    told = {}
    watch = Watch(on_prefix=lambda event: told.setdefault((event.index, event.sample), []).append(event), every=1)
    prompts = ["x", {"segments": ["x", {"hole": 9}, "y", {"hole": 7}]}]
    out = rf.generate(chat_model, prompts, config, num_samples=4, batch_size=8, watch=watch)
    assert {"eos", "stop" if stop else "length"} <= set(out.finish_reason)
    for place, name in enumerate(itertools.product(range(2), range(4))):
        texts = [event.text for event in told[name]]
        assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))
        assert texts[-1] == "".join(out.hole_texts[place])
        assert told[name][-1].tokens == out.tokens[place]


def test_every_token_that_ends_a_response_does(chat_model):
    """None of them is in the text, also where the tokenizer has one for it."""
    letters = chat_model.tokenizer.encode("abc")
    ends = (chat_model.tokenizer.eos_token_id, letters[1], letters[2])
    config = dataclasses.replace(chat_model.config, eos_token_ids=ends)
    model = dataclasses.replace(chat_model, config=config, module=Transformer(config))
    decode = dataclasses.replace(
        model.decode, temperature=3.0, suppress_ids=only(model, {letters[0], *ends}), slot_size=2
    )
    told = []
    watch = Watch(on_prefix=told.append, on_slot=told.append)
    out = rf.generate(model, ["x"] * 16, decode, batch_size=16, watch=watch)
    assert {tokens[-1] for tokens in out.tokens} >= set(ends)
    for tokens, text, reason in zip(out.tokens, out.text, out.finish_reason, strict=True):
        ended = tokens[-1] in ends
        assert reason == ("eos" if ended else "length")
        assert text == "a" * (len(tokens) - ended) and not set(tokens[:-1]) & set(ends)
    assert all(set(event.text) <= {"a"} for event in told)
