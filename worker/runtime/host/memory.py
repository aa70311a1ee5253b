"""The memory of a worker's host and of its GPUs, and reading a file into it ahead of use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inference_site.fleet.leases import HOST_MEMORY, Device
from inference_site.host import memory_bytes

_CHUNK_BYTES = 16 * 2**20


def devices() -> tuple[Device, ...]:
    """Return the GPUs that llama.cpp sees, if it is loaded in this process, else host memory.

    Asking it loads its library, which a worker without a model of it has no use for.
    """
    # While it is being imported, it is there without its functions.
    get_device_info = getattr(sys.modules.get("xllamacpp"), "get_device_info", list)
    seen: list[Any] = get_device_info()
    gpus = [d for d in seen if "CPU" not in d["type"].name and d["memory_total"]]
    found = tuple(Device(d["name"], d["memory_total"], d["memory_free"]) for d in gpus)
    return found or (Device(HOST_MEMORY, *memory_bytes()),)


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
