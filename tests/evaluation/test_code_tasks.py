"""The harness's tasks that run generated code."""

import sys
from pathlib import Path

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from refusion_jax.config import ConfigError
from refusion_jax.evaluation import code_tasks
from refusion_jax.evaluation.code_tasks import code_execution
from refusion_jax.evaluation.harness import RefusionLM
from refusion_jax.evaluation.metrics_library import import_evaluate
from refusion_jax.evaluation.sandbox import Limits, SandboxError
from refusion_jax.evaluation.task_loading import load_tasks

metrics = import_evaluate()


def test_the_metric_is_replaced_within_and_no_other(monkeypatch):
    monkeypatch.setattr(metrics, "load", lambda name, *rest, **options: (name, rest, options))
    monkeypatch.setattr(code_tasks, "check_sandbox", lambda: None)
    seen = []
    monkeypatch.setattr(code_tasks, "code_eval", lambda *arguments: seen.append(arguments) or ({"pass@1": 1.0}, {}))
    with code_execution(True, Limits(wall_seconds=2.0)):
        assert metrics.load("accuracy", 1, key=2) == ("accuracy", (1,), {"key": 2})
        found = metrics.load("code_eval").compute(references=["r"], predictions=[["p"]], k=[1])
    assert found == ({"pass@1": 1.0}, {})
    assert seen == [(["r"], [["p"]], (1,), Limits(wall_seconds=2.0))]
    assert metrics.load("code_eval") == ("code_eval", (), {})


def test_without_leave_or_a_sandbox_nothing_is_loaded(monkeypatch):
    with code_execution(False, Limits()), pytest.raises(ConfigError, match="give --allow_code_execution to run it"):
        metrics.load("code_eval")

    def denied():
        raise SandboxError("denied")

    monkeypatch.setattr(code_tasks, "check_sandbox", denied)
    with code_execution(True, Limits()), pytest.raises(SandboxError, match="denied"):
        metrics.load("code_eval")


class Canonical(RefusionLM):
    """Answers with what it is told, instead of decoding."""

    def __init__(self, model, answers):
        super().__init__(model)
        self._answers = answers

    def generate_until(self, requests, disable_tqdm=False):
        return [self._answers[request.doc["task_id"]] for request in requests]


def test_answers_are_run_and_scored(isolation, chat_model, data):
    with code_execution(True, Limits()):
        tasks = load_tasks(["humaneval"], str(data))
    answers = {"HumanEval/0": "    return a + b\n", "HumanEval/1": "    import os; os._exit(0)\n"}
    results = simple_evaluate(
        model=Canonical(chat_model, answers),
        tasks=tasks,
        task_manager=TaskManager(include_defaults=False),
        confirm_run_unsafe_code=True,
        bootstrap_iters=0,
    )
    assert results["results"]["humaneval"]["pass@1,create_test"] == 0.5


def test_the_library_is_found_though_a_script_has_its_name(monkeypatch):
    root = Path(__file__).parents[2]
    assert (root / "evaluate.py").is_file()
    monkeypatch.setattr(sys, "path", [str(root), *sys.path])
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "evaluate"}
    for name in kept:
        monkeypatch.delitem(sys.modules, name)
    found = import_evaluate()
    assert (found.__name__, callable(found.load)) == ("evaluate", True)
    assert sys.path[0] == str(root)
    assert import_evaluate() is found
