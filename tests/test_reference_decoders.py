"""The reference decoders against everything the authors' implementation recorded, and their own extensions."""

import json
from pathlib import Path

import numpy as np
import pytest
from reference_decoders import choices, decode_paper, decode_self_correcting, load_reference_model

REFERENCE = Path(__file__).parent / "data" / "reference"
SETTINGS = ("gen_length", "slot_size", "serial_num_blocks", "slot_threshold", "token_threshold")
SPECIAL = {"eos_ids": (1,), "mask_id": 2}
DECODERS = [decode_paper, decode_self_correcting]


@pytest.fixture(scope="module")
def model():
    return load_reference_model(REFERENCE / "checkpoint")


def cases(name):
    return json.loads((REFERENCE / "cases" / name).read_text())


def settings(case):
    return {name: case[name] for name in SETTINGS} | SPECIAL


def noise(position, draw):
    return np.random.default_rng((7, position, draw)).gumbel(size=64).astype(np.float32)


def test_forward(model):
    recorded = np.load(REFERENCE / "cases" / "forward.npz")
    for name in sorted({key.split(".")[0] for key in recorded.files}):
        tokens, position_ids, logits = (recorded[f"{name}.{part}"] for part in ("tokens", "position_ids", "logits"))
        causal = np.tril(np.ones((tokens.shape[1],) * 2, bool))
        for row in range(len(tokens)):
            ours = model.forward(tokens[row], position_ids[row], causal)
            assert ours.dtype == np.float32
            np.testing.assert_allclose(ours, logits[row], rtol=0, atol=1e-4, err_msg=f"{name}, row {row}")


@pytest.mark.parametrize(
    ("name", "count", "forwards", "fused_forwards"),
    [
        ("decode.json", 160, 952, 810),
        ("decode_infill.json", 80, 1052, 1010),
        ("decode_eos.json", 40, 760, 749),
        ("decode_fallback.json", 40, 938, 870),
    ],
)
def test_paper_cases(model, name, count, forwards, fused_forwards):
    results = []
    for index, case in enumerate(cases(name)):
        label = f"{name}[{index}] {case['question']}"
        result = decode_paper(model, case["prompt"], **settings(case))
        results.append(result)
        assert case["prompt"] + result.committed == case["expected"], label
        assert result.tpf == pytest.approx(case["tpf"], rel=0, abs=1e-6), label
        assert result.forwards == case["forwards"], label
        check_shape(result, case, label)
        if name in ("decode_infill.json", "decode_eos.json"):
            assert result.infills > 0, label
    assert len(results) == count
    assert sum(result.forwards for result in results) == forwards
    assert sum(result.fused_forwards for result in results) == fused_forwards


def test_self_correcting_cases(model):
    total = 0
    recorded = cases("decode_self_correcting.json")
    for index, case in enumerate(recorded):
        label = f"decode_self_correcting.json[{index}] {case['question']}"
        result = decode_self_correcting(model, case["prompt"], redraft=case["redraft"], **settings(case))
        assert case["prompt"] + result.committed == case["expected"], label
        assert result.forwards == case["forwards"], label
        check_shape(result, case, label)
        total += result.forwards
    assert len(recorded) == 160
    assert total == 589


def check_shape(result, case, label):
    assert len(result.committed) == len(result.positions) == len(result.order), label
    assert result.positions == sorted(set(result.positions)), label
    assert result.positions[0] == len(case["prompt"]), label
    assert max(result.order) == result.forwards - 1, label  # nothing is computed after the last commit


def test_infill_drafts_ignore_noise_and_drafts_draw_by_fused_forward(model):
    """Draws name fused forwards, so they rise from draft to draft and none is used twice."""
    infills = 0
    for index, case in enumerate(cases("decode_infill.json")[:6]):
        label = f"decode_infill.json[{index}]"
        asked = []

        def spy(position, draw, asked=asked):
            asked.append((draw, position))
            return noise(position, draw)

        result = decode_paper(model, case["prompt"], temperature=0.5, gumbel=spy, **settings(case))
        assert asked == sorted(set(asked)), label
        assert asked[0][0] == 0 and asked[-1][0] < result.fused_forwards, label
        infills += result.infills
    assert infills > 0


@pytest.mark.parametrize("decode", DECODERS)
def test_no_noise_is_greedy(model, decode):
    case = cases("decode_infill.json")[1]
    greedy = decode(model, case["prompt"], **settings(case))
    silent = decode(
        model, case["prompt"], temperature=1.0, gumbel=lambda p, d: np.zeros(64, np.float32), **settings(case)
    )
    assert silent == greedy


@pytest.mark.parametrize("decode", DECODERS)
def test_suppressed_tokens_are_never_committed(model, decode):
    for index, case in enumerate(cases("decode.json")[:4]):
        plain = decode(model, case["prompt"], **settings(case))
        suppress = (plain.committed[2], SPECIAL["eos_ids"][0])
        result = decode(model, case["prompt"], suppress=suppress, **settings(case))
        assert not set(suppress) & set(result.committed), f"decode.json[{index}]"
        assert not result.committed_eos_cut
        assert len(result.committed) == -(-case["gen_length"] // case["slot_size"]) * case["slot_size"]


def test_choices_take_the_lowest_of_equals():
    logits = np.array([[0, 3, 3, 1]], np.float32)
    assert choices(logits, [5]).tolist() == [1]
    assert choices(logits, [5], suppress=(1,)).tolist() == [2]


def test_self_correcting_with_temperature_samples_ancestrally_inside_slots(model):
    """At token threshold 1 every token but a slot's first is the noisy choice after all committed before it."""
    for index, case in enumerate(cases("decode.json")[:4]):
        arguments = settings(case) | {"token_threshold": 1.0}
        result = decode_self_correcting(model, case["prompt"], temperature=0.7, gumbel=noise, **arguments)
        start = len(case["prompt"])
        commit_order = sorted(zip(result.order, result.positions, result.committed, strict=True))
        positions = [*range(start), *(position for _, position, _ in commit_order)]
        tokens = [*case["prompt"], *(token for _, _, token in commit_order)]
        logits = model.forward(tokens, positions, np.tril(np.ones((len(tokens),) * 2, bool)))
        chosen = choices(logits[:-1], positions[1:], 0.7, noise)
        for i in range(start, len(tokens)):
            if (positions[i] - start) % case["slot_size"]:
                assert chosen[i - 1] == tokens[i], f"decode.json[{index}], position {positions[i]}"
