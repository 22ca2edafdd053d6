"""The decisions that can be changed: slot scores against NumPy, and decodes under other rules."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refusion_jax as rf
from refusion_jax.config import DecodeConfig, ModelConfig
from refusion_jax.decoding import Hole, Rules, SlotScore, decode_prompts
from refusion_jax.decoding.rules import (
    SLOT_SCORES,
    Verification,
    above_threshold_or_own_choice,
    margin_to_second,
    negative_entropy,
    of_first,
    of_mean,
    own_choice,
    probability,
)
from refusion_jax.modeling import Transformer

pytestmark = pytest.mark.usefixtures("quick_compilation")

COUNT, VOCAB = 9, 7
# Slots of 3, 1, 4 and 2 tokens, and of one row one slot only.
SLOT_STARTS = np.array([[0, 0, 0, 3, 4, 4, 4, 4, 8, 8], [0] * 10])


# ---- slot scores ---------------------------------------------------------------------------------------------------


@pytest.fixture
def logits():
    logits = np.random.default_rng(0).normal(scale=2, size=(COUNT, VOCAB)).astype(np.float32)
    logits[0] = 0
    logits[1] = [0, 0, 50, 0, 0, 0, 0]
    logits[2] = [3, 3, -1, -1, -1, -1, -1]
    return logits


def softmax(logits):
    exp = np.exp(np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def test_probability(logits):
    sure = softmax(logits).max(axis=-1)
    np.testing.assert_array_equal(probability(logits, sure), sure)


def test_margin_to_second(logits):
    second, best = np.sort(softmax(logits), axis=-1)[:, -2:].T
    got = margin_to_second(jnp.asarray(logits), None)
    np.testing.assert_allclose(got, best - second, atol=1e-6)
    np.testing.assert_allclose(got[:3], [0, 1, 0], atol=1e-6)


def test_negative_entropy(logits):
    p = softmax(logits)
    got = negative_entropy(jnp.asarray(logits), None)
    np.testing.assert_allclose(got, 1 + (p * np.log(p)).sum(axis=-1) / np.log(VOCAB), atol=1e-6)
    np.testing.assert_allclose(got[:2], [0, 1], atol=1e-6)
    assert ((got >= -1e-6) & (got <= 1 + 1e-6)).all()


def test_slot_parts():
    confidence = np.random.default_rng(1).uniform(size=SLOT_STARTS.shape).astype(np.float32)
    first, mean = of_first(confidence, SLOT_STARTS), of_mean(jnp.asarray(confidence), SLOT_STARTS)
    for row, starts in enumerate(SLOT_STARTS):
        for offset, start in enumerate(starts):
            assert first[row, offset] == confidence[row, start]
            np.testing.assert_allclose(mean[row, offset], confidence[row, starts == start].mean(), rtol=1e-6)


def test_all_scores_are_at_hand():
    assert set(SLOT_SCORES) == {"first_token", "mean", "margin", "entropy"}
    assert rf.SLOT_SCORES is SLOT_SCORES
    assert SLOT_SCORES["first_token"] == SlotScore() == Rules().slot_score


def test_the_default_rules():
    token, choice = np.array([[3, 3, 4, 4]]), np.array([[3, 4, 4, 5]])
    for ours in (False, True):
        verification = Verification(
            token, np.array([[0.1, 0.9, 0.5, 0.5]]), choice, np.ones((1, 4)), np.array([[0.5]]), np.array([[ours]])
        )
        # Not at the threshold, but above; a probable enough token stands although it is not the model's choice.
        passes = above_threshold_or_own_choice(verification)
        assert passes.tolist() == [[ours, True, ours, False]]
        assert own_choice(verification).tolist() == choice.tolist()


# ---- decodes -------------------------------------------------------------------------------------------------------

CONFIG = ModelConfig(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=48,
    initializer_range=0.6,
)
MODULE = Transformer(CONFIG)
apply = jax.jit(MODULE.apply)
PROMPTS = [[5, 8], [9, 20, 3], [[7], Hole(7), [9, 9], Hole(5)], [4]]
SETTINGS = {"slot_size": 4, "gen_length": 12, "slot_threshold": 0.5, "token_threshold": 0.4, "suppress_ids": (1,)}
CONFIGS = [
    DecodeConfig(**SETTINGS),
    DecodeConfig(**SETTINGS, serial_num_blocks=3),
    DecodeConfig(**SETTINGS, redraft=True),
    DecodeConfig(**SETTINGS, algorithm="paper"),
]
WHOLE = DecodeConfig(gen_length=8, slot_size=8, suppress_ids=(1,))  # one slot is the whole response


@pytest.fixture(scope="module")
def params(quick_compilation):
    tokens = jnp.zeros((1, 1), jnp.int32)
    return nn.unbox(jax.jit(MODULE.init)(jax.random.key(1), tokens, tokens))["params"]


def decode(params, rules):
    """The four prompts, and two more whose only slot is the whole response: of each algorithm the same program."""
    return decode_prompts(MODULE, params, [*PROMPTS, [5, 8], [11]], [*CONFIGS, WHOLE, WHOLE], rules=rules, batch_size=4)


def reject_everything(v):
    return jnp.zeros_like(v.token, bool)


def accept_everything(v):
    return jnp.ones_like(v.token, bool)


def keep_the_draft(v):
    return v.token


def by_place(confidence, slot_starts):
    return slot_starts / 100.0


@pytest.fixture(scope="module")
def default(params):
    return decode(params, Rules())


def check_complete(result):
    """An EOS is never proposed, so every response is as long as its holes."""
    lengths = [12, 12, 12, 12, 8, 8]
    assert [len(tokens) for tokens in result.committed] == lengths
    assert result.finish_reason == ["length"] * 6
    assert [max(order) < forwards for order, forwards in zip(result.order, result.forwards, strict=True)] == [True] * 6


def drafts(params, prompt, length):
    """What the model proposes at mask tokens behind a prompt."""
    tokens = np.array([prompt + [CONFIG.mask_token_id] * (16 - len(prompt))])  # those behind change nothing
    logits = np.array(apply({"params": params}, tokens, np.arange(16)[None])[0, len(prompt) : len(prompt) + length])
    logits[:, 1] = -np.inf
    return logits.argmax(axis=-1).tolist()


def first_forwards(result, index):
    """Of each slot of a plain prompt, when it was committed."""
    return [result.order[index][start] for start in (0, 4, 8)]


@pytest.mark.slow
def test_decodes_with_every_score_end(params, default):
    check_complete(default)
    results = [decode(params, Rules(slot_score=score)) for name, score in SLOT_SCORES.items() if name != "first_token"]
    for result in results:
        check_complete(result)
    assert any(result != default for result in results)


def test_the_same_functions_are_the_same_program(params, default, count_compilations):
    with count_compilations() as compiled:
        result = decode(params, Rules(SlotScore(probability, of_first), above_threshold_or_own_choice, own_choice))
    assert result == default
    assert compiled == []


def test_a_custom_score_decides_the_order(params, default):
    """A score that knows places only: the last slot first, one at a time. With one slot there is nothing to decide."""
    result = decode(params, Rules(slot_score=SlotScore(slot=by_place)))
    check_complete(result)
    first, second, third = first_forwards(result, 0)
    assert third < second < first
    assert first_forwards(default, 0) != [first, second, third]
    assert (result.committed[4:], result.order[4:]) == (default.committed[4:], default.order[4:])


def test_rejecting_everything_still_ends(params):
    """Each forward settles one token of a self-correcting row's draft at least, and one round of infilling one of each
    slot."""
    result = decode(params, Rules(accept=reject_everything))
    check_complete(result)
    for index in (4, 5):
        # The draft, then a verification per token: its first one stands when it is drafted.
        assert result.forwards[index] == 1 + 8
        assert result.order[index] == [8] * 8
    assert all(forwards <= 4 * 12 for forwards in result.forwards)


def test_accepting_everything_commits_the_drafts(params):
    result = decode(params, Rules(accept=accept_everything))
    check_complete(result)
    for index, prompt in ((4, [5, 8]), (5, [11])):
        assert result.forwards[index] == 2
        assert result.committed[index] == drafts(params, prompt, 8)
    # A verification carries the next draft: one forward for each round of slots, and the first draft.
    assert all(forwards == 1 + len(set(order)) for forwards, order in zip(result.forwards, result.order, strict=True))


def test_a_repair_that_keeps_the_draft(params, default):
    """It takes as many forwards as there are rejected tokens, and commits the drafts in the end."""
    result = decode(params, Rules(repair=keep_the_draft))
    check_complete(result)
    changed = False
    for index, prompt in ((4, [5, 8]), (5, [11])):
        expected = drafts(params, prompt, 8)
        assert result.committed[index] == expected
        changed |= default.committed[index] != expected
    assert changed, "the default repairs nothing"
    assert result.committed[3] == default.committed[3]  # the published algorithm does not repair


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Rules(slot_score="margin"), "slot_score is 'margin'; give a SlotScore"),
        (lambda: Rules(accept=5), "accept is 5; give a function"),
        (lambda: Rules(repair=None), "repair is None; give a function"),
        (lambda: SlotScore(token=1), "token is 1; give a function"),
        (lambda: SlotScore(slot="x"), "slot is 'x'; give a function"),
    ],
)
def test_rules_that_are_no_functions_are_refused(make, sentence):
    with pytest.raises(rf.ConfigError) as caught:
        make()
    assert str(caught.value).startswith(sentence)


VERIFICATION = Verification(
    token=jnp.array([[3, 4]]), probability=jnp.ones((1, 2)), choice=jnp.array([[5, 6]]),
    choice_probability=jnp.ones((1, 2)), threshold=jnp.ones((1, 1)), self_correcting=jnp.ones((1, 1), bool),
)  # fmt: skip


@pytest.mark.parametrize(
    "said", [None, True, jnp.ones((1, 2)), jnp.ones((1, 1), bool), jnp.ones((2,), bool)],
    ids=["nothing", "a truth value", "floats", "a narrow array", "a flat array"],
)  # fmt: skip
def test_what_accept_returns_is_checked(said):
    with pytest.raises(rf.ConfigError, match=r"accept returned .*; it must return bool of shape \(1, 2\)."):
        Rules(accept=lambda v: said).accepted(VERIFICATION)


def test_what_repair_returns_is_checked_and_kept_inside_the_vocabulary():
    with pytest.raises(rf.ConfigError, match=r"repair returned .*; it must return int32 of shape \(1, 2\)."):
        Rules(repair=lambda v: v.probability).repaired(VERIFICATION, 10)
    replaced = Rules(repair=lambda v: v.choice * jnp.array([[-1, 100]])).repaired(VERIFICATION, 10)
    assert replaced.tolist() == [[0, 9]]
