"""What an evaluation found: printed, and written to files."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from refusion_jax.config import ConfigError
from refusion_jax.evaluation import NAME
from refusion_jax.evaluation.journal import FILE_NAME
from refusion_jax.files import replace_file

RESULTS_NAME = "results.json"
_NO_SCORES = ("alias", "name", "sample_len", "sample_count")


def main_score(metrics: Mapping[str, Any]) -> tuple[str, float]:
    """Name and value of the first score that the harness reports for a task; ("", nan) when there is none."""
    for name, value in metrics.items():
        if name not in _NO_SCORES and "_stderr" not in name and isinstance(value, int | float):
            return name, float(value)
    return "", float("nan")


def check_free(directory: Path) -> None:
    """Refuses a directory whose results are not an evaluation's that can go on.

    Raises:
      ConfigError: then.
    """
    if (directory / RESULTS_NAME).exists() and not (directory / FILE_NAME).exists():
        raise ConfigError(
            f"--output {directory} has a {RESULTS_NAME}, but no {FILE_NAME} of the evaluation it is of; name another "
            "directory."
        )


def write_results(directory: Path, results: Mapping[str, Any], samples: Mapping[str, Sequence[Any]] | None) -> None:
    """Writes results.json and, where samples are given, samples_TASK.jsonl of each task; each appears when complete.

    Raises:
      OSError: when they cannot be written.
    """
    from lm_eval.utils import handle_non_serializable

    def write(name: str, texts: Sequence[str]) -> None:
        with replace_file(directory / name) as file:
            file.writelines((text + "\n").encode("utf-8", "surrogatepass") for text in texts)

    def as_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, indent=indent, default=handle_non_serializable, ensure_ascii=False)

    for task, records in (samples or {}).items():
        write(f"samples_{task}.jsonl", [as_json(record) for record in records])
    write(RESULTS_NAME, [as_json(results, 2)])


def print_results(results: Mapping[str, Any]) -> None:
    """Prints the harness's table of scores, and a line for each task on what its answers cost."""
    from lm_eval.utils import make_table

    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    for task, speed in results["config"][NAME]["speed"].items():
        print(f"{task}: {_generated(speed) if 'responses' in speed else _scored(speed)}")
        _warn(task, speed)


def _generated(speed: Mapping[str, Any]) -> str:
    latency = ", ".join(f"{name} {seconds:.2f}" for name, seconds in speed["latency_seconds"].items())
    return (
        f"{speed['responses']:,} responses of {speed['mean_response_length']:.1f} tokens, {speed['forwards']:,} "
        f"forwards ({speed['tokens_per_forward']:.2f} tokens per forward); {speed['tokens_per_second']:,.0f} tokens/s, "
        f"{speed['compile_seconds']:.0f} of {speed['seconds']:.0f} s compiling; latency {latency} s"
    )


def _scored(speed: Mapping[str, Any]) -> str:
    return (
        f"{speed['scored']:,} responses of {speed['mean_response_length']:.1f} tokens scored, "
        f"{speed['tokens_per_second']:,.0f} tokens/s"
    )


def _warn(task: str, speed: Mapping[str, Any]) -> None:
    total = speed.get("responses", speed.get("scored"))
    if speed["prompts_cut"]:
        print(
            f"{task}: {speed['prompts_cut']} of {total} prompts were longer than the model takes and lost "
            f"{speed['prompt_tokens_cut']:,} tokens at their beginning.",
            file=sys.stderr,
        )
    if speed["prompts_with_unknown"]:
        print(
            f"{task}: {speed['prompts_with_unknown']} of {total} prompts have characters that the tokenizer does not "
            "know.",
            file=sys.stderr,
        )
