"""The host of a worker: what its lease says of it, and reading a file ahead of use."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from inference_site.domain.device import Device
from inference_site.fleet.leases import HOST_MEMORY, HostState
from inference_site.host import memory_bytes
from worker.model_servers.nvml import gpus

_CPU_INFO = Path("/proc/cpuinfo")
_STATM = Path("/proc/self/statm")


def host_state() -> HostState:
    """Return what the host has, and how busy it is."""
    return HostState(
        cpu=_cpu_name(),
        cores=os.cpu_count() or 0,
        load=round(os.getloadavg()[0], 2),
        memory=Device(HOST_MEMORY, *memory_bytes()),
        gpus=gpus(),
        python=platform.python_version(),
    )


def process_memory_bytes() -> int:
    """Return what this process has in memory, with what it has mapped; 0 where nobody tells."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@cache
def _cpu_name() -> str:
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


_CHUNK_BYTES = 16 * 2**20


def read_ahead(path: Path) -> Iterator[float]:
    """Bring a file into the page cache; yield which share of it has come, after each piece.

    Libraries keep every other Python thread waiting while they load a model; what they then need
    not fetch from the disk is not waited for. A file that memory could not hold is left alone, and
    so is one that cannot be read: the library will say so.
    """
    try:
        size = path.stat().st_size
        if not 0 < size < memory_bytes()[1]:
            return
        with path.open("rb", buffering=0) as file:
            buffer, done = bytearray(_CHUNK_BYTES), 0
            while count := file.readinto(buffer):
                done += count
                yield min(1.0, done / size)
    except OSError:
        return
