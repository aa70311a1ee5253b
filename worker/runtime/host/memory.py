"""Reading a file into the memory of a worker's host ahead of use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from inference_site.host import memory_bytes

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
