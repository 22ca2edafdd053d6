"""What an evaluation prints and writes."""

import json
import math

import numpy as np
import pytest
from answer_records import record

from refusion_jax.config import ConfigError
from refusion_jax.evaluation.results import check_free, main_score, print_results, write_results
from refusion_jax.evaluation.speed import generation_speed, scoring_speed

METRICS = {
    "alias": "gsm8k",
    "exact_match,strict": 0.25,
    "exact_match_stderr,strict": 0.125,
    "other,none": np.float64(1),
}


@pytest.fixture
def results():
    speed = {"gsm8k": generation_speed([record(4, cut_tokens=9), record(8, unknown_tokens=1)])}
    return {
        "results": {"gsm8k": METRICS, "arc": {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": "N/A"}},
        "n-shot": {"gsm8k": 5, "arc": 0},
        "versions": {"gsm8k": 3},
        "config": {"refusion_jax": {"speed": speed | {"arc": scoring_speed([record(2)])}}},
    }


def test_the_main_score_is_the_first():
    assert main_score(METRICS) == ("exact_match,strict", 0.25)
    name, value = main_score({"alias": "x"})
    assert (name, math.isnan(value)) == ("", True)


def test_scores_and_costs_are_printed(results, capsys):
    print_results(results)
    out, err = capsys.readouterr()
    rows = [[cell.strip() for cell in line.split("|") if cell.strip()] for line in out.splitlines()]
    assert ["gsm8k", "3", "strict", "5", "exact_match", "0.25", "±", "0.12"] in [
        [cell[:4] if cell.startswith("0.") else cell for cell in row if cell != "↑"] for row in rows
    ]
    assert "gsm8k: 2 responses of 6.0 tokens, 4 forwards (3.00 tokens per forward); 16 tokens/s, 0 of 1 s" in out
    assert "arc: 1 responses of 2.0 tokens scored, 2 tokens/s" in out
    assert "gsm8k: 1 of 2 prompts were longer than the model takes and lost 9 tokens at their beginning." in err
    assert "gsm8k: 1 of 2 prompts have characters that the tokenizer does not know." in err


def test_results_and_samples_are_written(results, tmp_path):
    write_results(tmp_path, results, {"gsm8k": [{"text": "é\ud800"}, {"n": np.int64(1)}]})
    assert json.loads((tmp_path / "results.json").read_text())["results"]["gsm8k"]["other,none"] == 1.0
    content = (tmp_path / "samples_gsm8k.jsonl").read_bytes().decode("utf-8", "surrogatepass").splitlines()
    assert [json.loads(line) for line in content] == [{"text": "é\ud800"}, {"n": 1}]


def test_results_of_something_else_are_left_alone(tmp_path):
    check_free(tmp_path / "none")
    (tmp_path / "results.json").write_text("mine")
    with pytest.raises(ConfigError, match=r"has a results.json, but no answers.jsonl of the evaluation it is of"):
        check_free(tmp_path)
    (tmp_path / "answers.jsonl").write_text("")
    check_free(tmp_path)
