"""What keeps a run of weeks from being lost: stopping when asked to, and saying when a step hangs."""

import contextlib
import signal
import statistics
import threading
import time
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import multihost_utils

_REMEMBERED = 50  # steps
_LEAST_SLOW_SECONDS = 1.0


class StopRequest:
    """Notices SIGTERM and SIGINT in a `with` block, so that a run saves and ends instead of being killed.

    A single process stops after the step under way. Of several, any one's SIGTERM makes all agree on a step; their
    SIGINT is not caught. A second SIGINT does not wait.
    """

    def __init__(self) -> None:
        self._came: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        # Among several processes JAX itself listens for SIGTERM, and tells the others.
        if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        if self._came == number == signal.SIGINT:
            raise KeyboardInterrupt
        self._came = number

    def after(self, step: int) -> int | None:
        """The signal for which the run is to stop after `step`, if any; to be asked after every step."""
        if jax.process_count() > 1:
            return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else None
        return self._came


class Watchdog:
    """Reports a step that takes much longer than those before it, while it is still going on.

    Args:
      factor: how many times the median of the latest steps is too long; never less than a second.
      say: called with the report.
    """

    def __init__(self, factor: float, say: Callable[[str], None]):
        self._factor, self._say = factor, say
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._step, self._began = 0, 0.0
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def begin(self, step: int) -> None:
        """A step begins, and with it the one before has ended."""
        self._set(step)

    def pause(self) -> None:
        """No step is under way: what follows, such as an evaluation, takes as long as it takes."""
        self._set(0)

    def _set(self, step: int) -> None:
        now = time.monotonic()
        with self._changed:
            if self._step:
                self._seconds.append(now - self._began)
            self._step, self._began = step, now
            self._changed.notify()

    def _limit(self) -> float | None:
        if not self._step or not self._seconds:
            return None
        return max(self._factor * statistics.median(self._seconds), _LEAST_SLOW_SECONDS)

    def _watch(self) -> None:
        reported = 0
        while True:
            with self._changed:
                limit = self._limit() if self._step != reported else None
                passed = time.monotonic() - self._began
                if limit is None or passed < limit:
                    self._changed.wait(None if limit is None else limit - passed)
                    if self._closed:
                        return
                    continue
                reported, usual = self._step, statistics.median(self._seconds)
            with contextlib.suppress(OSError, ValueError):  # nobody listens any more
                self._say(
                    f"Step {reported:,} has been running for {passed:.1f} s on process {jax.process_index()}; "
                    f"the steps before took {usual:.2f} s."
                )

    def close(self) -> None:
        """Ends the watch."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
