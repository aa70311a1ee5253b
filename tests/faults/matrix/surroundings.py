"""What a stack stands on, made so that it can fail: small disks, and a clock that can be set.

Small disks are file systems in memory, which only root may mount. The clock is that of the
processes of the stack, by way of a library that is compiled here and preloaded (``clock.c``).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

_SIZES_MB = {"redis": 512, "postgres": 3072, "log": 512}
_SOURCE = Path(__file__).parent / "clock.c"
_MOUNT, _UNMOUNT = "/usr/bin/mount", "/usr/bin/umount"


@contextlib.contextmanager
def small_disks(data_dir: Path) -> Iterator[Mapping[str, str]]:
    """Give each of three directories of a stack a small disk. Raise CalledProcessError."""
    with contextlib.ExitStack() as mounts:
        for name, size_mb in _SIZES_MB.items():
            path = data_dir / name
            path.mkdir(mode=0o700)
            options = f"size={size_mb}m,mode=0700"
            _run(_MOUNT, "-t", "tmpfs", "-o", options, "tmpfs", str(path))
            mounts.callback(_run, _UNMOUNT, "-l", str(path))
        yield {}


def can_mount() -> bool:
    """Whether this process may make file systems."""
    with tempfile.TemporaryDirectory() as name:
        try:
            with small_disks(Path(name)):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    """Leave no room on a small disk; give it back in the end. Raise CalledProcessError."""
    while not _resize(disk, _used_bytes(disk)):  # More was written meanwhile.
        pass
    try:
        yield
    finally:
        _resize(disk, _SIZES_MB[disk.name] << 20)


def _used_bytes(disk: Path) -> int:
    found = os.statvfs(disk)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def _resize(disk: Path, size_bytes: int) -> bool:
    options = f"remount,size={size_bytes}"
    return subprocess.run([_MOUNT, "-o", options, str(disk)], check=False).returncode == 0


def has_clock() -> bool:
    """Whether a clock can be set."""
    return shutil.which("cc") is not None


@contextlib.contextmanager
def own_clock(data_dir: Path) -> Iterator[Mapping[str, str]]:
    """Return the environment of a stack whose clock can be set. Raise CalledProcessError."""
    set_clock(data_dir, ahead_s=0)
    library = data_dir / "clock.so"
    _run("cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl")
    yield {"LD_PRELOAD": str(library), "CLOCK_FILE": str(_clock_file(data_dir))}


def set_clock(data_dir: Path, ahead_s: int) -> None:
    """Set the clock of the stack so many seconds ahead of the true time."""
    path = _clock_file(data_dir)
    path.touch()
    with path.open("rb+") as file:  # Its processes have mapped it.
        file.write(struct.pack("=q", ahead_s))


def _clock_file(data_dir: Path) -> Path:
    return data_dir / "clock"


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
