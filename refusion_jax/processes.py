"""Being one of several processes, failing together, and being interrupted."""

import contextlib
import dataclasses
import glob
import importlib.util
import os
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from absl import flags
from jax._src import distributed  # the only way to the processes' shared keys and values
from orbax.checkpoint import multihost

from refusion_jax.config import ConfigError

PROCESS_FLAGS = ("num_processes", "process_id", "coordinator_address")
_SHUTDOWN_SECONDS = 30
_FAULT_KEY = "refusion_jax/fault"
_FAULT_WAIT_SECONDS = 5.0  # for the others to have read it
_POLL_SECONDS = 0.5
_SERVICE_SECONDS = 2.0  # process 0 has the service; those that lose it before they end are aborted
_BARRIER_MILLISECONDS = 30 * 24 * 3600 * 1000  # shares may take days and finish far apart


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM came."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number


class Signals:
    """Makes SIGINT and SIGTERM raise `Interrupted` in a `with` block: at once, or at the next `check` while `waiting`.

    While answers are decoded they wait: Python swallows what is raised while it collects garbage, which is then the
    likeliest time. A second signal never waits.
    """

    def __init__(self) -> None:
        self._came: int | None = None
        self._before: dict[int, Any] = {}
        self.waiting = False

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():  # which alone may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._raise)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _raise(self, number: int, frame: types.FrameType | None) -> None:
        is_second, self._came = self._came is not None, number
        if is_second or not self.waiting:
            self.check()

    def check(self) -> None:
        """Raises if a signal came.

        Raises:
          Interrupted: then.
        """
        if self._came is not None:
            raise Interrupted(self._came)


@dataclasses.dataclass(frozen=True)
class Process:
    """Which of the processes that share the input this is. A line belongs to process `line % count`."""

    id: int = 0
    count: int = 1

    def has(self, line: int) -> bool:
        return line % self.count == self.id

    def of(self, states: bytearray | np.ndarray) -> Any:
        """The part, of what is known by line, that this process has."""
        return states[self.id :: self.count]


ALONE = Process()


def define_processes(flag_values: flags.FlagValues) -> None:
    """Defines the flags that `join_processes` reads."""
    flags.DEFINE_integer(
        "num_processes", None, "How many processes work together.", lower_bound=1, flag_values=flag_values
    )
    flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.", lower_bound=0, flag_values=flag_values)
    flags.DEFINE_string(
        "coordinator_address", None, "HOST:PORT of process 0, for all of them.", flag_values=flag_values
    )


def join_processes(args: flags.FlagValues) -> Process:
    """Connects to the other processes; for before anything else uses JAX.

    Without flags it connects to those that a TPU pod, Slurm or Open MPI started together.

    Raises:
      ConfigError: for flags that do not fit each other.
    """
    given = [name for name in PROCESS_FLAGS if args[name].value is not None]
    if not given:
        return _join_cluster() if _in_cluster() else ALONE
    if len(given) < len(PROCESS_FLAGS):
        missing = next(name for name in PROCESS_FLAGS if name not in given)
        raise ConfigError(f"--{given[0]} is given without --{missing}; processes that share the input need all three.")
    if args.process_id >= args.num_processes:
        raise ConfigError(
            f"--process_id is {args.process_id}; with --num_processes={args.num_processes} it must lie in "
            f"[0, {args.num_processes})."
        )
    host, _, port = args.coordinator_address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"--coordinator_address is {args.coordinator_address!r}; give HOST:PORT, as in 10.0.0.1:1234."
        )
    jax.distributed.initialize(
        args.coordinator_address,
        args.num_processes,
        args.process_id,
        # One that is interrupted need not wait long for those that are not.
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
    )
    return Process(args.process_id, args.num_processes)


def _in_cluster() -> bool:
    """Whether something started several processes together, or might have: a TPU host cannot tell without asking."""
    tasks = (os.environ.get(name, "1") for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"))
    on_tpu = bool(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"))
    return any(number.isdecimal() and int(number) > 1 for number in tasks) or (
        on_tpu and importlib.util.find_spec("libtpu") is not None
    )


def _join_cluster() -> Process:
    jax.distributed.initialize()
    return Process(jax.process_index(), jax.process_count())


@contextlib.contextmanager
def failing_together(process: Process) -> Iterator[None]:
    """Ends all processes when one fails in the block, each with that one's error, instead of waiting for it forever.

    The process that fails ends with status 2 for bad input, 130 when it is interrupted, else 1; the others with 2.
    """
    if process.count == 1:
        yield
        return
    watch = threading.Thread(target=_watch_for_fault, args=(process,), daemon=True)
    watch.start()
    try:
        yield
    except BaseException as error:
        ours = type(error).__module__.partition(".")[0] == __name__.partition(".")[0]
        if not ours:
            traceback.print_exc()
        sentence = " ".join(str(error).split()) or type(error).__name__
        _tell_others(process, sentence)
        print(f"error: {sentence}", file=sys.stderr, flush=True)
        # Not `sys.exit`: at the interpreter's end JAX would wait for processes that are gone.
        os._exit(2 if ours else 130 if isinstance(error, KeyboardInterrupt) else 1)


def _tell_others(process: Process, sentence: str) -> None:
    """Says what failed, and gives the others a while to read it."""
    client: Any = distributed.global_state.client
    deadline = time.monotonic() + _FAULT_WAIT_SECONDS
    # Another process may have failed first, and ended the service.
    with contextlib.suppress(Exception):
        client.key_value_set(_FAULT_KEY, f"{process.id} {sentence}")
    readers = 0
    while readers < process.count - 1 and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS / 5)
        with contextlib.suppress(Exception):  # as long as nobody has
            readers = len(client.key_value_dir_get(f"{_FAULT_KEY}_read/"))


def _watch_for_fault(process: Process) -> None:
    """Ends this process as soon as another has failed."""
    while True:
        time.sleep(_POLL_SECONDS)
        try:
            client = distributed.global_state.client
            if client is None:
                return
            found = client.key_value_try_get(_FAULT_KEY)
        except Exception:  # there is none, or no service any more
            continue
        culprit, _, sentence = found.partition(" ")
        if int(culprit) == process.id:
            return
        print(f"error: process {culprit} of {process.count} failed: {sentence}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            client.key_value_set(f"{_FAULT_KEY}_read/{process.id}", "1")
        if process.id == 0:
            time.sleep(_SERVICE_SECONDS)
        os._exit(2)


def wait_for_all(process: Process, name: str) -> None:
    """Waits until every process has come here, however long that takes.

    Raises:
      ConfigError: when another process ended before.
    """
    if process.count == 1:
        return
    # Not `sync_global_devices`: as a computation on devices it gives up on a process that is half a minute late.
    barrier, errors = multihost.get_barrier_sync_fn(), []

    def wait() -> None:
        try:
            barrier(key=f"refusion_jax.decode.{name}", timeout_ms=_BARRIER_MILLISECONDS)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)  # signals come between calls, of which this is one
    thread.start()
    while thread.is_alive():
        thread.join(0.5)
    if errors:
        raise ConfigError("Another process ended before its share was answered; run all of them again.") from errors[0]
