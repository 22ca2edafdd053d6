"""The comparison's record, tables and pictures, of results made up here."""

import dataclasses
import json

import pytest

from benchmarks import compare
from benchmarks.compare_decoding import CHIP, SETTINGS
from benchmarks.compare_mechanisms import ERRORS_OF, SELF_CORRECTING, VARIANTS
from benchmarks.compare_repairs import Origin
from benchmarks.compare_report import CHIPS, LABELS, Report
from benchmarks.compare_systems import ABLATIONS, PRESETS, RATES, TASKS, TRAINING

TINY = PRESETS["tiny"]
RIGHT = {name: 0.9 - 0.1 * k for k, name in enumerate(SETTINGS)}  # exact match by system
NATS = {name: 0.1 * (k + 1) for k, name in enumerate(TRAINING)}


def outcome(exact_match, tokens_per_forward):
    return {
        "prompts": 12, "exact_match": exact_match, "by_task": dict.fromkeys(TASKS, exact_match),
        "tokens_per_forward": tokens_per_forward,
        "loads": [{"kind": "whole", "width": 64, "cached": 0, "count": 5}],
    }  # fmt: skip


def decoded(cell):
    """Seeds are 0.01 of exact match apart; the systems' tokens per forward are their number."""
    name = cell.name.removeprefix("test_")
    system = next((each for each in sorted(SETTINGS, key=len, reverse=True) if name.startswith(each)), "refusion")
    seed = int(name[-1]) if name[-1].isdigit() else 0
    made = outcome(RIGHT[system] + 0.01 * seed, list(SETTINGS).index(system) + 1)
    return [{"setting": setting, "outcome": made} for setting in cell.settings["settings"]]


def trained(cell):
    system = next((name for name in TRAINING if name in cell.name), "refusion")
    curve = [{"step": step, "eval_nats_per_token": NATS[system] / step} for step in (1, 2, 3)]
    return {"summary": {"eval_nats_per_token": NATS[system]}, "curve": [*curve, {"step": 4, "loss": 1.0}]}


def studied(cell):
    if cell.kind == "dependence":
        return {str(distance): [1.0 / distance, 0.1, 5] for distance in range(1, 9)}
    figures = ("exact_match", "tokens", "forwards", "fused_forwards", "tokens_per_forward",
               "fused_tokens_per_forward", "unchecked")  # fmt: skip
    errors = {origin.name.lower(): dict.fromkeys(("tokens", "wrong", "first", "earliest"), 1) for origin in Origin}
    return {"slot_sizes": {"8": {
        "variants": {name: dict.fromkeys(figures, 1) for name in [*VARIANTS, SELF_CORRECTING]},
        "errors": dict.fromkeys(ERRORS_OF, errors),
    }}}  # fmt: skip


MADE = {
    "train": trained, "decode": decoded, "dependence": studied, "mechanisms": studied,
    "timing": lambda cell: {"alone": 10.0, "together": 100.0},
}  # fmt: skip


@pytest.fixture
def report(tmp_path):
    return report_of(TINY, tmp_path, "train.jsonl")


def report_of(preset, workdir, gsm8k):
    comparison = compare.Comparison(preset, workdir, gsm8k)
    chosen = {name: settings[0] for name, settings in SETTINGS.items()}
    cells = [*comparison.first, *comparison.later, *comparison.last(chosen)]
    return Report(comparison, {cell.place: MADE[cell.kind](cell) for cell in cells}, chosen)


def test_record(report):
    record = json.loads(json.dumps(report.result()))
    assert list(record["systems"]) == list(SETTINGS)
    ours, other = record["systems"]["refusion"], record["systems"]["llada"]
    assert ours["exact_match"] == pytest.approx(0.905) and ours["exact_match_spread"] == pytest.approx([0.9, 0.91])
    assert ours["nats_per_token"] == pytest.approx(NATS["refusion"])
    assert ours["tokens_per_second"] == 10 and ours["tokens_per_second_batch"] == 100
    assert ours["projected_tokens_per_second"] == ours["projected"][CHIP]
    ratio = record["claims"]["refusion"]["llada"]["speed_ratio"][CHIP]["median"]
    assert ratio == pytest.approx(1 / 4)  # alike but for tokens per forward and the length, which "whole" does not see
    assert ratio == pytest.approx(ours["projected_tokens_per_second"] / other["projected_tokens_per_second"])
    assert record["claims"]["refusion"]["llada"]["exact_match_difference"]["median"] == pytest.approx(0.3)
    assert record["rates"]["dream at 0.003"] == pytest.approx(NATS["dream"])
    assert {"llada with llada_from_random", "dream with long_dream"} < set(record["other_weights"])
    assert record["tried"]["llada"][3]["setting"] == dataclasses.asdict(SETTINGS["llada"][3])
    assert (
        [each["step"] for each in record["training"]["llada_0"]["curve"]]
        == [1, 2, 3]
        == [each["step"] for each in record["gsm8k"]["dream"]["curve"]]
    )
    assert "loads" not in record["tests"]["llada_1"] and record["preset"]["steps"] == TINY.steps


def test_tables(report):
    text = report.text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line]
    widths = [{len(row) for row in block} for block in tables_of(text)]
    assert all(len(width) == 1 for width in widths)
    first = {row[0]: row for row in rows[: 2 + len(SETTINGS)]}
    assert first["LLaDA"][1:4] == ["0.605 (0.600 to 0.610)", "0.300 (0.300 to 0.300)", "4.00 (4.00 to 4.00)"]
    for label in LABELS.values():
        assert any(row[0] == label for row in rows)
    for name in ABLATIONS:
        assert [row for row in rows if row[0] == name]
    assert ["LLaDA", f"{TINY.steps} steps, from random weights"] in [row[:2] for row in rows]
    assert ["LLaDA", f"{TINY.long_steps} steps"] in [row[:2] for row in rows]
    tried = [row for row in rows if row[0] == LABELS["fast_dllm"] and row[1] in ("llada", "dream") and len(row) == 6]
    assert len(tried) == len(SETTINGS["fast_dllm"])
    assert ["block diffusion", *["0.500"] * len(RATES)] in rows


def tables_of(text):
    return [[line.split("|") for line in block.splitlines()] for block in text.split("\n\n")]


def test_claims_are_compared_on_every_chip(report):
    header = next(block for block in tables_of(report.text()) if "against" in str(block[0]))[0]
    assert [cell.strip() for cell in header[3 : 3 + len(CHIPS)]] == [f"times its speed, {chip}" for chip in CHIPS]


def test_a_preset_without_studies(tmp_path):
    preset = dataclasses.replace(TINY, ablations=False, long_steps=0, rate_steps=0, gsm8k_steps=0)
    report = report_of(preset, tmp_path, "")
    assert len(tables_of(report.text())) == 5 and not report.result()["other_weights"]


def test_pictures(report, tmp_path):
    report.draw(tmp_path / "pictures")
    drawn = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert drawn == {
        "quality_speed.png", "settings.png", "learning.png", "gsm8k.png", "thresholds_8.png", "thresholds_32.png",
        "dependence.png",
    }  # fmt: skip
