"""What answers cost."""

import pytest
from answer_records import record

from refusion_jax.evaluation.speed import generation_speed, scoring_speed


def test_figures_of_one_process():
    records = [record(4), record(8, elapsed=3.0, latency=2.5, finish_reason="stop"), record(6, elapsed=2.0)]
    speed = generation_speed(records)
    assert (speed["responses"], speed["tokens"], speed["forwards"]) == (3, 18, 6)
    assert (speed["tokens_per_forward"], speed["mean_response_length"]) == (3.0, 6.0)
    assert (speed["seconds"], speed["compile_seconds"]) == (3.0, 0.25)
    assert speed["tokens_per_second"] == pytest.approx(18 / 2.75)
    assert speed["latency_seconds"] == pytest.approx({"p50": 0.5, "p90": 2.1, "p99": 2.46})
    assert speed["finish_reasons"] == {"eos": 2, "stop": 1}
    assert (speed["prompts_cut"], speed["prompts_with_unknown"]) == (0, 0)


def test_starts_add_up_and_processes_run_side_by_side():
    records = [
        record(10, elapsed=2.0),
        record(10, started=9.0, elapsed=5.0),
        record(10, process=1, started=1.1, elapsed=4.0),
    ]
    speed = generation_speed(records, 2)
    assert (speed["processes"], speed["seconds"], speed["compile_seconds"]) == (2, 7.0, 0.5)


def test_prompts_that_lost_something_are_counted():
    records = [record(1, cut_tokens=5), record(1, cut_tokens=2, unknown_tokens=1), record(1)]
    speed = generation_speed(records)
    found = speed["prompts_cut"], speed["prompt_tokens_cut"], speed["prompts_with_unknown"]
    assert found == (2, 7, 1)


def test_figures_of_scored_responses():
    speed = scoring_speed([record(4, elapsed=1.0), record(2, elapsed=2.0, cut_tokens=3)])
    assert (speed["scored"], speed["tokens"], speed["mean_response_length"]) == (2, 6, 3.0)
    assert (speed["seconds"], speed["tokens_per_second"], speed["prompts_cut"]) == (2.0, 3.0, 1)


def test_an_answer_of_no_forwards_divides_nothing():
    assert generation_speed([record(0, forwards=0)])["tokens_per_forward"] == 0.0
