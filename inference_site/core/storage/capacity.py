"""How much room there is: on the disks of data, models and files, and in the memory of Redis."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from django.conf import settings


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk of a folder, which need not exist yet; ``setting`` names the folder.

    ``total_bytes`` is 0 for a file system that has no size of its own, such as ``/proc``.
    """

    setting: str
    folder: Path
    free_bytes: int
    total_bytes: int

    @property
    def percent(self) -> float:
        """How much of it is used; 0 without a size."""
        return 100 * (1 - self.free_bytes / self.total_bytes) if self.total_bytes else 0.0


def disks() -> Iterator[Disk]:
    """Yield the disks of ``DATA_DIR`` and ``MODELS_DIR``, and of ``FILES_DIR`` if it is elsewhere.

    Raise OSError.
    """
    folders = {"DATA_DIR": Path(settings.DATA_DIR), "MODELS_DIR": Path(settings.MODELS_DIR)}
    files = Path(settings.FILES_DIR)
    if not settings.FILES_BUCKET and not files.is_relative_to(folders["DATA_DIR"]):
        folders["FILES_DIR"] = files
    for setting, folder in folders.items():
        usage = shutil.disk_usage(existing(folder))
        yield Disk(setting, folder, usage.free, usage.total)


def existing(folder: Path) -> Path:
    """Return the folder, or the closest of its parents that exists. Raise OSError."""
    return next(path for path in (folder, *folder.parents) if path.exists())


@dataclass(frozen=True, slots=True)
class RedisMemory:
    """The memory of a Redis server; ``limit_bytes`` is its ``maxmemory``, 0 without a limit."""

    used_bytes: int
    limit_bytes: int
    policy: str

    @property
    def percent(self) -> float:
        """How much of the limit is used; 0 without a limit."""
        return 100 * self.used_bytes / self.limit_bytes if self.limit_bytes else 0.0


def memory_of(client: redis.Redis) -> RedisMemory:
    """Return the memory of a server. Raise ResponseError if it does not allow the command."""
    found: Any = client.info("memory")
    limit, policy = int(found.get("maxmemory", 0)), str(found.get("maxmemory_policy", "noeviction"))
    return RedisMemory(int(found["used_memory"]), limit, policy)
