"""The training benchmark's arithmetic, tables and protocol; nothing here measures anything."""

import json
import sys

import numpy as np
import pytest

from benchmarks import train, yardstick
from refusion_jax.config import ConfigError, ModelConfig

OURS = train.Turn(seconds=2.0, tokens=3000, step_seconds=[0.5, 0.5, 1.0], waited=0.1, page_faults=10)
THEIRS = train.Turn(seconds=4.0, tokens=3000, step_seconds=[2.0, 2.0])


def test_flops_of_the_demo_model():
    per_layer = 128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 384
    expected = 6 * (3 * per_layer + 128 * 64) + 3 * 3 * (2 * 2 * 128 * 96)
    assert train.flops_per_token(ModelConfig(vocab_size=64), row_length=96) == expected


def test_summary_compares_within_rounds():
    faster = train.Turn(seconds=1.0, tokens=3000, step_seconds=[0.25, 0.75])
    rounds = [train.Round([4e9, 8e9], OURS, THEIRS), train.Round([4e9, 8e9], faster, THEIRS)]
    summary = train.summarise(rounds, flops=1_000_000)
    assert summary["ratio"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert summary["tokens_per_second"] == {"median": 2250.0, "min": 1500.0, "max": 3000.0}
    assert summary["step_ms"] == {"median": 500.0, "min": 250.0, "max": 1000.0}
    assert summary["tokens_per_step"] == 1200
    assert summary["page_faults_per_step"] == 2
    assert summary["data_wait_share"] == pytest.approx(0.1 / 3)
    assert summary["matmul"][0]["share_reached"]["max"] == pytest.approx(0.75)
    assert summary["yardstick"]["tokens_per_second"]["median"] == 750.0


def test_tables_have_every_figure():
    measured = train.Round([4e9, 8e9], OURS, THEIRS)
    assert train.round_row(1, measured) == "| 1 | 1,500 | 500.0 | 4 / 8 | 750 | 2000.0 | 2.00 |"
    table = train.summary_table(train.summarise([measured], 1_000_000), compile_seconds=7.0, peak_rss_mib=1000.0)
    assert "| useful tokens per second | 1,500 (1,500 to 1,500) |" in table
    assert "| ratio, ours to the yardstick's | 2.00 (2.00 to 2.00) |" in table


def test_tables_without_the_yardstick():
    measured = train.Round([4e9, 8e9], OURS)
    summary = train.summarise([measured], 1_000_000)
    assert "ratio" not in summary and "ratio" not in train.round_record(measured)
    assert train.round_row(1, measured) == "| 1 | 1,500 | 500.0 | 4 / 8 | – | – | – |"
    assert "yardstick" not in train.summary_table(summary, 7.0, 1000.0)


def test_yardstick_batches_are_padded_to_the_longest():
    tokens, mask = yardstick.padded([2, 5, 3], vocab_size=64)
    assert np.shape(tokens) == (3, 5) and np.max(tokens) < 64
    assert mask == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]


def test_yardstick_measures_at_least_the_seconds_asked_for():
    turn = train.Turn(**yardstick.measure(lambda: 10, 0.01))
    assert turn.seconds >= 0.01
    assert turn.tokens == 10 * len(turn.step_seconds)
    assert sum(turn.step_seconds) == pytest.approx(turn.seconds)


def interpreter_that_answers(path, *answers):
    """Writes an executable that stands in for a Python: it answers each line it reads with the next answer."""
    path.write_text(f"#!{sys.executable}\nfor answer in {[json.dumps(a) for a in answers]!r}:\n")
    with path.open("a") as file:
        file.write("    input()\n    print(answer, flush=True)\n")
    path.chmod(0o755)
    return str(path)


def test_yardstick_protocol(tmp_path):
    turn = {"seconds": 4.0, "tokens": 3000, "step_seconds": [2.0, 2.0]}
    python = interpreter_that_answers(tmp_path / "python", {"versions": {"torch": "2"}}, turn)
    process = train.Yardstick(python, ModelConfig(vocab_size=64), np.ones((2, 3), int))
    assert process.versions == {"torch": "2"}
    assert process.measure(4.0) == THEIRS
    process.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [("python", "pip install torch transformers"), ("none", "not start"), ("ends", "exit status 3")],
)
def test_yardstick_says_what_is_missing(tmp_path, name, message):
    interpreter_that_answers(tmp_path / "python", {"error": "No module named 'torch'"})
    (tmp_path / "ends").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "ends").chmod(0o755)
    with pytest.raises(ConfigError, match=message):
        train.Yardstick(str(tmp_path / name), ModelConfig(vocab_size=64), np.ones((2, 3), int))
