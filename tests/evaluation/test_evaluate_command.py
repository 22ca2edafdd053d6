"""The evaluation command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from free_address import free_address

import refusion_jax as rf
from refusion_jax import command_line, evaluate

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = Path(__file__).parents[2]
SHORT = ("--gen_length=16", "--slot_size=8", "--serial_num_blocks=1", "--num_fewshot=0", "--batch_size=2")


@pytest.fixture
def run(chat_model, tmp_path, data, monkeypatch, capsys):
    """Runs the command on the local data: (exit status, stdout, stderr)."""
    monkeypatch.setattr(rf.api, "load", lambda path, **_: chat_model)
    monkeypatch.setattr(evaluate, "keep_freed_memory", lambda: None)
    # A task that was loaded with leave keeps its metric.
    monkeypatch.delitem(sys.modules, "lm_eval.tasks.humaneval.utils", raising=False)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")

    def run(*arguments, local=True):
        status = 0
        arguments = [f"--checkpoint={checkpoint}", *([f"--data={data}"] if local else []), *arguments]
        try:
            command_line.run(evaluate.main, evaluate.FLAGS, ("checkpoint", "tasks"), arguments)
        except SystemExit as caught:
            status = caught.code
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_an_evaluation_prints_and_writes_and_goes_on(run, tmp_path, monkeypatch):
    output = tmp_path / "out"
    arguments = ("--tasks=gsm8k", f"--output={output}", "--log_samples", *SHORT)
    status, out, err = run(*arguments, "--limit=2")
    assert status == 0, err
    assert "|exact_match|" in out
    assert "gsm8k: 2 responses of" in out
    results = json.loads((output / "results.json").read_text())
    assert results["n-samples"]["gsm8k"] == {"original": 3, "effective": 2}
    settings = results["config"]["refusion_jax"]["settings"]["gsm8k"]
    assert (settings["configs_eval"], settings["gen_length"], settings["token_threshold"]) == ("gsm8k", 16, 0.4)
    assert len((output / "samples_gsm8k.jsonl").read_text().splitlines()) == 4  # of two filters
    before = (output / "answers.jsonl").read_bytes()
    status, _, err = run(*arguments, "--batch_size=3")
    assert status == 0, err
    after = (output / "answers.jsonl").read_bytes()
    assert after.startswith(before)  # the first two were not computed again
    assert after.count(b"\n") == 3
    status, _, err = run(*arguments, "--slot_threshold=0.3")
    assert (status, "belongs to a run with overrides" in err) == (2, True)


def test_a_sweep_evaluates_at_every_point(run, tmp_path):
    output = tmp_path / "out"
    sweep = "--sweep=slot_threshold=0.1,0.9 token_threshold=0.5"
    status, out, err = run("--tasks=gsm8k", f"--output={output}", "--limit=1", sweep, *SHORT)
    assert status == 0, err
    names = sorted(path.name for path in output.iterdir())
    assert names == [
        "slot_threshold=0.1,token_threshold=0.5", "slot_threshold=0.9,token_threshold=0.5", "sweep.json", "sweep.png",
    ]  # fmt: skip
    assert "2 points." in out
    assert "At slot_threshold=0.1 token_threshold=0.5:" in err


def test_the_settings_of_the_checkpoint_instead(run, tmp_path, chat_model):
    output = tmp_path / "out"
    status, _, err = run("--tasks=gsm8k", f"--output={output}", "--limit=1", "--num_fewshot=0", "--noeval_configs")
    assert status == 0, err
    settings = json.loads((output / "results.json").read_text())["config"]["refusion_jax"]["settings"]["gsm8k"]
    assert (settings["configs_eval"], settings["slot_size"]) == (None, chat_model.decode.slot_size)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--tasks=",), "--tasks is empty or has an empty name"),
        (("--tasks=gsm8k,",), "--tasks is empty or has an empty name"),
        (("--tasks=gsm8k", "--log_samples"), "--log_samples needs --output"),
        (("--tasks=gsm8k", "--output="), "--output is empty; name a directory"),
        (("--tasks=gsm8k", "--noenable_thinking"), "--enable_thinking is for conversations; give --apply_chat"),
        (("--tasks=gsm8k",), "Task gsm8k: gen_length 512, in whole slots 512 tokens, leaves none of the model's 256"),
        (("--tasks=gsm8k", "--sweep=slot_size=8"), "--sweep needs --output"),
        (("--tasks=gsm8k", "--limit=0"), "--limit is 0; give a number of examples"),
        (("--tasks=gsm8k", "--limit=2.5"), "--limit is 2.5; give a number"),
        (("--tasks=gsm8k", "--limit=nan"), "--limit is nan; give a number"),
        (("--tasks=gsm8k", "--limit=inf"), "--limit is inf; give a number"),
        (("--tasks=gsm8k", "--code_seconds=nan"), "A program may run for nan seconds; give a number above 0"),
        (("--tasks=gsm8k", "--num_fewshot=4"), "The task gsm8k has 3 examples to show"),
        (("--tasks=gsm8k", "--gen_length=96"), "Task gsm8k: decode.gen_length 96 is 3 slots of 32"),
        (("--tasks=gsm8k", "--method=llada"), "--method is 'llada', but the checkpoint was trained with"),
        (("--tasks=gsm8k", "--estimate=exact"), "estimate"),
        (
            ("--tasks=humaneval",),
            "The task humaneval runs generated code, which is done on request alone; give --allow_code_execution",
        ),
        (("--tasks=gsm8k", "--taks=x"), "Unknown flag '--taks'"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything(run, arguments, message):
    status, _, err = run(*arguments)
    assert (status, err.count("\n")) == (2, 1)
    assert message in err


def test_without_the_harness_it_says_how_to_get_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    status, _, err = run("--tasks=gsm8k")
    assert (status, "lm_eval is not installed; pip install 'refusion_jax[eval]' brings it." in err) == (2, True)


@pytest.mark.slow
def test_several_processes_find_what_one_finds(tiny_run, data, tmp_path):
    base = [sys.executable, "evaluate.py", f"--checkpoint={tiny_run}", "--tasks=gsm8k", f"--data={data}", *SHORT]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    alone = subprocess.run([*base, f"--output={tmp_path / 'one'}", "--log_samples"], cwd=ROOT, env=environment,
                           capture_output=True, text=True)  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    together = [f"--output={tmp_path / 'two'}", "--log_samples", f"--coordinator_address={free_address()}"]
    processes = [
        subprocess.Popen([*base, *together, "--num_processes=2", f"--process_id={number}"], cwd=ROOT, env=environment,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for number in range(2)
    ]  # fmt: skip
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "exact_match" in outputs[0][0]
    assert "exact_match" not in outputs[1][0]
    one, two = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two"))
    assert one["results"] == two["results"]
    samples = [(tmp_path / name / "samples_gsm8k.jsonl").read_text() for name in ("one", "two")]
    assert samples[0] == samples[1]
    speeds = [each["config"]["refusion_jax"]["speed"]["gsm8k"] for each in (one, two)]
    assert [speed["processes"] for speed in speeds] == [1, 2]
    for name in ("responses", "tokens", "forwards", "finish_reasons"):
        assert speeds[0][name] == speeds[1][name]
    parts = [len((tmp_path / "two" / name).read_text().splitlines()) for name in ("answers.jsonl", "answers.jsonl.p1")]
    assert parts == [2, 1]


@pytest.mark.slow
def test_the_harnesss_own_command(tiny_run, data, tmp_path):
    command = [sys.executable, "-m", "refusion_jax.evaluation.lm_eval", "--model", "refusion_jax", "--model_args",
               f"checkpoint={tiny_run},gen_length=16,slot_size=8,serial_num_blocks=1", "--tasks", "gsm8k", "--limit",
               "1", "--num_fewshot", "0", "--include_path", str(ROOT / "refusion_jax/evaluation/tasks"), "--metadata",
               f"data={data}", "--output_path", str(tmp_path / "out"), "--log_samples"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(found.read_text())["config"]["refusion_jax"]["settings"]["gsm8k"]["gen_length"] == 16
