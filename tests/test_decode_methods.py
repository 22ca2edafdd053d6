"""The decode command with the methods of other systems."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import pytest

import refusion_jax as rf
from refusion_jax import command_line, decode

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROMPTS = ["S:7+1+7+5?", "R:abc?", "Q:12,7?"]
LLADA = rf.Method("llada", steps=4)


@pytest.fixture
def run(chat_model, capsys, monkeypatch, tmp_path_factory):
    """Runs the command with a model that was trained for an objective: (exit status, stdout, stderr)."""
    monkeypatch.setattr(decode, "keep_freed_memory", lambda: None)
    checkpoint = tmp_path_factory.mktemp("checkpoint")

    def run(*arguments, objective="llada"):
        model = dataclasses.replace(chat_model, objective=objective)
        monkeypatch.setattr(rf.api, "load", lambda *arguments, **keywords: model)
        status, given = 0, [f"--checkpoint={checkpoint}", *map(str, arguments)]
        try:
            command_line.run(decode.main, decode.FLAGS, ("checkpoint",), given)
        except SystemExit as caught:
            status = caught.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def expected(chat_model):
    """The answers of the library."""
    model = dataclasses.replace(chat_model, objective="llada")
    return dict(zip(PROMPTS, rf.generate(model, PROMPTS, method=LLADA).text, strict=True))


def read(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_one_prompt(run, expected):
    status, out, err = run(f"--prompt={PROMPTS[1]}", "--steps=4")
    assert (status, out) == (0, expected[PROMPTS[1]] + "\n")
    assert err == "[16 tokens in 4 forwards, 4.0 per forward]\n"


def test_a_method_that_the_checkpoint_was_not_trained_for(run, expected):
    named = ["--method=llada", "--steps=4", f"--prompt={PROMPTS[0]}"]
    status, _, err = run(*named, objective="hybrid")
    assert status == 2
    assert err == (
        "error: --method is 'llada', but the checkpoint was trained with the objective 'hybrid'; use 'refusion', or "
        "--allow_objective='hybrid' to decode it all the same.\n"
    )
    status, out, _ = run(*named, "--allow_objective=hybrid", objective="hybrid")
    assert (status, out) == (0, expected[PROMPTS[0]] + "\n")


def test_a_file_is_answered_and_goes_on_with_the_same_method_only(run, expected, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": prompt} for prompt in PROMPTS]
    lines += [{"prompt": "R:ab?", "decode": {"gen_length": 8}}, {"prompt": "R:ab?", "decode": {"slot_size": 8}}]
    lines += [{"prompt": "R:ab?", "decode": {"gen_length": 2}}, {"segments": ["R:ab?", {"hole": 4}]}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = [f"--input={source}", f"--output={target}", "--batch_size=4"]
    status, _, err = run(*files, "--steps=4")
    assert status == 1
    assert "4 prompts answered, 3 lines with errors. This run: 56 response tokens in " in err
    assert "and 16 forwards (3.5 tokens per forward)" in err
    found = read(target)
    assert [each["response"] for each in found[:3]] == [expected[prompt] for prompt in PROMPTS]
    assert [each.get("error") for each in found[3:]] == [
        None,
        "decode.slot_size is for slots, which the method 'llada' does not have; leave it out.",
        "method.steps is 4, which 1 block of 2 tokens cannot share equally, with one to 2 steps each: use one of 1, 2.",
        "The method 'llada' does not fill holes; give a prompt instead of segments.",
    ]
    written = target.read_bytes()
    assert "All 7 prompts are already answered" in run(*files, "--steps=4")[2]
    for changed, name in (("--steps=8", "steps 4, not 8"), ("--ordering=margin", "steps 4, not 0")):
        status, _, err = run(*files, changed)
        assert status == 2 and name in err
    status, _, err = run(*files, objective="hybrid")
    assert status == 2 and "a run with method 'llada', not None" in err
    assert target.read_bytes() == written


def test_lines_are_answered_as_they_come(run, expected, monkeypatch):
    """Each in a stream of its own."""
    given = []
    monkeypatch.setattr(decode, "decode_lines", lambda *arguments: given.append(arguments) or 0)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=None))
    assert run("--chat", "--steps=4")[0] == 0
    ((reader, _, _, stream),) = given
    assert reader.method == LLADA
    prepared = rf.prepare(reader.model, PROMPTS[1], reader.config, method=reader.method)
    bounds = decode.Bounds.of([(prepared.layout, prepared.config)])
    (answer,) = stream([rf.StreamRequest(0, prepared, reader.config)], 1, bounds, rf.Statistics())
    assert (answer.text, answer.forwards) == (expected[PROMPTS[1]], 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method=bert"], "--method is 'bert', not one of refusion, auto"),
        (["--steps=4", "--threshold=0.5"], "--steps and --threshold are set; each says how many"),
        (
            ["--method=autoregressive", "--steps=4"],
            "--steps is 4, but --method is 'autoregressive'; it belongs to llada",
        ),
        (["--cache=both"], "--cache is 'both'"),
        (["--slot_size=4"], "--slot_size is for slots, which the method 'llada' does not have; leave it out."),
        (["--algorithm=paper"], "--algorithm is for slots"),
        (["--carry_threshold=0.5"], "--carry_threshold is for slots"),
        (["--slot_score=margin"], "--slot_score is for slots"),
        (["--block_length=5"], "method.block_length is 5, which does not divide gen_length (16)"),
        (
            ["--allow_objective=hybrid"],
            "--allow_objective is 'hybrid', but the checkpoint was trained with the objective",
        ),
    ],
)
def test_flags_that_do_not_go_together(arguments, message, run):
    status, out, err = run("--prompt=S:1?", *arguments)
    assert (status, out) == (2, "") and err.startswith(f"error: {message}") and err.count("\n") == 1


def test_flags_of_methods_mean_nothing_to_refusion(run):
    status, _, err = run("--prompt=S:1?", "--steps=4", objective="hybrid")
    assert status == 2 and err.startswith("error: --steps is 4, but --method is 'refusion'; it belongs to llada, dream")


def test_compiling_is_for_refusion_alone(run):
    status, _, err = run("--compile_for=v5e:2x2", "--method=llada", "--steps=4")
    assert status == 2 and "does not read --method, --steps; leave them out" in err
