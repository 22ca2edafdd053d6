"""What `--compile_for` does: compiles, prints, and says what would make a program fit that does not."""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence

from refusion_jax.compilation.programs import (
    VOCAB_MULTIPLE,
    AbstractProgram,
    DecodeShape,
    decode_programs,
    known_vocabulary,
    train_program,
)
from refusion_jax.compilation.report import GB, Report, compile_program, describe, summary
from refusion_jax.compilation.topologies import Topology, read_topology, require_compiler, topology_devices
from refusion_jax.config import Config
from refusion_jax.sharding import decoding_mesh

_MOST_REMEDIES = 2
_MORE_CHIPS = "a topology with more chips, or with larger ones"


def compile_training(config: Config, name: str) -> int:
    """Compiles a run's training step for the topology `name` and prints what it takes; the last line is JSON.

    Returns:
      the exit status: 1 when it does not fit into the chips' memory.

    Raises:
      ConfigError: for an unknown topology, a mesh or batch that does not split over it, or without libtpu.
    """
    topology = read_topology(name)
    require_compiler()

    def work() -> int:
        known = _with_vocabulary(config)
        program = train_program(known, topology_devices(topology))
        return _compile(topology, [program], lambda report: training_remedies(known, report))

    return _in_child(work)


def compile_decoding(config: Config, shape: DecodeShape, name: str, data: int = 1, tensor: int = 1) -> int:
    """Compiles the prefill and the decode loop for chips of the topology `name`, like `compile_training`.

    Args:
      config: whose `model` decodes.
      shape: what it decodes at once.
      name: of the topology.
      data, tensor: chips that rows, and the model, are split over; one of them may be -1, the rest.
    """
    topology = read_topology(name)
    require_compiler()

    def work() -> int:
        model, mesh = _with_vocabulary(config).model, decoding_mesh(data, tensor, topology_devices(topology))
        programs = decode_programs(model, shape, mesh, topology.chip.hbm_bytes)
        return _compile(topology, programs, lambda report: decoding_remedies(shape, report))

    return _in_child(work)


def _in_child(work: Callable[[], int]) -> int:
    """Does the work in a process of its own, since a compiler that fails may take its process with it."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        return work()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code >= 0:
        return code
    print(
        f"error: The TPU compiler itself failed ({signal.Signals(-code).name}), which is no fault of the settings; "
        "others, such as another batch size, may not meet it.",
        file=sys.stderr,
    )
    return 2


def _with_vocabulary(config: Config) -> Config:
    known = known_vocabulary(config)
    if known is not config:
        print(
            f"model.vocab_size is 0, the tokenizer's: taken as {known.model.vocab_size:,}, data.tokenizer_vocab_size "
            f"rounded up to a multiple of {VOCAB_MULTIPLE}."
        )
    return known


def _compile(topology: Topology, programs: Sequence[AbstractProgram], remedies: Callable[[Report], list[str]]) -> int:
    print(f"{topology.name}: {topology.chips} chips.", flush=True)
    reports = []
    for program in programs:
        report = compile_program(program, topology)
        reports.append(report)
        print("\n".join(describe(report)), flush=True)
        if not report.fits:
            excess = (report.hbm_bytes - topology.chip.hbm_bytes) / GB
            print(
                f"The {program.name} needs {excess:.2f} GB more than a chip has; try "
                f"{', or '.join(remedies(report)[:_MOST_REMEDIES])}."
            )
    result = summary(topology, reports)
    print(json.dumps(result))
    return 0 if result["fits"] else 1


def training_remedies(config: Config, report: Report) -> list[str]:
    """What may make a training step smaller, the least costly first."""
    mesh, train = report.program.mesh, config.train
    rows = train.batch_size // (mesh["data"] * mesh["fsdp"])
    found = []
    # What the chips hold between steps does not depend on how a step computes.
    if sum(report.program.held.values()) < report.topology.chip.hbm_bytes:
        if config.model.remat != "full":
            found.append("--config.model.remat=full")
        more = [parts for parts in range(train.accumulate_steps + 1, rows + 1) if rows % parts == 0]
        if more:
            found.append(f"--config.train.accumulate_steps={more[0]}")
    if mesh["data"] > report.topology.slices:
        found.append(f"--config.mesh.data={report.topology.slices} --config.mesh.fsdp=-1")
    if config.optimizer.moments_dtype == "float32" and not config.lora.rank:
        found.append("--config.optimizer.moments_dtype=bfloat16")
    return [*found, _MORE_CHIPS]


def decoding_remedies(shape: DecodeShape, report: Report) -> list[str]:
    """What may make decoding smaller, the least costly first."""
    if report.program.held["parameters"] >= report.topology.chip.hbm_bytes:
        return ["a chip with more memory: the parameters alone are too large for this one"]
    rows, shares = shape.batch_size, report.program.mesh["data"] * report.program.mesh["fsdp"]
    half = rows // 2 // shares * shares if isinstance(rows, int) else 0
    fewer = [f"--batch_size={half}"] if half else []
    return [*fewer, "a smaller --gen_length or --compile_prompt_length", "a chip with more memory"]
