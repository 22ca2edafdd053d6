"""pass@k: the estimator, what is run, the form of results, refusals. Programs are stand-ins but in the last test."""

import itertools

import pytest

from refusion_jax.config import ConfigError
from refusion_jax.evaluation import code_metric
from refusion_jax.evaluation.sandbox import Outcome


@pytest.fixture
def ran(monkeypatch):
    """The programs that were run; those with "right" in them passed."""
    programs = []

    def run(given, limits, workers):
        programs.extend(given)
        return [Outcome("right" in text, "passed" if "right" in text else "failed: X") for text in given]

    monkeypatch.setattr(code_metric, "run_programs", run)
    return programs


def test_the_estimator_is_the_mean_over_all_choices():
    for n, c in ((1, 0), (1, 1), (5, 0), (5, 2), (5, 5), (6, 3)):
        for k in range(1, n + 1):
            chosen = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert code_metric.pass_at_k(n, c, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_every_candidate_runs_before_its_reference(ran):
    scores, results = code_metric.code_eval(["test0", "test1"], [["right", "wrong"], ["wrong"]])
    assert ran == ["right\ntest0", "wrong\ntest0", "wrong\ntest1"]
    assert scores == {"pass@1": 0.25}
    assert results == {
        0: [
            (0, {"task_id": 0, "passed": True, "result": "passed", "completion_id": 0}),
            (1, {"task_id": 0, "passed": False, "result": "failed: X", "completion_id": 1}),
        ],
        1: [(0, {"task_id": 1, "passed": False, "result": "failed: X", "completion_id": 0})],
    }


def test_k_is_left_out_where_a_problem_has_fewer_candidates(ran):
    scores, _ = code_metric.code_eval(["t", "t"], [["right"] + ["wrong"] * 2, ["wrong"] * 2], k=[1, 2, 3])
    assert scores == {"pass@1": pytest.approx(1 / 6), "pass@2": pytest.approx(1 / 3)}
    assert code_metric.code_eval(["t"], [["right", "wrong"]], k=2)[0] == {"pass@2": 1.0}


@pytest.mark.parametrize(
    ("references", "predictions", "k", "message"),
    [
        ([], [], 1, "no references"),
        (["t"], [["a"], ["b"]], 1, "1 references and 2 lists"),
        (["t"], ["a"], 1, r"predictions\[0\] is 'a'; it must be a list"),
        (["t", "t"], [["a"], []], 1, r"predictions\[1\] is '\[\]'"),
        (["t"], [["a"]], (1, 0), "k is 0"),
    ],
)
def test_refusals(ran, references, predictions, k, message):
    with pytest.raises(ConfigError, match=message):
        code_metric.code_eval(references, predictions, k)
    assert ran == []


def test_programs_really_run(isolation):
    right, wrong = "def f(x):\n    return x + 1", "def f(x):\n    return x"
    scores, results = code_metric.code_eval(["assert f(1) == 2, 'no'"], [[right, wrong]])
    assert scores == {"pass@1": 0.5}
    assert [entry["result"] for _, entry in results[0]] == ["passed", "failed: AssertionError: no"]
