"""Real runs of `train.py`: killed, stopped and failing, on one process and on two with four devices each.

Processes are real, devices simulated; what goes between processes goes over loopback.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from free_address import free_address

import refusion_jax as rf
from refusion_jax.training.metrics import read_metrics

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STEPS = 40
SETTINGS = {
    "data.synthetic_examples": 120,
    "data.eval_examples": 8,
    "data.max_length": 96,
    "data.tokenizer_vocab_size": 64,
    "model.hidden_size": 32,
    "model.intermediate_size": 32,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 4,
    "model.num_key_value_heads": 2,
    "model.head_dim": 8,
    "model.max_position_embeddings": 160,
    "train.steps": STEPS,
    "train.batch_size": 8,
    "train.log_every": 1,
    "train.eval_every": 0,
    "train.eval_decode_examples": 0,
    "optimizer.learning_rate": 0.02,
    "optimizer.warmup_steps": 2,
    "checkpoint.save_every": 7,
    "decode.gen_length": 16,
    "decode.slot_size": 8,
}


class Job:
    """`train.py` on some processes of the same number of devices each, over eight devices in all or on one."""

    def __init__(self, workdir, processes=1, devices=8, **settings):
        self.workdir = workdir
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices // processes}",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "PYTHONPATH": str(ROOT),
        }
        given = SETTINGS | {name.replace("__", "."): value for name, value in settings.items()}
        command = [sys.executable, str(ROOT / "train.py"), f"--config={ROOT / 'configs' / 'demo.py'}"]
        command += [f"--workdir={workdir}", *(f"--config.{name}={value}" for name, value in given.items())]
        address = free_address()
        joined = [f"--num_processes={processes}", f"--coordinator_address={address}"] if processes > 1 else []
        self.processes = [
            subprocess.Popen(
                [*command, *joined, *([f"--process_id={index}"] if joined else [])],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for index in range(processes)
        ]

    def wait(self):
        """(exit statuses, what each process printed)."""
        printed = [process.communicate(timeout=240)[0] for process in self.processes]
        return [process.returncode for process in self.processes], printed

    def wait_for_step(self, step):
        """Waits until a step is on record."""
        deadline = time.monotonic() + 240
        while not any(record["step"] >= step for record in records(self.workdir)):
            assert all(process.poll() is None for process in self.processes), self.wait()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def kill(self):
        """Kills all. Their output ends with the last of the processes that have it, those that read data included."""
        for process in self.processes:
            process.kill()
        self.wait()


def records(workdir):
    return read_metrics(workdir) if (workdir / "metrics.jsonl").exists() else []


def losses(workdir):
    return np.array([record["loss"] for record in records(workdir)])


def trained(workdir, **settings):
    statuses, printed = Job(workdir, **settings).wait()
    assert set(statuses) == {0}, printed
    assert [record["step"] for record in records(workdir)] == list(range(1, STEPS + 1))
    return rf.load(workdir).params


def leaves(params):
    import jax

    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """An undisturbed run on one process with eight devices: its directory and parameters."""
    workdir = tmp_path_factory.mktemp("one") / "run"
    return workdir, trained(workdir, mesh__data=2, mesh__fsdp=-1, mesh__tensor=2)


def test_two_processes_give_the_curve_of_one(one_process, tmp_path):
    settings = {"mesh__data": 2, "mesh__fsdp": -1, "mesh__tensor": 2, "train__eval_decode_examples": 2}
    params = trained(tmp_path / "run", processes=2, **settings)
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(one_process[0]), rtol=1e-5)
    ours, theirs = records(tmp_path / "run")[-1], records(one_process[0])[-1]
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-4)
    assert ours["tokens_per_forward"] > 0
    for leaf, other in zip(leaves(params), leaves(one_process[1]), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-4)


def test_killed_runs_end_as_if_nothing_had_happened(tmp_path):
    """Killed twice at a random moment, with worker processes reading packed rows: the same parameters, bit for bit."""
    settings = {"devices": 1, "data__workers": 1}
    expected = leaves(trained(tmp_path / "whole", **settings))
    moments = random.Random()
    for first, last in ((2, 15), (16, 35)):
        job = Job(tmp_path / "killed", **settings)
        job.wait_for_step(moments.randint(first, last))
        time.sleep(moments.random() * 0.05)
        job.kill()
    assert len(records(tmp_path / "killed")) < STEPS
    got = leaves(trained(tmp_path / "killed", **settings))
    assert all(map(np.array_equal, got, expected))
    assert (losses(tmp_path / "killed") == losses(tmp_path / "whole")).all()


def test_a_run_of_two_processes_goes_on_with_one(one_process, tmp_path):
    job = Job(tmp_path / "run", processes=2, mesh__data=2, mesh__fsdp=-1, mesh__tensor=2)
    job.wait_for_step(20)
    job.kill()
    params = trained(tmp_path / "run", mesh__data=2, mesh__fsdp=-1, mesh__tensor=2)
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(one_process[0]), rtol=1e-5)
    for leaf, other in zip(leaves(params), leaves(one_process[1]), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-5)


def test_sigterm_of_any_process_saves_and_ends_all(one_process, tmp_path):
    workdir = tmp_path / "run"
    job = Job(workdir, processes=2, mesh__data=2, mesh__fsdp=-1, mesh__tensor=2)
    job.wait_for_step(10)
    job.processes[1].send_signal(signal.SIGTERM)
    statuses, printed = job.wait()
    assert statuses == [0, 0], printed
    assert "Stopped by SIGTERM after step " in printed[0]
    stopped = int(printed[0].partition("after step ")[2].split()[0])
    assert stopped < STEPS
    assert str(stopped) in os.listdir(workdir / "checkpoints")
    trained(workdir, mesh__data=8, mesh__fsdp=1)
    np.testing.assert_allclose(losses(workdir), losses(one_process[0]), rtol=1e-4)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_single_process_saves_before_it_stops(number, status, tmp_path):
    job = Job(tmp_path / "run", devices=1)
    job.wait_for_step(9)
    job.processes[0].send_signal(number)
    statuses, printed = job.wait()
    assert statuses == [status]
    assert f"Stopped by {signal.Signals(number).name} after step " in printed[0]
    assert "The same command continues." in printed[0]
    stopped = printed[0].partition("after step ")[2].split()[0]
    assert stopped in os.listdir(tmp_path / "run" / "checkpoints")


def test_an_interrupt_of_one_process_ends_all(tmp_path):
    job = Job(tmp_path / "run", processes=2, mesh__data=2)
    job.wait_for_step(2)
    job.processes[1].send_signal(signal.SIGINT)
    statuses, printed = job.wait()
    assert statuses == [2, 130], printed
    assert "error: process 1 of 2 failed: " in printed[0]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB, and what makes it larger."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if subprocess.run(options, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield disk, lambda: subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    subprocess.run(["umount", "-l", str(disk)], check=True)


def check_one_sentence(printed):
    """Nothing of ours has a traceback; threads of libraries may have printed theirs before."""
    assert f'File "{ROOT / "refusion_jax"}' not in printed
    errors = [line for line in printed.splitlines() if "error: " in line]
    assert len(errors) == 1 and "cannot be written" in errors[0] and "No space left on device" in errors[0], printed


def test_a_full_disk_ends_all_processes(small_disk):
    disk, _ = small_disk
    settings = {"checkpoint__keep": 40, "checkpoint__save_every": 1, "mesh__data": 2}
    statuses, printed = Job(disk / "run", processes=2, **settings).wait()
    assert statuses == [2, 2], printed
    assert any("error: " in text and "cannot be written" in text for text in printed)
    assert any("No space left on device" in text for text in printed)


def test_a_full_disk_ends_a_run_cleanly(small_disk, tmp_path):
    disk, enlarge = small_disk
    settings = {"devices": 1, "checkpoint__keep": 40, "checkpoint__save_every": 1}
    statuses, printed = Job(disk / "run", **settings).wait()
    assert statuses == [2], printed
    check_one_sentence(printed[0])
    saved = [int(name) for name in os.listdir(disk / "run" / "checkpoints") if name.isdecimal()]
    assert saved and max(saved) < STEPS
    statuses, printed = Job(disk / "run", **settings).wait()  # still full
    assert statuses == [2], printed
    check_one_sentence(printed[0])
    enlarge()
    params = trained(disk / "run", **settings)
    expected = trained(tmp_path / "whole", **settings)
    assert all(map(np.array_equal, leaves(params), leaves(expected)))
