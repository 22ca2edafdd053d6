"""What is printed of a compiled program, and what is said of one that is too large."""

import collections
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import types

import jax
import pytest

from refusion_jax.compilation import commands
from refusion_jax.compilation.cost import Cost
from refusion_jax.compilation.programs import AbstractProgram
from refusion_jax.compilation.report import Report, bounds, compile_program, describe, needed_bytes, summary
from refusion_jax.compilation.topologies import read_topology

TOPOLOGY = read_topology("v5e:2x2")
LIMIT = TOPOLOGY.chip.hbm_bytes
HELD = {"parameters": 100, "optimizer": 200}


def program(compiled=None, held=HELD, data=1, fsdp=4):
    mesh = {"data": data, "fsdp": fsdp, "tensor": 1}
    return AbstractProgram("training step", compiled, mesh, held, 512, 4 * 197 * 10**10, ())


def report(bytes=819 * 10**7, **settings):
    cost = Cost(2 * 197 * 10**10, bytes, collections.Counter({"all-gather": 300}))
    return Report(program(**settings), TOPOLOGY, 2.0, {**settings.get("held", HELD), "program": 50}, cost, "splash")


def test_bounds_follow_the_slower_of_arithmetic_and_memory():
    found = bounds(report())
    assert found["compute_seconds"] == pytest.approx(0.02)
    assert found["memory_seconds"] == pytest.approx(0.01)
    assert found["flops_ratio"] == pytest.approx(2)
    assert found["utilisation"] == pytest.approx(0.5)
    assert found["tokens_per_second"] == pytest.approx(512 / 0.02)
    slower = bounds(report(bytes=4 * 819 * 10**7))
    assert slower["utilisation"] == pytest.approx(0.25)
    assert slower["tokens_per_second"] == pytest.approx(512 / 0.04)


def test_the_summary_has_every_figure():
    found = summary(TOPOLOGY, [report()])
    assert json.loads(json.dumps(found)) == found
    assert (found["topology"], found["chips"], found["fits"]) == ("v5e:2x2", 4, True)
    assert found["mesh"] == {"data": 1, "fsdp": 4, "tensor": 1}
    assert (found["hbm_bytes_per_chip"], found["hbm_limit_bytes"]) == (350, LIMIT)
    assert (found["bytes_per_chip"], found["tokens_per_step"], found["flops_ratio"]) == (819 * 10**7, 512, 2)
    assert found["collective_bytes_per_chip"] == {"all-gather": 300}


def test_what_moves_is_compared_with_what_has_to():
    assert {"bytes_ratio", "collectives_ratio"}.isdisjoint(bounds(report()))
    given = report()
    given = dataclasses.replace(
        given, program=dataclasses.replace(given.program, least_collectives=250, least_bytes=10**9)
    )
    assert bounds(given)["collectives_ratio"] == pytest.approx(1.2)
    assert bounds(given)["bytes_ratio"] == pytest.approx(8.19)
    found, text = summary(TOPOLOGY, [given]), "\n".join(describe(given))
    assert (found["collectives_ratio"], found["bytes_ratio"]) == (1.2, 8.19)
    assert "8.19 times parameters and KV buffer" in text
    assert "1.20 times two gathers of the parameters and one scatter of the gradients" in text


def test_the_lines_name_kinds_of_memory_and_the_peaks_used():
    text = "\n".join(describe(report()))
    for part in (
        "parameters",
        "optimizer",
        "splash",
        "all-gather",
        "fits",
        "2.000 times the model's",
        "197 TFLOP/s",
        "819 GB/s",
    ):
        assert part in text


MEMORY = types.SimpleNamespace(
    argument_size_in_bytes=330, output_size_in_bytes=340, alias_size_in_bytes=300, temp_size_in_bytes=1000,
    generated_code_size_in_bytes=7,
)  # fmt: skip


def test_memory_is_what_the_compiler_says_by_kind():
    text = "ENTRY %main (a: f32[]) -> f32[] {\n  ROOT %a = f32[] parameter(0)\n}\n"
    compiled = types.SimpleNamespace(as_text=lambda: text, memory_analysis=lambda: MEMORY)
    found = compile_program(program(lambda: compiled), TOPOLOGY)
    assert found.memory == {
        "parameters": 100,
        "optimizer": 200,
        "other arguments": 30,
        "results": 40,
        "gradients, activations, temporaries": 1000,
        "program": 7,
    }
    assert found.hbm_bytes == 1377


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (240.00G) "
            "exceeds available HBM (15.75G).",
            240 * 2**30,
        ),
        (
            "Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm.",
            41 * 2**29,
        ),
        ("INVALID_ARGUMENT: something else", None),
    ],
)
def test_the_compilers_message_tells_how_much_is_needed(message, needed):
    assert needed_bytes(message) == needed


def test_another_error_of_the_compiler_is_no_matter_of_memory():
    def fails():
        raise jax.errors.JaxRuntimeError("INTERNAL: no")

    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        compile_program(program(fails), TOPOLOGY)


def test_what_does_not_fit_is_said_in_a_sentence_with_two_remedies(capsys):
    def fails():
        raise jax.errors.JaxRuntimeError("Used 20.00G of 15.75G hbm. Exceeded hbm capacity by 4.25G.")

    status = commands._compile(TOPOLOGY, [program(fails)], lambda report: ["--a=1", "--b=2", "--c=3"])
    lines = capsys.readouterr().out.splitlines()
    assert status == 1
    assert lines[-2] == "The training step needs 4.56 GB more than a chip has; try --a=1, or --b=2."
    found = json.loads(lines[-1])
    assert (found["fits"], found["hbm_bytes_per_chip"], found["flops_ratio"]) == (False, 20 * 2**30, None)


def test_a_compiler_that_dies_is_said_in_a_sentence(tmp_path):
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, sys\nfrom refusion_jax.compilation.commands import _in_child\nsys.exit(_in_child(os.abort))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: The TPU compiler itself failed (SIGABRT)")


WAITS = """
import os, sys, time
from refusion_jax.compilation.commands import _in_child

def work():
    print(flush=True)
    time.sleep(60)
    return 0

sys.exit(_in_child(work))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_compiling_process_ends_with_the_one_that_started_it(number):
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        parent.stdout.readline()
        os.kill(parent.pid, number)
        began = time.monotonic()
        # The pipe ends when both processes are gone that may write to it.
        assert parent.stdout.read() == b""
        assert time.monotonic() - began < 30
        assert parent.wait() != 0
