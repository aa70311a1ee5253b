"""The memory of a worker's host and of its GPUs, and reading a file into it ahead of use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from inference_site.fleet.leases import HOST_MEMORY, Device
from inference_site.host import memory_bytes
from worker.runtime.host.nvml import gpus

_CHUNK_BYTES = 16 * 2**20


def devices() -> tuple[Device, ...]:
    """Return the GPUs that the driver tells of, else the host's memory."""
    return gpus() or (Device(HOST_MEMORY, *memory_bytes()),)


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
