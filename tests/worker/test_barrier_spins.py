"""How long OpenMP's threads spin, by the real libgomp and what the kernel counts of a process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from worker.model_servers import llama_server
from worker.model_servers.llama_server import BarrierSpins, waiting_ns

PROCESSORS = len(os.sched_getaffinity(0))
TEAM = """
import ctypes, os, sys, threading, time, types

sys.path.append(sys.argv[1])
import llama_server

libgomp, libc = ctypes.CDLL("libgomp.so.1"), ctypes.CDLL(None)
processors = len(os.sched_getaffinity(0))
at_work = ctypes.create_string_buffer(32)


def team():
    while True:
        libgomp.GOMP_parallel(libc.sem_wait, at_work, processors, 0)
        done.set()


def spun_s():
    # All but one thread of the team wait at the barrier for the last one.
    done.clear()
    before = time.process_time()
    for _ in range(processors - 1):
        libc.sem_post(at_work)
    time.sleep(0.4)
    spun = time.process_time() - before
    libc.sem_post(at_work)
    done.wait()
    return spun


def adapt(waiting):
    adapt.clock += 1_000
    adapt.waiting += int(1_000 * waiting)
    spins.adapt()


adapt.clock = adapt.waiting = 0
llama_server.time = types.SimpleNamespace(
    monotonic_ns=lambda: adapt.clock, process_time_ns=lambda: adapt.clock
)
llama_server.waiting_ns = lambda: adapt.waiting
done = threading.Event()
threading.Thread(target=team, daemon=True).start()
spins = llama_server.BarrierSpins(llama_server.loaded_libgomp(), processors)


def reaches(does_spin):
    # The second team starts and ends a moment after ``adapt`` has returned.
    return any((spun_s() > 0.03) == does_spin for _ in range(10))


for _ in range(2):
    found = [reaches(True)]
    adapt(0.9)
    found.append(reaches(False))
    for _ in range(3):
        adapt(0.1)
    found.append(spun_s() < 0.03)
    adapt(0.1)
    print(*found)
"""


@pytest.mark.skipif(PROCESSORS < 2, reason="a team has one thread here")
def test_threads_spin_while_processors_are_free() -> None:
    """By their processor time: the second team must count for libgomp, and must go again."""
    found = subprocess.run(
        [sys.executable, "-I", "-c", TEAM, str(Path(str(llama_server.__file__)).parent)],
        env={"GOMP_SPINCOUNT": "1000000000"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout == "True True True\n" * 2


def test_an_idle_process_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic_ns=iter([0, 1_000]).__next__, process_time_ns=lambda: 0)
    monkeypatch.setattr(f"{llama_server.__name__}.time", clock)
    monkeypatch.setattr(llama_server, "waiting_ns", iter([0]).__next__)
    BarrierSpins(ctypes.CDLL(None), 2).adapt()  # It would ask for the waiting time again.


def test_the_kernel_counts_the_waits_of_all_threads() -> None:
    assert llama_server.has_waiting_ns()
    before, ends = waiting_ns(), threading.Event()

    def spin() -> None:
        while not ends.is_set():
            sum(range(10_000))

    threads = [threading.Thread(target=spin) for _ in range(3)]
    for thread in threads:
        thread.start()
    ends.wait(0.2)
    # The time of a thread that has ended is not counted any more.
    assert waiting_ns() > before
    ends.set()
    for thread in threads:
        thread.join()
