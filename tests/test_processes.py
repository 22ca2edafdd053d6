"""Finding the other processes, and failing together with them."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from absl import flags
from free_address import free_address

from refusion_jax import processes
from refusion_jax.config import ConfigError

ROOT = Path(__file__).parents[1]


@pytest.fixture
def parse(monkeypatch):
    """Parses the flags and joins; what `jax.distributed.initialize` was called with goes to `parse.calls`."""
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processes.glob, "glob", lambda pattern: [])

    def parse(*arguments):
        values = flags.FlagValues()
        processes.define_processes(values)
        values(["", *arguments])
        return processes.join_processes(values)

    parse.calls = []
    monkeypatch.setattr(processes.jax.distributed, "initialize", lambda *given, **_: parse.calls.append(given))
    return parse


def test_a_process_on_its_own_joins_nobody(parse):
    assert parse() == processes.ALONE
    assert parse.calls == []


def test_flags_name_the_others(parse):
    joined = parse("--num_processes=3", "--process_id=1", "--coordinator_address=10.0.0.1:1234")
    assert joined == processes.Process(1, 3)
    assert parse.calls == [("10.0.0.1:1234", 3, 1)]


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"])
def test_what_started_several_processes_tells_who_they_are(name, parse, monkeypatch):
    monkeypatch.setenv(name, "1")
    parse()
    assert parse.calls == []
    monkeypatch.setenv(name, "4")
    assert parse() == processes.Process(0, 1)
    assert parse.calls == [()]


def test_hosts_of_a_tpu_ask(parse, monkeypatch):
    monkeypatch.setattr(processes.glob, "glob", lambda pattern: ["/dev/accel0"] if "accel" in pattern else [])
    monkeypatch.setattr(processes.importlib.util, "find_spec", lambda name: None)
    parse()
    assert parse.calls == []
    monkeypatch.setattr(processes.importlib.util, "find_spec", lambda name: object())
    parse()
    assert parse.calls == [()]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--num_processes=2"], "--num_processes is given without --process_id"),
        (["--num_processes=2", "--process_id=2", "--coordinator_address=a:1"], r"--process_id is 2; .* in \[0, 2\)"),
        (["--num_processes=2", "--process_id=0", "--coordinator_address=a"], "--coordinator_address is 'a'; give HOST"),
    ],
)
def test_flags_that_do_not_fit_are_refused(arguments, sentence, parse):
    with pytest.raises(ConfigError, match=sentence):
        parse(*arguments)


def test_one_process_fails_as_ever():
    with pytest.raises(KeyError), processes.failing_together(processes.ALONE):
        raise KeyError("x")


FAILING = textwrap.dedent(
    """
    import sys, time
    import jax
    from refusion_jax.config import ConfigError
    from refusion_jax.processes import Process, failing_together

    index, address = int(sys.argv[1]), sys.argv[2]
    jax.distributed.initialize(address, 2, index)
    with failing_together(Process(index, 2)):
        if index == CULPRIT:
            raise ERROR("the disk\\nis full.")
        time.sleep(60)
    """
)


@pytest.mark.parametrize(
    ("culprit", "error", "status"), [(0, "ConfigError", 2), (1, "ConfigError", 2), (1, "RuntimeError", 1)]
)
def test_all_end_with_the_error_of_the_one_that_failed(culprit, error, status):
    address = free_address()
    script = FAILING.replace("CULPRIT", str(culprit)).replace("ERROR", error)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    both = [
        subprocess.Popen([*command, str(index), address], env=environment, stderr=subprocess.PIPE, text=True)
        for index in range(2)
    ]
    printed = [process.communicate(timeout=60)[1] for process in both]
    assert [both[culprit].returncode, both[1 - culprit].returncode] == [status, 2], printed
    assert "error: the disk is full.\n" in printed[culprit]
    assert ("Traceback" in printed[culprit]) == (error == "RuntimeError")
    assert f"error: process {culprit} of 2 failed: the disk is full.\n" in printed[1 - culprit]
    assert both[1 - culprit].returncode != -signal.SIGABRT
