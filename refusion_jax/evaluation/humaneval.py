"""Scores completions of the HumanEval problems (Chen et al., 2021) by running them, isolated, on the problems' tests.

    python -m refusion_jax.evaluation.humaneval --data=DIR --samples=FILE --allow_code_execution

DIR holds HumanEval.jsonl.gz or HumanEval.jsonl, itself or in a folder humaneval. FILE holds one JSON object
{"task_id": ..., "completion": ...} a line, one or several for each problem; a completion continues the problem's
prompt. Prints pass@1, and pass@10 and pass@100 where every problem has as many samples. How each sample ended goes to
--output, by default beside FILE: samples.results.jsonl beside samples.jsonl.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from refusion_jax import command_line
from refusion_jax.config import ConfigError, nearest
from refusion_jax.evaluation.code_metric import code_eval
from refusion_jax.evaluation.data_files import find_file, read_objects
from refusion_jax.evaluation.sandbox import Limits, check_sandbox
from refusion_jax.files import replace_file, writing_out

FLAGS = flags.FlagValues()
flags.DEFINE_string("data", None, "Directory of the problems.", flag_values=FLAGS)
flags.DEFINE_string("samples", None, "File of completions, as JSON lines.", flag_values=FLAGS)
flags.DEFINE_string("output", None, "File of results; by default beside the samples.", flag_values=FLAGS)
flags.DEFINE_bool("allow_code_execution", False, "Consent to running the completions.", flag_values=FLAGS)
flags.DEFINE_bool("partial", False, "Score only the problems that have a sample.", flag_values=FLAGS)
flags.DEFINE_integer(
    "workers", None, "Programs at a time; by default one for each core.", lower_bound=1, flag_values=FLAGS
)
flags.DEFINE_float("timeout", Limits.wall_seconds, "Seconds that a program may take.", flag_values=FLAGS)

FILE_NAMES = ("HumanEval.jsonl.gz", "HumanEval.jsonl")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem: a function's head and docstring, and a test of what follows."""

    task_id: str
    prompt: str
    test: str
    entry_point: str


@dataclasses.dataclass(frozen=True)
class Sample:
    """A continuation of a problem's prompt."""

    task_id: str
    completion: str


def main(args: flags.FlagValues) -> None:
    """Reads, runs, writes, prints."""
    if not args.allow_code_execution:
        raise ConfigError(
            "--allow_code_execution is missing: the completions are programs that nobody has read, and scoring runs "
            "them, isolated by the kernel; give it to consent."
        )
    limits = Limits.lasting(args.timeout)
    samples_path = Path(args.samples)
    output = Path(args.output) if args.output is not None else samples_path.with_suffix(".results.jsonl")
    data = find_file(Path(args.data), "humaneval", FILE_NAMES)
    _check_output(output, {"--samples": samples_path, "--data": data})
    problems = read_problems(data)
    samples = read_samples(samples_path, problems)
    sampled = {sample.task_id for sample in samples}
    missing = [name for name in problems if name not in sampled]
    if missing and not args.partial:
        raise ConfigError(
            f"{samples_path} has no sample for {len(missing)} of {len(problems)} problems, the first being "
            f"{missing[0]}; add them, or score only the others with --partial."
        )
    check_sandbox()
    scores, results = score(problems, samples, limits, args.workers)
    _write(output, results)
    passed = sum(entry["passed"] for entry in results)
    with writing_out():
        if missing:
            print(f"Only {len(sampled)} of {len(problems)} problems have a sample; the others do not count.")
        several = f" samples of {len(sampled)} problems" if len(samples) > len(sampled) else ""
        print(f"pass@1: {scores.pop('pass@1'):.3f} ({passed} of {len(samples)}{several})")
        for name, value in scores.items():
            print(f"{name}: {value:.3f}")


def read_problems(path: Path) -> dict[str, Problem]:
    """Reads the problems, in their order, by their IDs.

    Raises:
      ConfigError: when the file cannot be read or holds something else.
    """
    names = [field.name for field in dataclasses.fields(Problem)]
    problems = {
        line["task_id"]: Problem(**{name: line[name] for name in names}) for _, line in read_objects(path, names)
    }
    if not problems:
        raise ConfigError(f"{path} is empty; put the file of github.com/openai/human-eval there.")
    return problems


def read_samples(path: Path, problems: Mapping[str, Problem]) -> list[Sample]:
    """Reads completions of these problems.

    Raises:
      ConfigError: when the file cannot be read or holds something else, or a problem that is not among them.
    """
    samples = []
    for number, line in read_objects(path, ("task_id", "completion")):
        name = line["task_id"]
        if name not in problems:
            raise ConfigError(f"Line {number} of {path} has the unknown task_id {name!r}.{nearest(name, problems)}")
        samples.append(Sample(line["task_id"], line["completion"]))
    if not samples:
        raise ConfigError(f"{path} is empty; it must hold completions as JSON lines.")
    return samples


def score(
    problems: Mapping[str, Problem], samples: Sequence[Sample], limits: Limits, workers: int | None
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Runs the samples on their problems' tests.

    Args:
      problems: by ID. samples: at least one. limits: of each program. workers: programs at a time.

    Returns:
      pass@k over the problems that have a sample, and {"task_id", "completion", "passed", "result"} of each sample.

    Raises:
      SandboxError: when programs cannot be isolated.
    """
    places: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        places.setdefault(sample.task_id, []).append(index)
    scores, outcomes = code_eval(
        [f"{problems[name].test}\ncheck({problems[name].entry_point})" for name in places],
        [[problems[name].prompt + samples[index].completion for index in indices] for name, indices in places.items()],
        limits=limits,
        workers=workers,
    )
    results: list[dict[str, Any]] = [dataclasses.asdict(sample) for sample in samples]
    for problem, indices in enumerate(places.values()):
        for candidate, outcome in outcomes[problem]:
            results[indices[candidate]] |= {"passed": outcome["passed"], "result": outcome["result"]}
    return scores, results


def _check_output(output: Path, inputs: Mapping[str, Path]) -> None:
    """Refuses an output that cannot be written, or is one of the inputs."""
    for flag, path in inputs.items():
        if output.resolve() == path.resolve():
            raise ConfigError(f"The results would replace {path}, which {flag} reads; name another file with --output.")
    if output.is_file() and not _is_results(output):
        raise ConfigError(f"{output} is there and holds no results of this command; name another file with --output.")
    if output.is_dir() or not os.access(output.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"The results cannot be written to {output}; name a file in a writable directory, --output.")


def _is_results(path: Path) -> bool:
    """Whether a file is empty or begins with a line that `_write` has written."""
    with path.open("rb") as file:
        first = file.readline()
    try:
        return not first or set(json.loads(first)) == {"task_id", "completion", "passed", "result"}
    except (ValueError, TypeError, RecursionError):
        return False


def _write(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    try:
        with replace_file(path) as file:
            for result in results:
                file.write((json.dumps(result) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}).") from error


if __name__ == "__main__":
    command_line.run(main, FLAGS, required=("data", "samples"))
