"""What is told while responses are decoded: committed slots, final beginnings, and how listeners end a response."""

import dataclasses
import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refusion_jax as rf
from refusion_jax.data.sentencepiece_tokenizer import train_tokenizer
from refusion_jax.decoding import Job
from refusion_jax.decoding.events import Beginning, SlotEvent, beginnings, new_slots
from refusion_jax.decoding.generation import Row
from refusion_jax.decoding.layout import lay_out
from refusion_jax.modeling import Transformer

pytestmark = pytest.mark.usefixtures("quick_compilation")

EOS = 1

# ---- from a row's state --------------------------------------------------------------------------------------------

LAYOUT_CONFIG = rf.DecodeConfig(gen_length=4, slot_size=4)
JOB = Job(7, 2, lay_out([[9], rf.Hole(6), [9], rf.Hole(3)], LAYOUT_CONFIG), LAYOUT_CONFIG)
TOKENS = np.array([10, 11, 12, 13, 14, 15, 20, 21, 22, 0, 0, 0])


def state(committed, tokens=TOKENS):
    mask = np.zeros(len(tokens), bool)
    mask[list(committed)] = True
    nothing = np.zeros(len(tokens), np.int32)
    return Row(np.where(mask, tokens, 99), nothing.astype(np.float32), mask, nothing, 1, nothing, 0)


def test_new_slots():
    nothing = state([]).committed
    events = new_slots(JOB, state([6, 7, 8, 4, 5]), nothing)
    assert events == [SlotEvent(7, 2, 0, 4, [14, 15]), SlotEvent(7, 2, 1, 0, [20, 21, 22])]
    first = new_slots(JOB, state([0, 1, 2, 3, 4, 5]), state([4, 5]).committed)
    assert first == [SlotEvent(7, 2, 0, 0, [10, 11, 12, 13])]
    assert new_slots(JOB, state([6]), nothing) == [SlotEvent(7, 2, 1, 0, [20])]  # cut by an EOS
    assert new_slots(JOB, state([1, 2]), state([1, 2]).committed) == []


def test_beginnings():
    final = functools.partial(beginnings, JOB, eos_ids=(EOS, 2))
    assert final(state([])) == [Beginning([], False)]
    assert final(state([4, 5, 6, 7, 8])) == [Beginning([], False)]
    assert final(state([0, 1, 2, 3, 6, 7, 8])) == [Beginning([10, 11, 12, 13], False)]
    first = Beginning([10, 11, 12, 13, 14, 15], True)
    assert final(state(range(6))) == [first, Beginning([], False)]
    assert final(state(range(9))) == [first, Beginning([20, 21, 22], True)]


def test_an_eos_finishes_a_hole():
    final = functools.partial(beginnings, JOB, eos_ids=(EOS, 2))
    early, late = TOKENS.copy(), TOKENS.copy()
    early[1], late[5] = 2, EOS
    # The hole is ended, the next one begins; what was committed behind the EOS before does not count.
    ended = Beginning([10, 2], True)
    assert final(state([0, 1], early)) == [ended, Beginning([], False)]
    assert final(state([0, 1, 4, 5, 6, 7, 8], early)) == [ended, Beginning([20, 21, 22], True)]
    # An EOS behind a gap ends nothing yet.
    assert final(state([0, 4, 5, 6, 7, 8], late)) == [Beginning([10], False)]
    ended = Beginning([10, 11, 12, 13, 14, EOS], True)
    assert final(state([0, 1, 2, 3, 4, 5, 6], late)) == [ended, Beginning([20], False)]


# ---- through the front door ----------------------------------------------------------------------------------------

SETTINGS = {"gen_length": 16, "slot_size": 4, "slot_threshold": 0.15, "token_threshold": 0.3}
CONFIGS = [
    rf.DecodeConfig(**SETTINGS),
    rf.DecodeConfig(**SETTINGS, temperature=1.2),
    rf.DecodeConfig(**SETTINGS, algorithm="paper", temperature=0.8),
    rf.DecodeConfig(**SETTINGS, serial_num_blocks=2, suppress_ids=(EOS,), temperature=1.2),
    rf.DecodeConfig(**SETTINGS, temperature=1.2),
]
TEMPLATE = {"segments": ["ab", {"hole": 7}, "\n", {"hole": 6}]}
PROMPTS = ["1+2", "x=", "ab", "y", TEMPLATE]


@pytest.fixture(scope="module")
def model(quick_compilation):
    tokenizer = train_tokenizer(["abcdefghijklmnop\n 0123456789+=xyz"], "char", 64)
    config = rf.ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.4,
    )
    module, tokens = Transformer(config), jnp.zeros((1, 1), jnp.int32)
    params = nn.unbox(jax.jit(module.init)(jax.random.key(2), tokens, tokens))["params"]
    return rf.Model(config, module, params, tokenizer, rf.DecodeConfig())


def generate(model, watch=None, **arguments):
    """Ten responses on four rows."""
    arguments = {"num_samples": 2, "seed": 3} | arguments | ({} if watch is None else {"watch": watch})
    return rf.generate(model, PROMPTS, CONFIGS, batch_size=4, **arguments)


@pytest.fixture(scope="module")
def unwatched(model):
    return generate(model)


def collect(**options):
    slots, prefixes = {}, {}

    def on_slot(event):
        slots.setdefault((event.index, event.sample), []).append(event)

    def on_prefix(event):
        prefixes.setdefault((event.index, event.sample), []).append(event)

    return slots, prefixes, rf.Watch(on_slot=on_slot, on_prefix=on_prefix, **options)


NAMES = [(index, sample) for index in range(len(PROMPTS)) for sample in range(2)]


@pytest.mark.parametrize("every", [1, 2, 1000])
def test_slots_and_prefixes_tell_the_response(model, unwatched, every):
    slots, prefixes, watch = collect(every=every)
    out = generate(model, watch)
    assert out.tokens == unwatched.tokens and out.forwards == unwatched.forwards
    assert set(slots) == set(prefixes) == set(NAMES)
    out_of_order = False
    for place, name in enumerate(NAMES):
        events = slots[name]
        # Together the slots are all that was committed, each told once.
        spots = sorted((event.hole, event.start + i, t) for event in events for i, t in enumerate(event.tokens))
        assert [token for _, _, token in spots] == out.committed[place]
        assert len({(hole, offset) for hole, offset, _ in spots}) == len(spots)
        assert all(event.start % 4 == 0 and len(event.tokens) <= 4 for event in events)
        assert all(event.text == model.tokenizer.decode(event.tokens) for event in events)
        order = [(event.hole, event.start) for event in events]
        out_of_order |= order != sorted(order)
        grown = [event.tokens for event in prefixes[name]]
        assert all(len(a) < len(b) and b[: len(a)] == a for a, b in itertools.pairwise(grown))
        assert grown[-1] == out.tokens[place]
        assert all(event.text == model.tokenizer.decode(event.tokens) for event in prefixes[name])
    assert out_of_order or every == 1000
    if every == 1:
        for place, name in enumerate(NAMES):
            assert len(prefixes[name]) <= out.forwards[place]
        assert max(map(len, prefixes.values())) >= 3
    assert {"eos", "length"} == set(out.finish_reason)


def test_positions_of_slots_are_those_of_the_answer(model):
    slots, _, watch = collect(every=1)
    out = generate(model, watch)
    for place, (index, sample) in enumerate(NAMES):
        begins = [2, 2 + 7 + 1] if index == 4 else [len(PROMPTS[index])]
        told = {
            begins[event.hole] + event.start + i: token
            for event in slots[index, sample]
            for i, token in enumerate(event.tokens)
        }
        assert told == dict(zip(out.position_ids[place], out.committed[place], strict=True))


def test_a_callback_is_told_while_the_response_is_decoded(model):
    """A slot is told of before the ones that later forwards commit."""
    slots, _, watch = collect(every=1)
    out = generate(model, watch)
    for place, name in enumerate(NAMES):
        order = dict(zip(out.position_ids[place], out.order[place], strict=True))
        begins = [2, 2 + 7 + 1] if name[0] == 4 else [len(PROMPTS[name[0]])]
        forwards = [order[begins[event.hole] + event.start] for event in slots[name]]
        assert forwards == sorted(forwards)


@pytest.mark.parametrize("kind", ["on_slot", "on_prefix"])
def test_returning_false_cancels(model, unwatched, kind):
    """The response alone that was told of; it ends where it is."""
    told = []

    def listen(event):
        if (event.index, event.sample) == (3, 1):
            told.append(event)
            return False
        return None

    out = generate(model, rf.Watch(**{kind: listen}, every=1))
    place = NAMES.index((3, 1))
    assert out.finish_reason[place] == "cancelled"
    assert out.forwards[place] < unwatched.forwards[place] and len(told) == 1
    known = dict(zip(unwatched.position_ids[place], unwatched.committed[place], strict=True))
    assert 0 < len(out.committed[place]) < len(known)
    assert all(known[at] == t for at, t in zip(out.position_ids[place], out.committed[place], strict=True))
    if kind == "on_prefix":
        assert out.tokens[place][: len(told[0].tokens)] == told[0].tokens
    for other in range(len(NAMES)):
        if other != place:
            assert out.committed[other] == unwatched.committed[other]
            assert out.finish_reason[other] == unwatched.finish_reason[other]


def test_only_false_cancels(model, unwatched):
    for value in (None, True, 0, ""):
        out = generate(model, rf.Watch(on_slot=lambda event, value=value: value, every=3))
        assert out.finish_reason == unwatched.finish_reason
    out = generate(model, rf.Watch(on_slot=lambda event: np.False_, every=1))
    assert "cancelled" in out.finish_reason


@pytest.mark.parametrize("name", ["on_slot", "on_prefix"])
def test_callbacks_are_functions(name):
    with pytest.raises(rf.ConfigError, match=f"{name} is 'x'; give a function."):
        rf.Watch(**{name: "x"})


def test_without_a_tokenizer_events_have_no_text(model):
    bare = dataclasses.replace(model, tokenizer=None)
    slots, prefixes, watch = collect(every=1)
    prompts = [[5, 6], [7], [8, 9], [10]]
    rf.generate(bare, prompts, CONFIGS[:4], batch_size=4, watch=watch)
    assert set(slots) == set(prefixes) == {(index, 0) for index in range(4)}
    assert all(event.text is None for told in (*slots.values(), *prefixes.values()) for event in told)


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_looking_less_than_every_forward_is_refused(every):
    with pytest.raises(rf.ConfigError) as caught:
        rf.Watch(every=every)
    assert str(caught.value) == f"every is {every!r}; look at least every forward, 1."
