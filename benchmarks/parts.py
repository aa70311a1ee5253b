"""The processes of a target: the processor time of each part, and a wait until all are idle."""

import time

import psutil

from benchmarks.processes import descendants, marked
from benchmarks.targets import Endpoint

SETTLE_S, QUIET_S = 30.0, 0.2
"""The longest wait for a target that has started, and the processor time that is none, a second."""
_PARTS = {
    "web": "manage.py web",
    "worker": "manage.py worker",
    "beat": "manage.py beat",
    "serve": "manage.py serve",
    "guardians": "guardian.py",
    "models": "llama_server.py",
    "templates": "worker.engines.chat.rendering",
}


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


def memory_mib(endpoint: Endpoint) -> dict[str, float]:
    """Return the memory of each part of a target; shared pages are counted once (PSS)."""
    taken: dict[str, float] = {}
    for process in processes_of(endpoint):
        try:
            pss, part = process.memory_full_info().pss, part_of(process)
        except psutil.Error:
            continue
        taken[part] = taken.get(part, 0.0) + pss / 2**20
    return taken


def processes_of(endpoint: Endpoint) -> list[psutil.Process]:
    """Return all processes of a target; a database server is no descendant of the others."""
    mark = str(endpoint.data_dir) if endpoint.data_dir else ""
    family = {process.pid: process for process in descendants(endpoint.process.pid)}
    family[endpoint.process.pid] = psutil.Process(endpoint.process.pid)
    for process in marked(mark) if mark else ():
        family |= {found.pid: found for found in (process, *descendants(process.pid))}
    return list(family.values())


def settle(endpoint: Endpoint) -> None:
    """Wait until a target is idle."""
    until, before = time.monotonic() + SETTLE_S, -1.0
    while time.monotonic() < until:
        spent = sum(processor_s(endpoint).values())
        if before >= 0 and spent - before < QUIET_S:
            return
        before = spent
        time.sleep(1)


def part_of(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    if "redis" in words:
        return "redis"
    if "postgres" in words:
        return "postgres"
    return next((part for part, command in _PARTS.items() if command in words), "other")
