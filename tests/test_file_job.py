"""Files of prompts, with answers made up: writing, continuing, settings of lines, several processes."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from refusion_jax import answers, api, command_line, decode, file_job, processes, progress, prompt_files
from refusion_jax.config import ConfigError, DecodeConfig, ModelConfig
from refusion_jax.decoding import Answer
from refusion_jax.decoding.rules import SLOT_SCORES
from refusion_jax.methods import Method


@pytest.fixture(autouse=True)
def same_allocator(monkeypatch):
    monkeypatch.setattr(decode, "keep_freed_memory", lambda: None)


def read(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


class Tokenizer:
    """Characters are tokens."""

    vocab_size, unk_token_id = 128, -1

    def encode(self, text):
        return list(map(ord, text))

    def decode(self, tokens):
        return "".join(map(chr, tokens))


class Killed(BaseException):
    """A death that leaves no time for anything."""


class FakeStream:
    """Answers with the prompt in upper case, `rows` prompts at a time, the last first; notes what it was asked."""

    def __init__(self):
        self.rows, self.keywords, self.requests, self.answered = 3, None, [], 0
        self.after = {}  # what to do instead of the answer of this number

    def __call__(self, model, requests, *, statistics, **keywords):
        self.keywords, self.answered = keywords, 0
        row = []
        for request in requests:
            self.requests.append(request)
            row.append(request)
            if len(row) == self.rows:
                yield from self.answer(row, model, statistics, keywords["num_samples"])
                row = []
        yield from self.answer(row, model, statistics, keywords["num_samples"])

    def answer(self, row, model, statistics, num_samples):
        for request in reversed(row):
            for sample in reversed(range(num_samples)):
                if self.answered in self.after:
                    self.after[self.answered]()
                self.answered += 1
                tokens = [ord(chr(token).upper()) for token in request.prompt.layout.tokens] + [48 + sample]
                texts = None if model.tokenizer is None else [model.tokenizer.decode(tokens)]
                statistics.tokens, statistics.forwards = statistics.tokens + len(tokens), statistics.forwards + 2
                yield Answer(
                    request.index, sample, tokens, texts and texts[0], [tokens], texts, tokens,
                    list(range(len(tokens))), [0] * len(tokens), [1 / 3] * len(tokens), 2, "eos", 1.0,
                )  # fmt: skip


@pytest.fixture
def stream(monkeypatch):
    model = api.Model(
        ModelConfig(vocab_size=128, max_position_embeddings=200), None, None, Tokenizer(), DecodeConfig(gen_length=16)
    )
    monkeypatch.setattr(api, "load", lambda path, **_: model)
    stream = FakeStream()
    monkeypatch.setattr(decode, "generate_stream", stream)
    return stream


@pytest.fixture
def fake_run(stream, tmp_path, capsys):
    """Runs the command on lines of input with made-up answers: (exit status, stderr)."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def run(*arguments, lines=None):
        if lines is not None:
            texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
            source.write_text("".join(text + "\n" for text in texts))
        stream.requests.clear()
        status = 0
        flags = [f"--checkpoint={checkpoint}", f"--input={source}", f"--output={target}", *arguments]
        try:
            command_line.run(decode.main, decode.FLAGS, ("checkpoint",), flags)
        except SystemExit as caught:
            status = caught.code
        out, err = capsys.readouterr()
        assert out == ""
        return status, err

    run.checkpoint, run.source, run.target, run.trace = checkpoint, source, target, tmp_path / "trace.jsonl"
    return run


def prompts(count):
    return [{"prompt": f"p{i}", "id": i} for i in range(1, count + 1)]


def responses(count):
    return [line | {"response": f"P{line['id']}0", "finish_reason": "eos"} for line in prompts(count)]


def test_answers_come_as_they_finish_and_are_ordered_at_the_end(fake_run, stream):
    assert fake_run("--noordered", lines=prompts(8))[0] == 0
    assert [found["id"] for found in read(fake_run.target)] == [3, 2, 1, 6, 5, 4, 8, 7]
    assert sorted(read(fake_run.target), key=lambda found: found["id"]) == responses(8)
    status, err = fake_run()  # of a finished run nothing is left but the order
    assert (status, err) == (0, "All 8 prompts are already answered, 0 of them with errors.\n")
    assert read(fake_run.target) == responses(8)
    assert stream.requests == []
    assert fake_run("--noordered") == (status, err)
    assert read(fake_run.target) == responses(8)


def test_answers_are_written_before_more_prompts_are_read(fake_run, stream):
    seen = []
    stream.after = {
        number: lambda: seen.append((len(stream.requests), len(read(fake_run.target)))) for number in range(7)
    }
    fake_run(lines=prompts(7))
    assert seen == [(3, 0), (3, 1), (3, 2), (6, 3), (6, 4), (6, 5), (7, 6)]


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def kill():
    raise Killed


@pytest.mark.parametrize("event", [interrupt, terminate, kill])
@pytest.mark.parametrize("answered", range(6))
def test_a_run_that_ends_early_is_continued(event, answered, fake_run, stream):
    lines = [*prompts(4), "", "nonsense", *prompts(7)[4:]]
    stream.after = {answered: event}
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    if event is kill:
        with pytest.raises(Killed):
            fake_run(f"--trace={fake_run.trace}", lines=lines)
    else:
        status, err = fake_run(f"--trace={fake_run.trace}", lines=lines)
        done = answered + 1 + (answered >= 3)  # a last answer, and the bad line is met when the fourth prompt is taken
        assert status == (143 if event is terminate else 130)
        assert err == f"Interrupted: {done} of 8 prompts answered; run the same command again to continue.\n"
        assert len(read(fake_run.target)) == done
        assert len(read(fake_run.trace)) == answered + 1
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers

    stream.after = {}
    status, err = fake_run(f"--trace={fake_run.trace}", "--batch_size=2")
    assert status == 1
    assert "7 prompts answered, 1 lines with errors. This run: " in err
    assert len(stream.requests) == 7 - answered - (event is not kill)
    found = read(fake_run.target)
    assert found[4].keys() == {"line", "error"}
    assert [*found[:4], *found[5:]] == responses(7)
    trace = read(fake_run.trace)
    assert [(each["line"], each["sample"]) for each in trace] == [(line, 0) for line in (1, 2, 3, 4, 7, 8, 9)]
    assert trace[6] == {
        "line": 9, "sample": 0, "tokens": [ord("P"), ord("7"), ord("0")], "position_ids": [0, 1, 2],
        "iteration": [0, 0, 0], "probability": [0.3333333] * 3,
    }  # fmt: skip
    before = fake_run.target.read_bytes(), fake_run.trace.read_bytes()
    assert fake_run(f"--trace={fake_run.trace}") == (1, "All 8 prompts are already answered, 1 of them with errors.\n")
    assert (fake_run.target.read_bytes(), fake_run.trace.read_bytes()) == before


@pytest.mark.parametrize("number", range(20))
def test_a_run_killed_between_any_two_writes_loses_and_doubles_nothing(number, fake_run, stream, monkeypatch):
    real, calls = answers._write, []

    def write(file, content):
        calls.append(content)
        if len(calls) == number + 1:
            raise Killed
        real(file, content)

    arguments = (f"--trace={fake_run.trace}", "--num_samples=2")
    with monkeypatch.context() as patch:
        patch.setattr(answers, "_write", write)
        patch.setattr(answers.Answers, "close", lambda self: self._journal.close())  # no time for that either
        with pytest.raises(Killed):
            fake_run(*arguments, lines=["nonsense", *prompts(4)])
    assert fake_run(*arguments)[0] == 1
    found = read(fake_run.target)
    assert [each.get("responses") for each in found] == [None, *([f"P{i}0", f"P{i}1"] for i in range(1, 5))]
    expected = [(line, sample) for line in range(2, 6) for sample in range(2)]
    assert [(each["line"], each["sample"]) for each in read(fake_run.trace)] == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_wait_for_an_answer(number, fake_run, stream):
    def signal_twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), number)
        time.sleep(1)
        pytest.fail("waited")

    stream.after = {1: signal_twice}
    status, err = fake_run(lines=prompts(5))
    assert status == 128 + number
    assert err == "Interrupted: 1 of 5 prompts answered; run the same command again to continue.\n"


def test_signals_that_are_ignored_stay_so(fake_run, stream):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stream.after = {1: lambda: os.kill(os.getpid(), signal.SIGINT)}
        assert fake_run(lines=prompts(2))[0] == 0
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_interrupted_before_anything_is_known(fake_run, monkeypatch):
    monkeypatch.setattr(file_job, "scan_file", lambda *arguments: terminate())
    assert fake_run(lines=prompts(2)) == (143, "Interrupted.\n")
    monkeypatch.setattr(file_job, "scan_file", lambda *arguments: interrupt())
    assert fake_run(lines=prompts(2)) == (130, "Interrupted.\n")
    assert not fake_run.target.exists()


def test_a_trace_asked_for_later_leaves_the_output_alone(fake_run, stream):
    fake_run(lines=prompts(4))
    before = fake_run.target.read_bytes()
    status, err = fake_run(f"--trace={fake_run.trace}")
    assert (status, "4 answers have no trace yet; decoding them again for it." in err) == (0, True)
    assert len(stream.requests) == 4
    assert fake_run.target.read_bytes() == before
    assert [each["line"] for each in read(fake_run.trace)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "difference"),
    [
        (["--slot_size=4"], "slot_size 16, not 4"),
        (["--seed=1"], "seed 0, not 1"),
        (["--num_samples=2"], "num_samples 1, not 2"),
        (["--prompt_field=id"], "prompt_field 'prompt', not 'id'"),
        (["--prefix=x"], "prefix None, not 'x'"),
        (["--slot_score=mean"], "slot_score 'first_token', not 'mean'"),
        (["--stop=a,b", "--stop=c"], "stop [], not ['a,b', 'c']"),
        (["--suppress_ids=3,4"], "suppress_ids [], not [3, 4]"),
    ],
)
def test_an_output_of_other_settings_is_refused(arguments, difference, fake_run, stream):
    fake_run(lines=prompts(2))
    before = fake_run.target.read_bytes()
    status, err = fake_run(*arguments)
    assert status == 2
    assert err == (
        f"error: --output {fake_run.target} belongs to a run with {difference}; delete it and out.jsonl.journal, or "
        "choose another --output.\n"
    )
    assert fake_run.target.read_bytes() == before
    assert stream.requests == []


def test_an_output_of_other_prompts_or_weights_is_refused(fake_run):
    fake_run(lines=prompts(2))
    status, err = fake_run(lines=prompts(3))
    assert (status, "belongs to another input, or the input was changed since (input_bytes " in err) == (2, True)
    status, err = fake_run(lines=reversed(prompts(2)))
    assert (status, "belongs to another input, or the input was changed since (input_sha256 " in err) == (2, True)
    (fake_run.checkpoint / "model.safetensors").write_bytes(b"new")
    status, err = fake_run(lines=prompts(2))
    assert (status, "belongs to a run with checkpoint_content " in err) == (2, True)


def test_an_output_that_is_no_runs_is_refused(fake_run, stream):
    fake_run.target.write_text("precious\n")
    status, err = fake_run(lines=prompts(2))
    assert status == 2
    assert "was not written by an unfinished run" in err
    assert fake_run.target.read_text() == "precious\n"
    assert (stream.requests, answers.journal_path(fake_run.target).exists()) == ([], False)


@pytest.mark.parametrize("ids", [[1, 2, 1], ["a", None, None, "a"], [{"x": 1, "y": 2}, 1, {"y": 2, "x": 1}]])
def test_ids_that_come_twice(ids, fake_run, stream):
    lines = [{"prompt": "x", "id": each} for each in ids]
    status, err = fake_run(lines=["", *lines])
    assert status == 2
    assert err == (
        f"error: --input {fake_run.source} has the id {ids[-1 if ids[0] == 1 else 0]!r} twice, on lines 2 and "
        f"{len(ids) + 1}; give every line an id of its own, or none.\n"
    )
    assert (stream.requests, fake_run.target.exists()) == ([], False)


def test_ids_that_only_look_alike(fake_run):
    lines = [{"prompt": "x", "id": each} for each in (1, "1", 1.0, True, None, None)] + [{"prompt": "x"}] * 2
    assert fake_run(lines=lines)[0] == 0


def test_ids_of_the_same_hash(fake_run, monkeypatch):
    real = prompt_files._canonical
    monkeypatch.setattr(
        prompt_files, "_canonical", lambda value: b"" if sys._getframe(1).f_code.co_name == "add" else real(value)
    )
    assert fake_run(lines=prompts(3))[0] == 0
    assert fake_run(lines=[*prompts(2), {"prompt": "x", "id": 1}])[0] == 2


def test_a_line_of_several_megabytes_is_refused_alone_and_never_in_memory(fake_run, stream):
    with fake_run.source.open("w") as file:
        for line in prompts(2):
            file.write(json.dumps(line) + "\n")
            file.write('{"prompt": "')
            for _ in range(32):
                file.write("x" * 1_000_000)
            file.write('"}\n')
    tracemalloc.start()
    status, err = fake_run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert status == 1
    assert "2 prompts answered, 2 lines with errors." in err
    error = "The line has more than 1048576 bytes; shorten it."
    first, second = responses(2)
    assert read(fake_run.target) == [first, {"line": 2, "error": error}, second, {"line": 4, "error": error}]
    assert peak < 8e6


def test_a_line_may_have_settings_of_its_own(fake_run, stream):
    lines = [
        {"prompt": "a", "decode": {"gen_length": 32, "seed": 3, "stop": ["x"], "temperature": 1}},
        {"prompt": "b", "decode": {}},
        {"prompt": "c"},
        {"prompt": "d", "decode": {"algorithm": "paper", "suppress_ids": [3, 4]}},
        {"prompt": "e", "decode": {"slotsize": 4}},
        {"prompt": "f", "decode": {"gen_length": "4"}},
        {"prompt": "g", "decode": {"gen_length": 0}},
        {"prompt": "h", "decode": {"seed": 1.5}},
        {"prompt": "i", "decode": {"seed": 2**31}},
        {"prompt": "j", "decode": [1]},
        {"prompt": "k", "decode": {"gen_length": 999}},
    ]
    assert fake_run("--slot_size=4", "--seed=7", lines=lines)[0] == 1
    config = DecodeConfig(gen_length=16, slot_size=4)
    asked = [(request.index, request.config, request.seed) for request in stream.requests]
    assert asked == [
        (0, dataclasses.replace(config, gen_length=32, stop=("x",), temperature=1.0), 3),
        (1, config, 7),
        (2, config, 7),
        (3, dataclasses.replace(config, algorithm="paper", suppress_ids=(3, 4)), 7),
    ]
    bounds = {name: stream.keywords[name] for name in ("prompt_length", "response_length", "suppressed")}
    assert bounds == {"prompt_length": 1, "response_length": 32, "suppressed": 2}
    assert (stream.keywords["sampling"], stream.keywords["infilling"]) == (True, True)
    errors = [found["error"] for found in read(fake_run.target)[4:]]
    assert errors[0] == "Unknown config field 'decode.slotsize'. Did you mean 'slot_size'?"
    assert errors[1] == "decode.gen_length is '4'; it must be of type int."
    assert errors[2] == "decode.gen_length is 0; it must be a number of at least 1."
    assert errors[3] == "decode.seed is 1.5; it must be a whole number in [0, 2**31)."
    assert errors[4] == "decode.seed is 2147483648; it must be a whole number in [0, 2**31)."
    assert errors[5] == "'decode' must be an object of settings, not list."
    assert errors[6].startswith("The prompt has 1 tokens, with ")


def test_settings_are_flags_over_those_of_the_run(fake_run, stream):
    fake_run(
        "--gen_length=32", "--slot_size=8", "--serial_num_blocks=4", "--redraft", "--temperature=0.5", "--stop=a,b",
        "--algorithm=paper", "--token_threshold=0", "--suppress_special", "--seed=5", "--stop=c", "--suppress_ids=3,4",
        "--top_k=5", "--batch_size=auto", "--num_samples=2", "--prefix=Be brief.", "--slot_score=margin",
        lines=[{"prompt": "abc"}],
    )  # fmt: skip
    (request,) = stream.requests
    assert (request.index, request.seed) == (0, 5)
    assert request.config == DecodeConfig(
        gen_length=32, slot_size=8, serial_num_blocks=4, redraft=True, temperature=0.5, algorithm="paper",
        stop=("a,b", "c"), token_threshold=0.0, suppress_special=True, suppress_ids=(3, 4), top_k=5,
    )  # fmt: skip
    rules, method = stream.keywords.pop("rules"), stream.keywords.pop("method")
    assert rules.slot_score == SLOT_SCORES["margin"] and method == Method()
    assert stream.keywords == {
        "prompt_length": 3, "response_length": 32, "suppressed": 4, "sampling": True, "infilling": True,
        "batch_size": "auto", "most_requests": 1, "num_samples": 2, "prefix": "Be brief.",
        "allow_objective": None,
    }  # fmt: skip


def test_the_stream_is_told_how_many_come(fake_run, stream):
    fake_run("--num_samples=2", lines=prompts(3))
    assert (stream.keywords["batch_size"], stream.keywords["most_requests"]) == (32, 3)
    assert (stream.keywords["sampling"], stream.keywords["infilling"]) == (False, False)


def test_several_samples(fake_run):
    lines = [{"prompt": "ab"}, {"segments": ["c", {"hole": 4}]}]
    assert fake_run("--num_samples=3", lines=lines)[0] == 0
    assert read(fake_run.target) == [
        lines[0] | {"responses": ["AB0", "AB1", "AB2"], "finish_reasons": ["eos"] * 3},
        lines[1] | {"responses": ["C0", "C1", "C2"], "holes": [["C0"], ["C1"], ["C2"]], "finish_reasons": ["eos"] * 3},
    ]


def test_without_a_tokenizer_answers_are_tokens(fake_run, monkeypatch):
    model = dataclasses.replace(api.load(""), tokenizer=None)
    monkeypatch.setattr(api, "load", lambda path, **_: model)
    lines = [{"prompt": [65]}, {"segments": [[66], {"hole": 4}]}, {"segments": ["B", {"hole": 4}]}]
    assert fake_run(lines=lines)[0] == 1
    plain, template, text = read(fake_run.target)
    assert plain == lines[0] | {"response": [65, 48], "finish_reason": "eos"}
    assert template == lines[1] | {"response": [[66, 48]], "holes": [[66, 48]], "finish_reason": "eos"}
    assert text["error"] == "The model has no tokenizer; give prompts as lists of token IDs."


def test_segments_that_cannot_be_used(fake_run):
    lines = [{"segments": ["c"], "prompt": "x"}, {"segments": "c"}, {"segments": [{"hole": 0}, "c"]}]
    assert fake_run(lines=lines)[0] == 1
    errors = [found["error"] for found in read(fake_run.target)]
    assert errors[0] == "There are both 'prompt' and 'segments'; give one of them."
    assert errors[1].startswith("A template is ")
    assert errors[2].startswith("A hole has the size 0")


def test_a_prompt_field_called_segments(fake_run):
    fake_run("--prompt_field=segments", lines=[{"segments": "ab"}])
    assert read(fake_run.target) == [{"segments": "ab", "response": "AB0", "finish_reason": "eos"}]


def test_what_else_an_input_object_may_hold(fake_run):
    """Fields that an output has too are replaced; one that only shares the name of another stays."""
    lines = [
        {"prompt": "a", "holes": 3, "responses": ["gold"], "line": 7},
        {"segments": ["a", {"hole": 1}], "holes": ["old"], "finish_reason": "length", "response": "old"},
    ]
    assert fake_run(lines=lines)[0] == 0
    first, second = read(fake_run.target)
    assert first == lines[0] | {"response": "A0", "finish_reason": "eos"}
    assert (second["holes"], second["response"], second["finish_reason"]) == (["A0"], "A0", "eos")


def test_a_prefix_that_cannot_be_used(fake_run, monkeypatch):
    monkeypatch.setattr(Tokenizer, "unk_token_id", ord("%"))
    status, err = fake_run("--prefix=100%", lines=prompts(1))
    assert status == 2
    assert err == "error: --prefix cannot be used: The prompt has characters that the tokenizer does not know.\n"


def test_an_input_that_changes_while_it_is_read(fake_run, stream):
    def append():
        with fake_run.source.open("a") as file:
            file.write('{"prompt": "late"}\n')

    stream.after = {0: append}
    status, err = fake_run(lines=prompts(5))
    assert status == 2
    assert err.endswith(f"--input {fake_run.source} changed while it was read; delete the output and start over.\n")
    assert len(stream.requests) == 5


def test_an_input_that_cannot_be_read_twice(fake_run, tmp_path):
    os.mkfifo(fake_run.source)
    status, err = fake_run()
    assert status == 2
    assert err == f"error: --input {fake_run.source} is not a regular file; it is read twice, so save it as one.\n"


def test_the_report(fake_run):
    status, err = fake_run(lines=[*prompts(2), "nonsense"])
    assert status == 1
    assert err.startswith("2 prompts answered, 1 lines with errors. This run: 6 response tokens in 0.0 s (")
    assert err.endswith(" tokens/s) and 4 forwards (1.5 tokens per forward); 0.0 s of it compiling.\n")


def test_progress_without_a_terminal_is_a_line_now_and_then(fake_run, monkeypatch):
    monkeypatch.setattr(progress, "PLAIN_PROGRESS_SECONDS", 0.0)
    _, err = fake_run(lines=prompts(3))
    first, second, third, _ = err.splitlines()
    assert first.startswith("1/3 prompts, ")
    assert first.endswith(" tokens/s, 00:00 left")
    assert (second[:4], third[:4]) == ("2/3 ", "3/3 ")


def test_progress_on_a_terminal_is_a_bar(fake_run, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    _, err = fake_run(lines=prompts(3))
    assert "3/3" in err
    assert " tokens/s" in err
    assert "\r" in err


# ---- several processes ---------------------------------------------------------------------------------------------


@pytest.fixture
def as_process(fake_run, monkeypatch):
    """Runs the command as one of several processes, which come one after another here."""

    def run(id, count, *arguments, **keywords):
        waited = []
        with monkeypatch.context() as patch:
            patch.setattr(decode, "join_processes", lambda args: processes.Process(id, count))
            patch.setattr(file_job, "wait_for_all", lambda process, name: waited.append(name))
            patch.setattr(decode.os, "_exit", sys.exit)
            result = fake_run(*arguments, **keywords)
        return *result, waited

    return run


def test_processes_share_the_input(as_process, fake_run, stream):
    lines = [*prompts(3), "nonsense", "", *prompts(9)[3:]]
    trace = f"--trace={fake_run.trace}"
    status, err, waited = as_process(2, 3, trace, lines=lines)
    assert (status, waited) == (0, ["answered", "gathered"])
    assert err.startswith("3 prompts answered, 0 lines with errors.")
    assert [request.index for request in stream.requests] == [1, 7, 10]  # lines 2, 8 and 11
    status, err, _ = as_process(1, 3, trace)
    assert (status, err[:40]) == (1, "3 prompts answered, 1 lines with errors.")
    status, err, _ = as_process(0, 3, trace)
    assert status == 1
    assert err.endswith("All shares: 9 prompts answered, 1 lines with errors.\n")
    found = read(fake_run.target)
    assert [*found[:3], *found[4:]] == responses(9)
    assert [each["line"] for each in read(fake_run.trace)] == [1, 2, 3, 6, 7, 8, 9, 10, 11]
    names = ("checkpoint", "in.jsonl", "out.jsonl", "out.jsonl.journal", "trace.jsonl", "trace.jsonl.journal")
    assert sorted(os.listdir(fake_run.target.parent)) == sorted(names)
    assert as_process(2, 3)[:2] == (0, "All 3 prompts are already answered, 0 of them with errors.\n")


def test_one_process_goes_on_where_several_were(as_process, fake_run, stream):
    stream.after = {1: interrupt}
    status, err, waited = as_process(1, 2, lines=prompts(10))
    assert (status, waited) == (130, [])
    assert err.startswith("Interrupted: 2 of 5 prompts answered;")
    assert not fake_run.target.exists()
    stream.after = {3: interrupt}
    assert fake_run()[1].startswith("Interrupted: 6 of 10 prompts answered;")
    stream.after = {}
    assert fake_run()[0] == 0
    assert len(stream.requests) == 4
    assert read(fake_run.target) == responses(10)
    assert not answers.find_parts(fake_run.target)


def test_several_processes_go_on_where_others_were(as_process, fake_run, stream):
    stream.after = {1: interrupt}
    as_process(2, 3, lines=prompts(10))
    as_process(0, 3)
    stream.after = {}
    as_process(1, 2)
    assert len(stream.requests) == 5 - len({5, 8, 3, 6} & {1, 3, 5, 7, 9})
    as_process(0, 2)
    assert read(fake_run.target) == responses(10)
    assert not answers.find_parts(fake_run.target)


def test_a_process_that_waits_for_one_that_died(monkeypatch):
    def barrier(**keywords):
        raise RuntimeError("a task died")

    monkeypatch.setattr(processes.multihost, "get_barrier_sync_fn", lambda: barrier)
    processes.wait_for_all(processes.Process(0, 1), "answered")
    with pytest.raises(ConfigError, match="Another process ended before its share was answered; run all of them again"):
        processes.wait_for_all(processes.Process(0, 2), "answered")


# ---- real processes ------------------------------------------------------------------------------------------------

REFERENCE_CHECKPOINT = Path(__file__).parent / "data" / "reference" / "checkpoint"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts the command on its own; all share what they compile."""
    quick = {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def start(folder, *arguments):
        return subprocess.Popen(
            [sys.executable, "-m", "refusion_jax.decode", f"--checkpoint={REFERENCE_CHECKPOINT}",
             f"--input={folder}/in.jsonl", f"--output={folder}/out.jsonl", "--batch_size=4", "--gen_length=16",
             "--slot_size=4", *arguments],
            stderr=subprocess.PIPE, text=True, env=os.environ | quick,
        )  # fmt: skip

    return start


@pytest.fixture
def folder(tmp_path):
    lines = [{"prompt": [5 + i % 50, 7 + i % 40, 9], "id": i} for i in range(200)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_real_run_is_interrupted_and_continued(number, status, start, folder):
    out = folder / "out.jsonl"
    process = start(folder)
    while not (out.exists() and out.stat().st_size) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert process.returncode == status, err
    done = len(read(out)) if number != signal.SIGKILL else len(out.read_bytes().split(b"\n")) - 1
    assert 0 < done < 200
    if number != signal.SIGKILL:
        assert f"Interrupted: {done} of 200 prompts answered; run the same command again to continue." in err
    process = start(folder)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    found = read(out)
    assert [each["id"] for each in found] == list(range(200))

    out.rename(folder / "continued.jsonl")
    process = start(folder)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert read(out) == found


@pytest.mark.slow
def test_two_real_processes_share_a_file(start, folder):
    with socket.socket() as found:
        found.bind(("localhost", 0))
        address = f"--coordinator_address=localhost:{found.getsockname()[1]}"
    processes = [start(folder, "--num_processes=2", f"--process_id={i}", address) for i in range(2)]
    errors = [process.communicate(timeout=600)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert "All shares: 200 prompts answered, 0 lines with errors." in errors[0]
    found = read(folder / "out.jsonl")
    assert [each["id"] for each in found] == list(range(200))
    assert sorted(os.listdir(folder)) == ["in.jsonl", "out.jsonl", "out.jsonl.journal"]
    process = start(folder)
    assert "All 200 prompts are already answered" in process.communicate(timeout=300)[1]
