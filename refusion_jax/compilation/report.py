"""What compiling a program told: memory, arithmetic, traffic, and the speed that these cannot exceed."""

import dataclasses
import math
import re
import time
from collections.abc import Sequence
from typing import Any

import jax

from refusion_jax.compilation.cost import Cost, program_cost
from refusion_jax.compilation.kernels import attention_kernel
from refusion_jax.compilation.programs import AbstractProgram
from refusion_jax.compilation.topologies import Topology

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"(\d+(?:\.\d+)?)([KMGT]?)B?"
_TOO_LARGE = (
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
    re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
)
GB = 1e9


@dataclasses.dataclass(frozen=True)
class Report:
    """Of one program on one topology; what is "per chip" is of each chip, the same on all.

    Attributes:
      program: what was compiled. topology: for what. seconds: how long compiling took.
      memory: bytes per chip by kind; where the program is too large, "needed" alone.
      cost: per chip and run; None where the program is too large.
      attention: what computes it, one of `model.attention`; None where the program is too large.
    """

    program: AbstractProgram
    topology: Topology
    seconds: float
    memory: dict[str, int]
    cost: Cost | None
    attention: str | None = None

    @property
    def hbm_bytes(self) -> int:
        """Memory that the program needs on each chip."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether a chip has that much."""
        return self.cost is not None and self.hbm_bytes <= self.topology.chip.hbm_bytes

    @property
    def used(self) -> int:
        """Chips that the program runs on."""
        return math.prod(self.program.mesh.values())


def compile_program(program: AbstractProgram, topology: Topology) -> Report:
    """Compiles a program, or finds by how much it is too large for a chip."""
    start = time.perf_counter()
    try:
        compiled = program.compile()
    except jax.errors.JaxRuntimeError as error:
        needed = needed_bytes(str(error))
        if needed is None:
            raise
        return Report(program, topology, time.perf_counter() - start, {"needed": needed}, None)
    seconds = time.perf_counter() - start
    text, memory = compiled.as_text(), _memory(program, compiled.memory_analysis())
    cost = program_cost(text, program.dynamic_trips)
    return Report(program, topology, seconds, memory, cost, attention_kernel(text))


def needed_bytes(message: str) -> int | None:
    """The memory that the compiler says a program needs, where its error is that there is too little."""
    for pattern in _TOO_LARGE:
        if found := pattern.search(message):
            return round(float(found[1]) * _UNITS[found[2]])
    return None


def _memory(program: AbstractProgram, found: Any) -> dict[str, int]:
    # What a program does not read, as a prefill the output embedding, is no argument of it but stays where it is.
    others = max(0, found.argument_size_in_bytes - sum(program.held.values()))
    held = {**program.held, "other arguments": others}
    return held | {
        "results": found.output_size_in_bytes - found.alias_size_in_bytes,
        "gradients, activations, temporaries": found.temp_size_in_bytes,
        "program": found.generated_code_size_in_bytes,
    }


def bounds(report: Report) -> dict[str, float]:
    """What the chips' peaks allow, were everything else free and the two perfectly beside each other.

    Returns:
      compute_seconds, memory_seconds: of one run. flops_ratio: compiled FLOPs over the model's. intensity: FLOPs per
      byte. utilisation: the model's FLOPs per second over the peak. tokens_per_second: of all chips. bytes_ratio,
      collectives_ratio: what moves over what has to, where the program says that.
    """
    assert report.cost is not None
    chip, cost, chips = report.topology.chip, report.cost, report.used
    compute, memory = cost.flops / chip.flops, cost.bytes / chip.bandwidth
    seconds, program = max(compute, memory), report.program
    found = {
        "bytes_ratio": (cost.bytes, program.least_bytes),
        "collectives_ratio": (sum(cost.collectives.values()), program.least_collectives),
    }
    return {name: moved / least for name, (moved, least) in found.items() if least} | {
        "compute_seconds": compute,
        "memory_seconds": memory,
        "flops_ratio": cost.flops * chips / report.program.model_flops,
        "intensity": cost.flops / max(cost.bytes, 1),
        "utilisation": report.program.model_flops / chips / (chip.flops * seconds),
        "tokens_per_second": report.program.tokens / seconds,
    }


def describe(report: Report) -> list[str]:
    """The report as lines to print."""
    program, chip, limit = report.program, report.topology.chip, report.topology.chip.hbm_bytes
    mesh = " x ".join(f"{axis} {size}" for axis, size in program.mesh.items())
    chips = f"{report.used} chip{'s' * (report.used > 1)} ({mesh})"
    lines = [f"{program.name}, on {chips}: compiled in {report.seconds:.0f} s"]
    lines += [f"  {kind:<36}{size / GB:10.3f} GB" for kind, size in report.memory.items()]
    spare = limit - report.hbm_bytes
    verdict = f"fits, {spare / GB:.2f} GB are free" if report.fits else f"does not fit, by {-spare / GB:.2f} GB"
    lines.append(f"  {'memory of each chip':<36}{report.hbm_bytes / GB:10.3f} GB of {limit / GB:.2f} GB: {verdict}")
    if report.cost is None:
        return lines
    found, cost = bounds(report), report.cost
    compute, memory = found["compute_seconds"], found["memory_seconds"]
    lines += [
        f"  {'attention':<36}{report.attention:>10}",
        f"  {'FLOPs of each chip':<36}{cost.flops:10.3e}, {found['flops_ratio']:.3f} times the model's",
        f"  {'bytes of each chip':<36}{cost.bytes:10.3e}, {found['intensity']:.0f} FLOPs per byte"
        + _times(found, "bytes_ratio", "parameters and KV buffer"),
        *(f"  {kind:<36}{size:10.3e} bytes" for kind, size in sorted(cost.collectives.items())),
        *_collectives(cost, found),
        f"  {'at the peaks':<36}{max(compute, memory):10.4g} s for {program.tokens:,} "
        f"tokens: arithmetic {compute:.4g} s, memory {memory:.4g} s",
        f"  {'upper bound':<36}{found['utilisation']:10.1%} utilisation, {found['tokens_per_second']:,.0f} tokens/s",
        f"  (peaks of a chip: {chip.flops / 1e12:.0f} TFLOP/s in bfloat16, {chip.bandwidth / 1e9:,.0f} GB/s; "
        "collectives and all else count as free)",
    ]
    return lines


def _collectives(cost: Cost, found: dict[str, float]) -> list[str]:
    if "collectives_ratio" not in found:
        return []
    total = sum(cost.collectives.values())
    needs = _times(found, "collectives_ratio", "two gathers of the parameters and one scatter of the gradients")
    return [f"  {'all collectives':<36}{total:10.3e} bytes{needs}"]


def _times(found: dict[str, float], name: str, what: str) -> str:
    return f", {found[name]:.2f} times {what}" if name in found else ""


def summary(topology: Topology, reports: Sequence[Report]) -> dict[str, Any]:
    """The figures as one JSON object: those of the program that needs most memory, and all under "programs"."""
    largest = max(reports, key=lambda report: report.hbm_bytes)
    return {
        "topology": topology.name,
        "chips": topology.chips,
        **_figures(largest),
        "hbm_limit_bytes": topology.chip.hbm_bytes,
        "fits": all(report.fits for report in reports),
        "programs": {report.program.name: _figures(report) for report in reports},
    }


def _figures(report: Report) -> dict[str, Any]:
    cost = report.cost
    found = bounds(report) if cost is not None else {}
    names = (
        "flops_ratio", "intensity", "bytes_ratio", "collectives_ratio", "utilisation", "tokens_per_second",
    )  # fmt: skip
    return {
        "mesh": report.program.mesh,
        "hbm_bytes_per_chip": report.hbm_bytes,
        "memory": report.memory,
        "flops_per_chip": None if cost is None else cost.flops,
        "bytes_per_chip": None if cost is None else cost.bytes,
        "collective_bytes_per_chip": None if cost is None else dict(sorted(cost.collectives.items())),
        "tokens_per_step": report.program.tokens,
        "attention": report.attention,
        **{name: round(found[name], 6) if name in found else None for name in names},
        "compile_seconds": round(report.seconds, 1),
    }
