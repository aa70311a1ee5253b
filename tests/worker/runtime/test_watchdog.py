"""A process whose engine stands still ends itself, even while no thread of Python's can run."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

PROCESS = """
import ctypes, os, threading, time
from worker.engines.step_clock import StepClock
from worker.runtime import watchdog

watchdog._TICK_S, watchdog._GRACE_S = 0.05, 0.3
clock = StepClock()
step = clock.counted(lambda chunk: False)
steps = lambda: {{}} if clock.steps is None else {{"m": clock.steps}}
watchdog.Watchdog(steps, lambda model: os._exit(7), {stall_s}).start()

def frozen():
    with clock.running():
        time.sleep(60)

def going():
    with clock.running():
        for _ in range(50):
            time.sleep(0.1)
            step(b"")

def locked():
    with clock.running():
        time.sleep(0.2)
        ctypes.PyDLL(None).sleep(60)  # Holds Python's lock.

{what}()
"""


def _status(what: str, stall_s: float) -> int:
    code = PROCESS.format(what=what, stall_s=stall_s)
    return subprocess.run([sys.executable, "-c", code], timeout=200, check=False).returncode


def test_an_engine_that_stands_still_ends_the_process() -> None:
    assert _status("frozen", 1) == 7


def test_so_does_one_that_keeps_python_from_running() -> None:
    started = time.monotonic()
    assert _status("locked", 1) == 1
    assert time.monotonic() - started < 50


@pytest.mark.parametrize(("what", "stall_s"), [("going", 3), ("frozen() if 0 else print", 1)])
def test_one_that_goes_on_or_has_nothing_to_do_is_left_alone(what: str, stall_s: float) -> None:
    assert _status(what, stall_s) == 0
