"""The processes of a target: what each part of it has used, and when all of them are at rest."""

import contextlib
import time

import psutil

from benchmarks.processes import descendants, marked
from benchmarks.targets import Endpoint

SETTLE_S, QUIET_S = 30.0, 0.2
"""The longest wait for a target that has started, and the processor time that is none, a second."""
SPARE_AFTER_S = 9.0
"""A web process or worker that begins so much later than the first of its kind is its spare, which
imports for seconds; the supervisor begins it ten seconds after the start of the first."""
_PARTS = {"web": "manage.py web", "worker": "manage.py worker", "beat": "manage.py beat"}


def processor_s(endpoint: Endpoint) -> dict[str, float]:
    """Return the processor seconds of each part of a target so far."""
    spent: dict[str, float] = {}
    for process in processes_of(endpoint):
        try:
            times, part = process.cpu_times(), part_of(process)
        except psutil.Error:
            continue
        used = times.user + times.system
        if part == "postgres":  # A connection may come and go meanwhile.
            used += times.children_user + times.children_system
        spent[part] = spent.get(part, 0.0) + used
    return spent


def processes_of(endpoint: Endpoint) -> list[psutil.Process]:
    """Return all processes of a target; a database server is no descendant of the others."""
    mark = str(endpoint.data_dir) if endpoint.data_dir else ""
    family = {process.pid: process for process in descendants(endpoint.process.pid)}
    family[endpoint.process.pid] = psutil.Process(endpoint.process.pid)
    for process in marked(mark) if mark else ():
        family |= {found.pid: found for found in (process, *descendants(process.pid))}
    return list(family.values())


def settle(endpoint: Endpoint) -> None:
    """Wait until a target is at rest, and what the platform starts later with it."""
    until, before, is_whole = time.monotonic() + SETTLE_S, -1.0, False
    while time.monotonic() < until:
        spent = sum(processor_s(endpoint).values())
        if is_whole and spent - before < QUIET_S:
            return
        before, is_whole = spent, _has_spares(endpoint)
        time.sleep(1)


def _has_spares(endpoint: Endpoint) -> bool:
    """Whether the platform has begun its spare processes; others have none."""
    if not endpoint.data_dir:
        return True
    begun: dict[str, list[float]] = {"web": [], "worker": []}
    for process in processes_of(endpoint):
        with contextlib.suppress(psutil.Error):
            begun.get(part_of(process), []).append(process.create_time())
    return all(times and max(times) - min(times) > SPARE_AFTER_S for times in begun.values())


def part_of(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    if "redis" in words:
        return "redis"
    if "postgres" in words:
        return "postgres"
    return next((part for part, command in _PARTS.items() if command in words), "other")
