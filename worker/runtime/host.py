"""The host of a worker: what the lease says about it, and reading weights into its memory."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from inference_site.catalogue.fleet.leases import HOST_MEMORY, HostState
from inference_site.core.host import Device, memory_bytes
from worker.model_servers.nvml import gpus

_CHUNK_BYTES = 16 * 2**20


def host_state() -> HostState:
    """Return the host's processors, memory, GPUs and load."""
    return HostState(
        cpu=_cpu_name(),
        cores=os.cpu_count() or 0,
        load=round(os.getloadavg()[0], 2),
        memory=Device(HOST_MEMORY, *memory_bytes()),
        gpus=gpus(),
        python=platform.python_version(),
    )


@cache
def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def process_memory_bytes() -> int:
    """Return the resident memory of this process, mapped files included; 0 if unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def read_ahead(path: Path) -> Iterator[float]:
    """Read a file into the page cache; yield the fraction that is read, after each chunk.

    Some libraries hold the GIL while they load a model, so less waiting for the disk means a
    shorter pause of all other threads. A file that is larger than the free memory is not read.
    Neither is an unreadable one: the library reports that.
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
