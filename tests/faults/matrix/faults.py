"""The faults: what is killed, stopped, frozen, emptied or cut in a stack of ``manage.py serve``."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable

import psutil

from tests.served_stack import ServedStack

_FROZEN_S = 5.0
Fault = Callable[[ServedStack], None]


def _sends(process: str, number: signal.Signals) -> Fault:
    def act(stack: ServedStack) -> None:
        os.kill(stack.pid_of(process), number)

    return act


def _freezes(process: str) -> Fault:
    def act(stack: ServedStack) -> None:
        _freeze([stack.pid_of(process)])

    return act


def _freeze(pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(_FROZEN_S)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _freezes_postgres(stack: ServedStack) -> None:
    postmaster = stack.postgres_pid()
    _freeze([postmaster, *(child.pid for child in psutil.Process(postmaster).children())])


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


FAULTS: dict[str, Fault] = {
    "worker killed": _sends("worker", signal.SIGKILL),
    "worker stopped": _sends("worker", signal.SIGTERM),
    "worker frozen": _freezes("worker"),
    "web process killed": _sends("web", signal.SIGKILL),
    "web process stopped": _sends("web", signal.SIGTERM),
    "web process frozen": _freezes("web"),
    "beat killed": _sends("beat", signal.SIGKILL),
    "beat frozen": _freezes("beat"),
    "Redis killed": _sends("redis", signal.SIGKILL),
    "Redis frozen": _freezes("redis"),
    "Redis emptied": _empties_redis,
    "PostgreSQL killed": _kills_postgres,
    "PostgreSQL frozen": _freezes_postgres,
    "database connections cut": _cuts_connections,
}
