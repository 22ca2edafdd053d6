"""Both decoders against every recorded case, one row at a time and in mixed batches."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from refusion_jax import api
from refusion_jax.config import DecodeConfig
from refusion_jax.decoding import batching

REFERENCE = Path(__file__).parents[1] / "data" / "reference"
SETTINGS = ("gen_length", "slot_size", "serial_num_blocks", "slot_threshold", "token_threshold")
# (cases, forwards they take in all): a verification carries the next draft, an infill's last one too.
FILES = {
    "decode.json": (160, 791),
    "decode_infill.json": (80, 980),
    "decode_eos.json": (40, 722),
    "decode_fallback.json": (40, 793),
    "decode_self_correcting.json": (160, 589),
}


def read_cases():
    cases = []
    for name, (count, _) in FILES.items():
        recorded = json.loads((REFERENCE / "cases" / name).read_text())
        assert len(recorded) == count
        cases += [case | {"file": name, "label": f"{name}[{index}]"} for index, case in enumerate(recorded)]
    return cases


def decode_config(case):
    ours = case["file"] == "decode_self_correcting.json"
    algorithm = {"algorithm": "self_correcting", "redraft": case["redraft"]} if ours else {"algorithm": "paper"}
    return DecodeConfig(**algorithm, **{name: case[name] for name in SETTINGS})


def check(cases, result):
    totals = dict.fromkeys(FILES, 0)
    for index, case in enumerate(cases):
        label, prompt = case["label"], case["prompt"]
        assert prompt + result.committed[index] == case["expected"], label
        totals[case["file"]] += result.forwards[index]
        if case["file"] == "decode_self_correcting.json":
            assert result.forwards[index] == case["forwards"], label
            assert result.tpf[index] == pytest.approx(len(result.committed[index]) / case["forwards"]), label
        else:
            assert result.tpf[index] == pytest.approx(case["tpf"], rel=0, abs=1e-6), label
    for name, (_, limit) in FILES.items():
        assert totals[name] <= limit, name


@pytest.fixture(scope="module")
def model():
    return api.load(REFERENCE / "checkpoint")


@pytest.fixture(scope="module")
def compiled(count_compilations):
    with count_compilations() as names:
        yield names


def shuffled_cases():
    cases = read_cases()
    return [cases[index] for index in np.random.default_rng(0).permutation(len(cases))]


def generate(model, cases, batch_size):
    prompts, configs = [case["prompt"] for case in cases], list(map(decode_config, cases))
    return api.generate(model, prompts, configs, batch_size=batch_size)


@pytest.mark.parametrize(
    "batch_size", [pytest.param(1, marks=pytest.mark.slow, id="alone"), pytest.param(8, id="mixed")]
)
def test_recorded_cases(model, compiled, monkeypatch, batch_size):
    # One response bucket for all: on two cores a compilation costs more than decoding all cases.
    monkeypatch.setattr(batching, "MIN_RESPONSE_BUCKET", 256)
    cases = shuffled_cases()
    check(cases, generate(model, cases, batch_size))
    # Whatever the settings, all ways together stay below ten.
    assert compiled.count("jit(decode_loop)") < 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "types",
    [{"quantize": "int8"}, {"kv_dtype": "int8"}, {"quantize": "int8", "kv_dtype": "int8"}],
    ids=["weights", "buffer", "both"],
)
def test_int8_commits_nearly_the_same_tokens(monkeypatch, types):
    """The recorded responses are those of float32."""
    monkeypatch.setattr(batching, "MIN_RESPONSE_BUCKET", 256)
    cases = shuffled_cases()
    agrees = []
    for case, tokens in zip(
        cases, generate(api.load(REFERENCE / "checkpoint", **types), cases, 40).committed, strict=True
    ):
        recorded = case["expected"][len(case["prompt"]) :]
        # Position by position; what only one of the two has is no agreement.
        agrees += [ours == theirs for ours, theirs in itertools.zip_longest(tokens, recorded)]
    print(f"\n{types}: {np.mean(agrees):.2%} of {len(agrees):,} committed tokens agree")
    assert np.mean(agrees) >= 0.98


@pytest.mark.slow
def test_forty_rows(model, compiled, monkeypatch):
    # Short responses: the same decisions in a large batch, for a small part of the arithmetic.
    monkeypatch.setattr(batching, "MIN_RESPONSE_BUCKET", 64)
    cases = [case for case in shuffled_cases() if decode_config(case).rounded_length <= 64][:40]
    assert len({case["file"] for case in cases}) >= 4
    check(cases, generate(model, cases, 40))
    assert compiled.count("jit(decode_loop)") < 10


def test_cases_mix_within_batches():
    """What the mixed test relies on: a batch of 8 holds several algorithms, slot sizes, thresholds and lengths."""
    cases = shuffled_cases()
    for start in range(0, len(cases), 8):
        batch = cases[start : start + 8]
        assert len({case["file"] for case in batch}) > 1
        assert len({case["slot_size"] for case in batch}) > 1
        assert len({len(case["prompt"]) for case in batch}) > 1
    assert np.mean([len({c["file"] for c in cases[i : i + 8]}) for i in range(0, 480, 8)]) > 3
