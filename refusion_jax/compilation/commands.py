"""What `--compile_for` does: compiles, prints, and says what would make a program fit that does not."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence

from refusion_jax.compilation.programs import (
    VOCAB_MULTIPLE,
    AbstractProgram,
    DecodeShape,
    decode_programs,
    known_vocabulary,
    train_program,
)
from refusion_jax.compilation.remedies import decoding_remedies, training_remedies
from refusion_jax.compilation.report import GB, Report, compile_program, describe, summary
from refusion_jax.compilation.topologies import Topology, read_topology, require_compiler, topology_devices
from refusion_jax.config import Config
from refusion_jax.files import writing_out
from refusion_jax.sharding import decoding_mesh

_MOST_REMEDIES = 2


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
        return _compile(topology, programs, lambda report: decoding_remedies(model, shape, report))

    return _in_child(work)


def _in_child(work: Callable[[], int]) -> int:
    """Does the work in a process of its own, since a compiler that fails may take its process with it.

    However this process ends, the other one ends too.
    """
    with writing_out():
        sys.stdout.flush()
    # The system closes `held` with the process that has it, even one that is killed.
    watched, held = os.pipe()
    child = os.fork()
    if not child:
        os.close(held)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both; the parent ends for it
        threading.Thread(target=_end_after, args=(watched,), daemon=True).start()
        return work()
    os.close(watched)
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(held)
    if code >= 0:
        return code
    print(
        f"error: The TPU compiler itself failed ({signal.Signals(-code).name}), which is no fault of the settings; "
        "others, such as another batch size, may not meet it.",
        file=sys.stderr,
    )
    return 2


def _end_after(watched: int) -> None:
    """Ends this process when the other end of a pipe is closed, in the middle of whatever it does."""
    os.read(watched, 1)
    os._exit(1)


def _with_vocabulary(config: Config) -> Config:
    known = known_vocabulary(config)
    if known is not config:
        _say(
            f"model.vocab_size is 0, the tokenizer's: taken as {known.model.vocab_size:,}, data.tokenizer_vocab_size "
            f"rounded up to a multiple of {VOCAB_MULTIPLE}."
        )
    return known


def _compile(topology: Topology, programs: Sequence[AbstractProgram], remedies: Callable[[Report], list[str]]) -> int:
    _say(f"{topology.name}: {topology.chips} chips. Compiling takes minutes for a large model.")
    reports = []
    for program in programs:
        report = compile_program(program, topology)
        reports.append(report)
        _say("\n".join(describe(report)))
        if not report.fits:
            excess = (report.hbm_bytes - topology.chip.hbm_bytes) / GB
            _say(
                f"The {program.name} needs {excess:.2f} GB more than a chip has; try "
                f"{', or '.join(remedies(report)[:_MOST_REMEDIES])}."
            )
    result = summary(topology, reports)
    _say(json.dumps(result))
    return 0 if result["fits"] else 1


def _say(text: str) -> None:
    with writing_out():
        print(text, flush=True)
