"""Runs programs that nobody has read: each alone, isolated by the Linux kernel, or not at all.

    outcome = run_program("assert 1 + 1 == 2")
    outcome.passed, outcome.result   # True, "passed"

A program sees system files and Python's read-only, an empty directory that vanishes with it, and processes of its own;
no network, no environment, no other file, no descriptor. It has no privileges and cannot gain any, is held to `Limits`,
and dies with all that it started at its wall limit, at its end, or when the evaluator dies.

Started by root, a program runs as a user that nobody else is, otherwise in a user namespace. Where the kernel or the
account denies something of this, `SandboxError` says what, and nothing runs.

A program passes when it ran to its end. That is for programs that fail, not for ones that cheat: one made to search the
interpreter it runs in can claim to have passed. What it cannot do is harm.
"""

import concurrent.futures
import dataclasses
import functools
import marshal
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from refusion_jax.config import ConfigError, require, require_minimum, require_types

_CHILD = Path(__file__).with_name("sandbox_child.py")
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/sandbox",
    "TMPDIR": "/sandbox",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
}
_PATIENCE_SECONDS = 120  # beyond the wall limit, for a machine under load
_REMEDY = (
    "run as root with CAP_SYS_ADMIN, or let ordinary users make user namespaces (sysctl user.max_user_namespaces, "
    "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns; in a container also its seccomp "
    "profile)"
)


class SandboxError(ConfigError):
    """Programs cannot be isolated here; the message names what was denied, and the remedy."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
      wall_seconds: from its start to its end; then all its processes are killed.
      cpu_seconds: of each process.
      memory_bytes: address space of each process, of which Python itself takes some 20 MiB.
      processes: processes and threads at a time, the program's own among them.
      file_bytes: size of a file.
      disk_bytes: size of all files together; they are in memory.
    """

    wall_seconds: float = 10.0
    cpu_seconds: int = 10
    memory_bytes: int = 1 << 30
    processes: int = 16
    file_bytes: int = 16 << 20
    disk_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        require_types("limits", self)
        require_minimum("limits", self, cpu_seconds=1, processes=1, file_bytes=0, disk_bytes=4096)
        require_minimum("limits", self, wall_seconds=0.1, memory_bytes=64 << 20)
        for field in dataclasses.fields(self):
            value, most = getattr(self, field.name), 1_000_000 if "bytes" not in field.name else 1 << 50
            require(value <= most, f"limits.{field.name} is {value!r}; it must be at most {most}.")

    @classmethod
    def lasting(cls, seconds: float) -> "Limits":
        """The defaults, for programs that may run so long.

        Raises:
          ConfigError: for a time that is none.
        """
        require(0 < seconds < math.inf, f"A program may run for {seconds!r} seconds; give a number above 0.")
        return cls(wall_seconds=seconds, cpu_seconds=max(1, math.ceil(seconds)))


DEFAULT_LIMITS = Limits()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program ended: `result` is "passed", "timed out", or "failed: " and why."""

    passed: bool
    result: str


def run_program(program: str, limits: Limits = DEFAULT_LIMITS) -> Outcome:
    """Runs the source text of a Python program in isolation.

    `sys.exit` and the like before the end of the text are failures whatever the status.

    Raises:
      SandboxError: when it cannot be isolated; nothing of it ran then.
    """
    request = {**dataclasses.asdict(limits), "program": program, "parent": os.getpid()}
    # Without the user's site-packages, which the program has no access to, and without the paths of this process.
    command = [getattr(sys, "_base_executable", sys.executable), "-s", "-S", "-P", str(_CHILD)]
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        ) as child:
            try:
                output, errors = child.communicate(marshal.dumps(request), limits.wall_seconds + _PATIENCE_SECONDS)
            finally:
                child.kill()  # with which all processes of the program die
    except subprocess.TimeoutExpired:
        raise SandboxError("A program's sandbox did not end in time; give the machine less to do.") from None
    except OSError as error:
        raise SandboxError(f"Generated code cannot be isolated here: {command[0]} does not start ({error}).") from error
    if child.returncode or not output:
        last = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise SandboxError(f"Generated code cannot be isolated here: its sandbox ended early ({last}).")
    kind, *answer = marshal.loads(output)
    if kind == "denied":
        raise SandboxError(f"Generated code cannot be isolated here: denied was {answer[0]}; {_REMEDY}.")
    return Outcome(*answer)


@functools.cache
def check_sandbox() -> None:
    """Runs a trivial program in isolation, once in a process if that succeeds.

    Raises:
      SandboxError: when that is not possible here.
    """
    if sys.platform != "linux":
        raise SandboxError(f"Generated code cannot be isolated on {sys.platform}; evaluate it on Linux.")
    prefix, home = Path(sys.base_prefix).resolve(), Path.home().resolve()
    if home.is_relative_to(prefix) and home != Path("/"):
        raise SandboxError(
            f"Generated code cannot be isolated here: Python's own directory {prefix} contains the home directory "
            f"{home}; use a Python that is installed elsewhere."
        )
    # Modules that Python has not loaded: they come from the files that a program sees.
    outcome = run_program("import _decimal, decimal, tempfile, heapq\ntempfile.TemporaryFile().close()")
    if not outcome.passed:
        raise SandboxError(
            f"Generated code cannot be isolated here: a trivial program {outcome.result}; every user must be able to "
            f"read {prefix}."
        )


def run_programs(
    programs: Sequence[str],
    limits: Limits = DEFAULT_LIMITS,
    workers: int | None = None,
    on_done: Callable[[int, Outcome], None] | None = None,
) -> list[Outcome]:
    """Runs programs side by side; returns their outcomes in order.

    Args:
      programs: source texts.
      limits: of each.
      workers: how many run at a time; by default as many as this process has cores.
      on_done: called with a program's index and outcome as soon as it ended, in the order of ends.

    Raises:
      SandboxError: when one cannot be isolated. ConfigError: for no worker.
    """
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    require(workers >= 1, f"workers is {workers}; it must be at least 1.")
    check_sandbox()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(run_program, program, limits): index for index, program in enumerate(programs)}
        try:
            for future in concurrent.futures.as_completed(futures):
                outcome = future.result()
                if on_done is not None:
                    on_done(futures[future], outcome)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]
