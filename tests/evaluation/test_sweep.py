"""Grids of settings."""

import json

import pytest

from refusion_jax.config import ConfigError
from refusion_jax.evaluation.sweep import points, report_sweep

MANY = ",".join(map(str, range(1, 30)))


def test_all_combinations_in_their_types():
    grid = points("slot_threshold=0.5,1 redraft=true,false slot_size=8")
    assert grid == [
        {"slot_threshold": 0.5, "redraft": True, "slot_size": 8},
        {"slot_threshold": 0.5, "redraft": False, "slot_size": 8},
        {"slot_threshold": 1.0, "redraft": True, "slot_size": 8},
        {"slot_threshold": 1.0, "redraft": False, "slot_size": 8},
    ]
    assert points("algorithm=paper,paper") == [{"algorithm": "paper"}]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "--sweep is empty"),
        ("slot_threshold", "--sweep has 'slot_threshold'; write NAME=VALUE,VALUE"),
        ("slot_threshold=0.5,", "write NAME=VALUE,VALUE"),
        ("slot_treshold=1", r"--sweep has the setting 'slot_treshold', .* Did you mean 'slot_threshold'\?"),
        ("stop=a", "--sweep has the setting 'stop', which is none"),
        ("slot_size=a", "--sweep has slot_size='a'; it must be of type int"),
        ("redraft=1", "--sweep has redraft='1'; it is true or false"),
        ("slot_size=8 slot_size=4", "--sweep has slot_size twice"),
        (
            "slot_size=" + ",".join(map(str, range(1, 30))) + " gen_length=" + ",".join(map(str, range(1, 30))),
            "841 points",
        ),
    ],
)
def test_other_texts_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        points(text)


def result(score, per_forward, per_second):
    speed = {"tokens_per_forward": per_forward, "tokens_per_second": per_second}
    return {
        "results": {"gsm8k": {"alias": "gsm8k", "exact_match,strict": score, "exact_match_stderr,strict": 0.1}},
        "config": {"refusion_jax": {"speed": {"gsm8k": speed}}},
    }


def test_the_curve_is_printed_written_and_drawn(tmp_path, capsys):
    grid = [{"slot_threshold": 0.5}, {"slot_threshold": 0.9}]
    report_sweep(grid, [result(0.25, 6.0, 100.0), result(0.5, 4.0, 80.0)], tmp_path)
    rows = json.loads((tmp_path / "sweep.json").read_text())
    assert [(row["score"], row["metric"], row["tokens_per_second"]) for row in rows] == [
        (0.25, "exact_match,strict", 100.0), (0.5, "exact_match,strict", 80.0)]  # fmt: skip
    assert (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    out = capsys.readouterr().out
    assert "slot_threshold=0.5" in out
    assert "2 points." in out


def test_a_sweep_of_scores_alone_is_refused(tmp_path):
    of_scores = {"results": {"arc": {"acc": 1.0}}, "config": {"refusion_jax": {"speed": {"arc": {"scored": 3}}}}}
    with pytest.raises(ConfigError, match="--sweep needs tasks whose answers are generated"):
        report_sweep([{"slot_size": 8}], [of_scores], tmp_path)
