"""pass@k of generated programs, as Hugging Face's metric `code_eval` defines it, but run in isolation."""

import math
from collections.abc import Sequence
from typing import Any

from refusion_jax.config import require
from refusion_jax.evaluation.sandbox import DEFAULT_LIMITS, Limits, run_programs


def code_eval(
    references: Sequence[str],
    predictions: Sequence[Sequence[str]],
    k: int | Sequence[int] = (1, 10, 100),
    limits: Limits = DEFAULT_LIMITS,
    workers: int | None = None,
) -> tuple[dict[str, float], dict[int, list[tuple[int, dict[str, Any]]]]]:
    """Runs every candidate before its problem's test and estimates pass@k (Chen et al., 2021, equation 1).

    Args:
      references: of each problem, the code that tests a candidate.
      predictions: of each problem, its candidates; each runs as itself, a line feed, and the reference.
      k: candidates of which one must pass; those that a problem has too few candidates for are left out.
      limits: of each program.
      workers: programs at a time; by default as many as this process has cores.

    Returns:
      `{"pass@k": mean over problems}`, and of each problem its candidates as `(index, {"task_id": problem, "passed",
      "result", "completion_id": index})`.

    Raises:
      SandboxError: when programs cannot be isolated. ConfigError: for arguments that do not fit each other.
    """
    sizes = (k,) if isinstance(k, int) else tuple(k)
    _check(references, predictions, sizes)
    places = [(problem, index) for problem, candidates in enumerate(predictions) for index in range(len(candidates))]
    programs = [predictions[problem][index] + "\n" + references[problem] for problem, index in places]
    results: dict[int, list[tuple[int, dict[str, Any]]]] = {problem: [] for problem in range(len(references))}
    for (problem, index), outcome in zip(places, run_programs(programs, limits, workers), strict=True):
        entry = {
            "task_id": problem,
            "passed": outcome.passed,
            "result": outcome.result,
            "completion_id": index,
        }
        results[problem].append((index, entry))
    counts = [(len(entries), sum(entry["passed"] for _, entry in entries)) for entries in results.values()]
    scores = {
        f"pass@{size}": sum(pass_at_k(n, c, size) for n, c in counts) / len(counts)
        for size in sizes
        if all(n >= size for n, _ in counts)
    }
    return scores, results


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that among k of n candidates is one of the c that pass; k ≤ n."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def _check(references: Sequence[str], predictions: Sequence[Sequence[str]], sizes: Sequence[int]) -> None:
    require(len(references) > 0, "There are no references; give the tests of at least one problem.")
    require(
        len(references) == len(predictions),
        f"There are {len(references)} references and {len(predictions)} lists of predictions; give one for each.",
    )
    for problem, candidates in enumerate(predictions):
        require(
            not isinstance(candidates, str) and len(candidates) > 0,
            f"predictions[{problem}] is {str(candidates)[:40]!r}; it must be a list of at least one program.",
        )
    for size in sizes:
        require(size >= 1, f"k is {size}; it must be at least 1.")
