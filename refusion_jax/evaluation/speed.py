"""What answers cost, beside what they are worth."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

LATENCY_PERCENTILES = (50, 90, 99)


def generation_speed(records: Sequence[Mapping[str, Any]], num_processes: int = 1) -> dict[str, Any]:
    """The figures of a task whose answers were generated.

    Args:
      records: one per answer, in order: "tokens", "forwards", "latency" in seconds from when a row took the prompt,
        without compiling, "cut_tokens", "unknown_tokens", "finish_reason"; and "process", "started", "elapsed" and
        "compiling": the process that computed it, when that had begun with the task, and the seconds it had taken so
        far, of which those compiling.
      num_processes: how many shared the work.

    Returns:
      responses; tokens, forwards: of all together; mean_response_length in tokens; tokens_per_forward;
      tokens_per_second: without compiling; seconds: of the process that took longest over all its starts,
      compile_seconds of them compiling; latency_seconds: by percentile; finish_reasons; prompts_cut,
      prompt_tokens_cut: prompts that were longer than the model takes and lost tokens at their beginning;
      prompts_with_unknown: with characters that the tokenizer does not know.
    """
    tokens, forwards = sum(r["tokens"] for r in records), sum(r["forwards"] for r in records)
    seconds, compiling = _spent(records, "elapsed"), _spent(records, "compiling")
    running = _spent([{**r, "running": r["elapsed"] - r["compiling"]} for r in records], "running")
    latencies = np.percentile([r["latency"] for r in records], LATENCY_PERCENTILES)
    reasons = [r["finish_reason"] for r in records]
    return {
        "responses": len(records),
        "processes": num_processes,
        "tokens": tokens,
        "forwards": forwards,
        "tokens_per_forward": tokens / max(forwards, 1),
        "mean_response_length": tokens / len(records),
        "seconds": seconds,
        "compile_seconds": compiling,
        "tokens_per_second": tokens / max(running, 1e-9),
        "latency_seconds": {f"p{p}": float(value) for p, value in zip(LATENCY_PERCENTILES, latencies, strict=True)},
        "finish_reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        **_prompts(records),
    }


def scoring_speed(records: Sequence[Mapping[str, Any]], num_processes: int = 1) -> dict[str, Any]:
    """The figures of a task whose responses were scored: how many, of how many tokens, how fast, and what was cut."""
    tokens, seconds = sum(r["tokens"] for r in records), _spent(records, "elapsed")
    return {
        "scored": len(records),
        "processes": num_processes,
        "tokens": tokens,
        "mean_response_length": tokens / len(records),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        **_prompts(records),
    }


def _spent(records: Iterable[Mapping[str, Any]], field: str) -> float:
    """Seconds of the process that took longest: the sum over its starts of the most that a record of it had seen."""
    by_start: dict[tuple[int, float], float] = {}
    for record in records:
        start = record["process"], record["started"]
        by_start[start] = max(by_start.get(start, 0.0), record[field])
    by_process: dict[int, float] = {}
    for (process, _), seconds in by_start.items():
        by_process[process] = by_process.get(process, 0.0) + seconds
    return max(by_process.values())


def _prompts(records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {
        "prompts_cut": sum(r["cut_tokens"] > 0 for r in records),
        "prompt_tokens_cut": sum(r["cut_tokens"] for r in records),
        "prompts_with_unknown": sum(r["unknown_tokens"] > 0 for r in records),
    }
