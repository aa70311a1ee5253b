"""The faults: what is killed, stopped, frozen, emptied or cut in a stack of ``manage.py serve``."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from tests.faults.freezing import frozen, frozen_postgres
from tests.faults.matrix import surroundings
from tests.served_stack import ROOT, ServedStack

_FROZEN_S = 5.0
_LONG_S = 15.0
"""Longer than it takes to give up a dead worker, and to start another."""
Fault = Callable[[ServedStack], None]


def _sends(process: str, number: signal.Signals) -> Fault:
    def act(stack: ServedStack) -> None:
        os.kill(stack.pid_of(process), number)

    return act


def _freezes(process: str) -> Fault:
    def act(stack: ServedStack) -> None:
        with frozen(stack.pid_of(process)):
            time.sleep(_FROZEN_S)

    return act


def _freezes_postgres(stack: ServedStack) -> None:
    with frozen_postgres(stack):
        time.sleep(_FROZEN_S)


def _kills_postgres(stack: ServedStack) -> None:
    os.kill(stack.postgres_pid(), signal.SIGQUIT)


def _cuts_connections(stack: ServedStack) -> None:
    stack.sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
    )


def _empties_redis(stack: ServedStack) -> None:
    with stack.redis() as redis:
        redis.flushall()


def _kills_worker_without_beat(stack: ServedStack) -> None:
    with frozen(stack.pid_of("beat")):
        os.kill(stack.pid_of("worker"), signal.SIGKILL)
        time.sleep(_LONG_S)


def _kills_worker_under_two_beats(stack: ServedStack) -> None:
    with _second_beat(stack):
        os.kill(stack.pid_of("worker"), signal.SIGKILL)
        time.sleep(_LONG_S)


@contextlib.contextmanager
def _second_beat(stack: ServedStack) -> Iterator[None]:
    environment = {**stack.env, **stack.services, "SECRET_KEY": "unused", "METRICS_PORT": ""}
    command = [sys.executable, "manage.py", "beat"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as beat:
        try:
            yield
        finally:
            beat.terminate()


def _fills(name: str) -> Fault:
    def act(stack: ServedStack) -> None:
        with surroundings.full(stack.data_dir / name):
            time.sleep(_FROZEN_S)

    return act


def _steps_clock(stack: ServedStack) -> None:
    surroundings.set_clock(stack.data_dir, ahead_s=3600)
    time.sleep(_FROZEN_S)
    surroundings.set_clock(stack.data_dir, ahead_s=0)


FAULTS: dict[str, Fault] = {
    "worker killed": _sends("worker", signal.SIGKILL),
    "worker stopped": _sends("worker", signal.SIGTERM),
    "worker frozen": _freezes("worker"),
    "web process killed": _sends("web", signal.SIGKILL),
    "web process stopped": _sends("web", signal.SIGTERM),
    "web process frozen": _freezes("web"),
    "beat killed": _sends("beat", signal.SIGKILL),
    "beat frozen": _freezes("beat"),
    "worker killed while beat is frozen": _kills_worker_without_beat,
    "worker killed under two beats": _kills_worker_under_two_beats,
    "Redis killed": _sends("redis", signal.SIGKILL),
    "Redis frozen": _freezes("redis"),
    "Redis emptied": _empties_redis,
    "PostgreSQL killed": _kills_postgres,
    "PostgreSQL frozen": _freezes_postgres,
    "database connections cut": _cuts_connections,
}
ON_SMALL_DISKS: dict[str, Fault] = {
    "disk of Redis full": _fills("redis"),
    "disk of PostgreSQL full": _fills("postgres"),
    "disk of the text logs full": _fills("log"),
}
WITH_A_CLOCK: dict[str, Fault] = {"clock an hour ahead, then back": _steps_clock}
ALL = FAULTS | ON_SMALL_DISKS | WITH_A_CLOCK
