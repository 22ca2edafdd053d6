"""Being one of several processes, and being interrupted."""

import dataclasses
import signal
import threading
import types
from typing import Any

import jax
import numpy as np
from absl import flags
from orbax.checkpoint import multihost

from refusion_jax.config import ConfigError

_SHUTDOWN_SECONDS = 30
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


def join_processes(args: flags.FlagValues) -> Process:
    """Connects to the other processes; for before anything else uses JAX."""
    names = ("num_processes", "process_id", "coordinator_address")
    given = [name for name in names if args[name].value is not None]
    if not given:
        return ALONE
    if len(given) < len(names):
        missing = next(name for name in names if name not in given)
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
