"""The harness's command with this package's model."""

import sys

import pytest
from lm_eval.api.registry import get_model, model_registry

from refusion_jax.evaluation import code_tasks, lm_eval
from refusion_jax.evaluation.metrics_library import import_evaluate


@pytest.fixture
def command(monkeypatch):
    """Runs the command with these arguments; in it, the harness's own does what it is given."""

    def run(inside, *arguments):
        monkeypatch.setattr(sys, "argv", ["lm_eval", *arguments])
        monkeypatch.setattr("lm_eval.__main__.cli_evaluate", inside)
        lm_eval.main()

    return run


def test_the_harness_finds_the_model(command):
    command(lambda: None, "--help")
    assert "refusion_jax" in model_registry
    assert get_model("refusion_jax").__name__ == "RefusionLM"


@pytest.mark.parametrize("model", [("--model", "refusion_jax"), ("--model=refusion_jax",)])
def test_what_the_model_writes_is_run_in_the_sandbox_or_not_at_all(command, monkeypatch, capsys, model):
    monkeypatch.setattr(code_tasks, "check_sandbox", lambda: None)
    found = []
    command(lambda: found.append(import_evaluate().load("code_eval")), *model, "--confirm_run_unsafe_code")
    assert isinstance(found[0], code_tasks._CodeEval)
    with pytest.raises(SystemExit) as ended:
        command(lambda: import_evaluate().load("code_eval"), *model)
    assert ended.value.code == 2
    assert "give --confirm_run_unsafe_code to run it in a sandbox.\n" in capsys.readouterr().err


def test_other_models_are_the_harnesss_business(command, monkeypatch):
    original = import_evaluate().load
    found = []
    command(lambda: found.append(import_evaluate().load is original), "--model", "hf")
    assert found == [True]


def test_without_the_harness_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    with pytest.raises(SystemExit, match=r"is not installed; pip install 'refusion_jax\[eval\]' brings it"):
        lm_eval.main()


def test_faults_keep_their_traceback(command):
    def fault():
        raise ValueError("a fault")

    with pytest.raises(ValueError, match="a fault"):
        command(fault)
