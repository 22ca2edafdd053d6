"""Stopping when asked to, and noticing a step that hangs."""

import os
import signal
import threading

import pytest

from refusion_jax.training import guard
from refusion_jax.training.guard import StopRequest, Watchdog


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_the_handlers_come_back(number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.after(1) is None
        os.kill(os.getpid(), number)
        assert stop.after(2) == number
        assert stop.after(3) == number
    assert signal.getsignal(number) is before


def test_a_second_interrupt_does_not_wait():
    with StopRequest() as stop, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.after(1) == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)
        stop.after(2)


def test_threads_other_than_the_main_one_leave_handlers_alone():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def run():
        with StopRequest() as stop:
            seen.append((signal.getsignal(signal.SIGTERM), stop.after(1)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(before, None)]


def test_several_processes_ask_the_others(monkeypatch):
    asked = []

    def reached(step):
        asked.append(step)
        return step == 3

    monkeypatch.setattr(guard.jax, "process_count", lambda: 2)
    monkeypatch.setattr(guard.multihost_utils, "reached_preemption_sync_point", reached)
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert signal.getsignal(signal.SIGTERM) is before
        assert [stop.after(step) for step in (1, 2, 3)] == [None, None, signal.SIGTERM]
    assert asked == [1, 2, 3]


class Reports:
    """Collects what a watchdog says; `wait` for the next."""

    def __init__(self):
        self.lines, self._came = [], threading.Semaphore(0)

    def __call__(self, line):
        self.lines.append(line)
        self._came.release()

    def wait(self):
        return self._came.acquire(timeout=10)


@pytest.fixture
def reports(monkeypatch):
    monkeypatch.setattr(guard, "_LEAST_SLOW_SECONDS", 0.05)
    return Reports()


def test_a_slow_step_is_reported_once_while_it_runs(reports):
    watchdog = Watchdog(3.0, reports)
    for step in range(1, 8):
        watchdog.begin(step)
    assert reports.wait()
    assert reports.lines[0].startswith("Step 7 has been running for 0.")
    assert "on process 0; the steps before took 0.00 s." in reports.lines[0]
    watchdog.begin(8)
    assert reports.wait()
    watchdog.close()
    assert [line.split()[1] for line in reports.lines] == ["7", "8"]


def test_nothing_is_slow_without_steps_before_or_while_paused(reports):
    watchdog = Watchdog(3.0, reports)
    watchdog.begin(1)
    assert watchdog._limit() is None
    watchdog.begin(2)
    watchdog.pause()
    assert watchdog._limit() is None
    watchdog.begin(3)
    assert watchdog._limit() == pytest.approx(0.05)
    watchdog.close()
    assert not watchdog._thread.is_alive()
