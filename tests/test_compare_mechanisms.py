"""The paper's decoding with repaired infilling: unrepaired it is the product's, and repairs do what they say."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import refusion_jax as rf
from benchmarks import compare_mechanisms, compare_repairs
from benchmarks.compare_mechanisms import VARIANTS, mechanisms, text
from benchmarks.compare_repairs import Network, Origin, Repairs, decode
from refusion_jax.config import ConfigError

pytestmark = pytest.mark.slow

REFERENCE = Path(__file__).parent / "data" / "reference"
SETTINGS = ("gen_length", "slot_size", "serial_num_blocks", "slot_threshold", "token_threshold")
LONGEST, CAPACITY = 32, 64  # tokens of a prompt and of a response; of both together


@pytest.fixture(scope="module")
def model():
    return rf.load(REFERENCE / "checkpoint")


@pytest.fixture(scope="module")
def cases():
    """Recorded infillings."""
    recorded = json.loads((REFERENCE / "cases" / "decode_infill.json").read_text())
    pairs = [(case, decode_config(case)) for case in recorded]
    return [(case, config) for case, config in pairs if max(len(case["prompt"]), config.rounded_length) <= LONGEST]


@pytest.fixture(scope="module")
def make_network(model, cases):
    """Makes networks, all of one compiled forward."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_repairs, "NARROWEST", CAPACITY)
        yield lambda: Network(model, max(len(case["prompt"]) for case, _ in cases), CAPACITY)


@pytest.fixture(scope="module")
def network(make_network):
    return make_network()


def decode_config(case):
    return rf.DecodeConfig(algorithm="paper", **{name: case[name] for name in SETTINGS})


def committed(decoded):
    return decoded.tokens[decoded.tokens >= 0].tolist()


@pytest.fixture(scope="module")
def decoded(network, cases):
    """By variant, what the cases are decoded to."""
    return {
        name: [decode(network, case["prompt"], config, repairs) for case, config in cases]
        for name, repairs in VARIANTS.items()
    }


def test_without_repairs_it_is_the_paper_s_decoding(cases, decoded):
    assert len(cases) > 5
    for (case, _), found in zip(cases, decoded["paper"], strict=True):
        assert case["prompt"] + committed(found) == case["expected"]
        assert found.forwards == case["forwards"]


def test_repairs_change_responses(decoded):
    tokens = {name: [committed(each) for each in found] for name, found in decoded.items()}
    assert all(tokens[name] != tokens["paper"] for name in ("checked", "next-token proposals", "all three"))


def test_no_token_stands_unchecked_where_all_are_checked(decoded):
    unchecked = {name: sum(np.sum(each.origins == Origin.UNCHECKED) for each in decoded[name]) for name in VARIANTS}
    assert all((unchecked[name] == 0) == repairs.checked for name, repairs in VARIANTS.items())


def test_a_round_of_checked_next_token_choices_is_one_forward(network, cases):
    """Threshold 1 passes nothing but the token whose turn it is: rounds are as many as a slot has further tokens."""
    prompt = cases[0][0]["prompt"]
    config = rf.DecodeConfig(gen_length=8, slot_size=8, token_threshold=1.0)
    counts = {name: decode(network, prompt, config, repairs).forwards for name, repairs in VARIANTS.items()}
    assert counts["paper"] == 2 + 2 * 7
    assert counts["next-token proposals"] == 2 + 2 * 7
    assert counts["checked, next-token proposals"] == 2 + 7
    assert counts["recomputed KV"] == 2 + 2 * 7 + 1
    assert counts["all three"] == 2 + 7 + 1


def test_own_choices_are_those_of_left_to_right_decoding(make_network, network, cases):
    """One slot, nothing above the threshold, all checked: greedy next tokens behind the slot's drafted first one."""
    prompt = cases[0][0]["prompt"]
    config = rf.DecodeConfig(gen_length=8, slot_size=8, token_threshold=1.0)
    for name in ("checked", "checked, next-token proposals", "all three"):
        tokens = committed(decode(network, prompt, config, VARIANTS[name]))
        sequence = np.array(prompt + tokens)
        reading = make_network().forward(sequence, np.arange(len(sequence)))
        assert reading.own[len(prompt) + 1 :].tolist() == tokens[1:], name


def in_causal_order(make_network, network, case, config, repairs):
    """Decodes a case: whether the buffer holds the keys and values of one forward over everything in the order of
    commitment, and whether by that forward every response token but slots' first ones stands.
    """
    prompt = np.array(case["prompt"])
    found = decode(network, prompt, config, repairs)
    offsets = np.lexsort((np.arange(len(found.tokens)), found.order))
    offsets = offsets[found.tokens[offsets] >= 0]
    tokens = np.concatenate([prompt, found.tokens[offsets]])
    position_ids = np.concatenate([np.arange(len(prompt)), len(prompt) + offsets])
    reading = make_network().forward(tokens, position_ids)
    count, pairs = len(tokens), zip((network.cache.keys, network.cache.values), reading.kv, strict=True)
    same = all(np.allclose(kept[..., :count, :], new[..., :count, :], atol=1e-4) for kept, new in pairs)
    stands = (reading.own == tokens) | (reading.probability > config.token_threshold)
    return same, stands[len(prompt) :][offsets % config.slot_size > 0].all()


def is_causal(*args):
    return in_causal_order(*args)[0]


@pytest.mark.parametrize(
    "name", ["recomputed KV", "all three", "checked, next-token proposals, slots in view", "all five"]
)
def test_keys_and_values_are_those_of_causal_order(make_network, network, cases, name):
    assert all(is_causal(make_network, network, case, config, VARIANTS[name]) for case, config in cases)


def test_keys_and_values_of_infilled_slots_are_not_causal(make_network, network, cases):
    assert not all(is_causal(make_network, network, case, config, Repairs()) for case, config in cases)


def test_after_all_repairs_every_token_stands_by_what_is_before_it(make_network, network, cases):
    def all_stand(name):
        return all(in_causal_order(make_network, network, *each, VARIANTS[name])[1] for each in cases)

    assert all_stand("all five")
    assert not all_stand("all three")


def test_slots_settle_in_order_only_in_view_of_one_another():
    with pytest.raises(ConfigError, match="in_view"):
        Repairs(in_order=True)


def test_a_replaced_token_leaves_no_keys_and_values_behind(make_network, network, cases):
    """A single slot sees nothing that it would not see in causal order."""
    for case, config in cases:
        single = dataclasses.replace(config, gen_length=16, slot_size=16, serial_num_blocks=1)
        assert is_causal(make_network, network, case, single, Repairs(checked=True))


def test_the_study(model, make_network, cases, monkeypatch):
    monkeypatch.setattr(compare_mechanisms, "BATCH_SIZE", 1)
    recorded = [case for case, _ in cases]
    examples = [(case["prompt"], case["expected"][len(case["prompt"]) :]) for case in recorded]
    result = mechanisms(model, examples, slot_sizes=(8,), gen_length=CAPACITY, slot_threshold=0.3, token_threshold=0.99)
    json.dumps(result)
    found = result["slot_sizes"]["8"]
    assert found["same_as_product"] == 1
    assert set(found["variants"]) == {*VARIANTS, "self-correcting"}
    paper, errors = found["variants"]["paper"], found["errors"]["paper"]
    assert paper["unchecked"] == errors["unchecked"]["tokens"] > 0
    assert paper["tokens"] == sum(each["tokens"] for each in errors.values())
    wrong = round((1 - paper["exact_match"]) * len(examples))
    assert sum(each["first"] for each in errors.values()) == wrong > 0
    assert sum(each["earliest"] for each in errors.values()) == wrong
    for each in found["variants"].values():
        assert each["fused_tokens_per_forward"] >= each["tokens_per_forward"] == each["tokens"] / each["forwards"]
    assert f"| paper | {paper['exact_match']:.3f} |" in text(result)
