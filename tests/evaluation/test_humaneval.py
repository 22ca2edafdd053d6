"""HumanEval through the command line: scores, results, refusals before anything runs, and the real problems."""

import gzip
import json
import pathlib
import re

import pytest

from refusion_jax import command_line
from refusion_jax.evaluation import code_metric, humaneval, sandbox
from refusion_jax.evaluation.data_files import find_file
from refusion_jax.evaluation.sandbox import Outcome

HUMANEVAL = pathlib.Path(__file__).parents[2] / "../shared/data/humaneval"
PROBLEMS = [
    {
        "task_id": f"T/{n}",
        "prompt": f"def f{n}():\n",
        "test": f"def check(f): assert f() == {n}",
        "entry_point": f"f{n}",
    }
    for n in range(3)
]


def write_lines(path, objects):
    path.write_text("".join(json.dumps(each) + "\n" for each in objects))
    return path


def sample(n, value):
    return {"task_id": f"T/{n}", "completion": f"    return {value}"}


@pytest.fixture
def data(tmp_path):
    write_lines(tmp_path / "HumanEval.jsonl", PROBLEMS)
    return tmp_path


@pytest.fixture
def ran(monkeypatch):
    """The programs that were run; this process runs them, for they are the test's own."""
    programs = []

    def run(given, limits, workers):
        programs.extend(given)
        return [run_here(program) for program in given]

    monkeypatch.setattr(code_metric, "run_programs", run)
    monkeypatch.setattr(humaneval, "check_sandbox", lambda: None)
    return programs


def run_here(program):
    try:
        exec(program, {})
    except AssertionError:
        return Outcome(False, "failed: AssertionError")
    return Outcome(True, "passed")


def call(*arguments):
    command_line.run(humaneval.main, humaneval.FLAGS, required=("data", "samples"), arguments=arguments)


def call_on(data, samples, *more):
    call(f"--data={data}", f"--samples={samples}", "--allow_code_execution", *more)


def results_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_score_and_the_results_beside_the_samples(data, ran, capsys):
    given = [sample(2, 2), sample(0, 0), sample(1, 5)]
    call_on(data, write_lines(data / "samples.jsonl", given))
    assert capsys.readouterr().out == "pass@1: 0.667 (2 of 3)\n"
    assert results_of(data / "samples.results.jsonl") == [
        {**given[0], "passed": True, "result": "passed"},
        {**given[1], "passed": True, "result": "passed"},
        {**given[2], "passed": False, "result": "failed: AssertionError"},
    ]
    assert ran[0] == "def f2():\n    return 2\ndef check(f): assert f() == 2\ncheck(f2)"


def test_several_samples_of_a_problem(data, ran, capsys):
    given = [sample(n, value) for value in range(10) for n in range(3)]
    given.append(sample(1, 1))
    call_on(data, write_lines(data / "samples.jsonl", given), f"--output={data / 'out'}")
    mean = (1 / 10 + 2 / 11 + 1 / 10) / 3
    # Of eleven with two right ones, ten always hold one.
    assert capsys.readouterr().out == f"pass@1: {mean:.3f} (4 of 31 samples of 3 problems)\npass@10: 1.000\n"
    assert [line["passed"] for line in results_of(data / "out")] == [
        line["completion"].endswith(line["task_id"][-1]) for line in given
    ]


def test_some_problems_alone(data, ran, capsys):
    samples = write_lines(data / "samples.jsonl", [sample(1, 1)])
    with pytest.raises(SystemExit):
        call_on(data, samples)
    assert "no sample for 2 of 3 problems, the first being T/0" in capsys.readouterr().err
    call_on(data, samples, "--partial")
    assert capsys.readouterr().out == (
        "Only 1 of 3 problems have a sample; the others do not count.\npass@1: 1.000 (1 of 1)\n"
    )


def test_the_limits_are_those_of_the_flags(data, monkeypatch):
    seen = []
    monkeypatch.setattr(humaneval, "check_sandbox", lambda: None)
    monkeypatch.setattr(
        code_metric, "run_programs", lambda programs, *rest: seen.append(rest) or [Outcome(True, "passed")]
    )
    samples = write_lines(data / "samples.jsonl", [sample(1, 1)])
    call_on(data, samples, "--partial", "--timeout=2.5", "--workers=3")
    assert seen == [(sandbox.Limits(wall_seconds=2.5, cpu_seconds=3), 3)]


@pytest.mark.parametrize("place", ["HumanEval.jsonl.gz", "humaneval/HumanEval.jsonl.gz", "humaneval/HumanEval.jsonl"])
def test_where_the_problems_may_be(tmp_path, place):
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.writelines(json.dumps(problem) + "\n" for problem in PROBLEMS)
    found = find_file(tmp_path, "humaneval", humaneval.FILE_NAMES)
    assert found == path
    assert list(humaneval.read_problems(found)) == ["T/0", "T/1", "T/2"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([sample(0, 0), {"task_id": "TT/1", "completion": ""}], "Line 2 .* unknown task_id 'TT/1'. Did you mean 'T/1'"),
        ([sample(0, 0), {"task_id": "T/1"}], "Line 2 of .* is no JSON object"),
        ([{"task_id": "T/1", "completion": 3}], "Line 1 of .* with strings"),
        (["x"], "Line 1 of .* is no JSON object"),
        ([], "is empty"),
    ],
)
def test_unusable_samples_are_refused(data, ran, capsys, lines, message):
    refused(capsys, message, data, write_lines(data / "samples.jsonl", lines))
    assert ran == []
    assert not (data / "samples.results.jsonl").exists()


def refused(capsys, message, data, samples, *more):
    with pytest.raises(SystemExit) as ended:
        call_on(data, samples, *more)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(message, error), error


def test_other_refusals(data, ran, capsys):
    samples = write_lines(data / "samples.jsonl", [sample(n, n) for n in range(3)])
    with pytest.raises(SystemExit):
        call(f"--data={data}", f"--samples={samples}")
    assert "--allow_code_execution is missing" in capsys.readouterr().err
    refused(
        capsys,
        "--data .*nowhere is not a directory; name the one",
        data / "nowhere",
        samples,
    )
    refused(capsys, "missing.jsonl cannot be read .No such file", data, data / "missing.jsonl")
    refused(capsys, "would replace .*samples.jsonl, which --samples reads", data, samples, f"--output={samples}")
    refused(capsys, "--data reads", data, samples, f"--output={data / 'HumanEval.jsonl'}")
    (data / "mine.jsonl").write_text('{"task_id": "T/0", "completion": ""}\n')
    refused(capsys, "mine.jsonl is there and holds no results", data, samples, f"--output={data / 'mine.jsonl'}")
    refused(capsys, "cannot be written to .*/no/out", data, samples, f"--output={data / 'no/out'}")
    refused(capsys, "may run for 0.0 seconds; give", data, samples, "--timeout=0")
    (data / "HumanEval.jsonl.gz").write_bytes(b"no gzip")
    refused(capsys, "HumanEval.jsonl.gz cannot be read .Not a gzipped file", data, samples)
    assert ran == []


@pytest.fixture
def real_problems(isolation):
    if not HUMANEVAL.exists():
        pytest.skip("shared/data/humaneval is not here")
    with gzip.open(HUMANEVAL / "HumanEval.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


@pytest.mark.slow
@pytest.mark.parametrize(("field", "score"), [("canonical_solution", "1.000 (164 of 164)"), (None, "0.000 (0 of 164)")])
def test_the_real_problems(real_problems, tmp_path, capsys, field, score):
    samples = [{"task_id": each["task_id"], "completion": each.get(field, "")} for each in real_problems]
    call_on(HUMANEVAL, write_lines(tmp_path / "samples.jsonl", samples))
    assert capsys.readouterr().out == f"pass@1: {score}\n"


def test_some_of_the_real_problems(real_problems, tmp_path, capsys):
    chosen = real_problems[::20]
    samples = [{"task_id": each["task_id"], "completion": each["canonical_solution"]} for each in chosen]
    samples += [{"task_id": each["task_id"], "completion": ""} for each in chosen]
    call_on(HUMANEVAL.parent, write_lines(tmp_path / "samples.jsonl", samples), "--partial")
    assert f"pass@1: 0.500 ({len(chosen)} of {len(samples)} samples" in capsys.readouterr().out
