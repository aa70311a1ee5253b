"""Where the embedded services of ``manage.py serve`` listen.

They listen on Unix sockets that no other user of the system reaches, never on TCP.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

_LONGEST_SOCKET_PATH = 100  # The system's limit is 104 (macOS) or 108 bytes (Linux).

made_directories: list[Path] = []
"""Those outside of DATA_DIR, which go with this process."""


class ServiceError(Exception):
    """A service did not start; the message says what to do, in one line."""


def socket_directory(home: Path, name: str, uid: int) -> Path:
    """Return a directory for a socket of this name: ``home``, unless its path is too long for one.

    Then it is a new one that only the user ``uid`` may enter, and that goes with this process.
    Raise ServiceError if no path is short enough.
    """
    if _fits(home / name):
        return home
    for base in (*_runtime_directory(uid), Path(tempfile.gettempdir())):
        if _fits(base / "inference-12345678" / name):
            made = Path(tempfile.mkdtemp(prefix="inference-", dir=base))  # With the mode 0700.
            os.chown(made, uid, -1)
            remove_at_exit([made])
            return made
    raise ServiceError(f"{home} is too long for the path of a socket: choose a shorter DATA_DIR.")


def remove_at_exit(directories: Sequence[Path]) -> None:
    """Have these directories go with this process."""
    for directory in directories:
        made_directories.append(directory)
        atexit.register(shutil.rmtree, directory, ignore_errors=True)


def is_private(directory: Path) -> bool:
    """Return whether nobody but its owner may enter a directory."""
    return not stat.S_IMODE(directory.stat().st_mode) & 0o077


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH


def _runtime_directory(uid: int) -> Iterator[Path]:
    """Yield the user's own directory for sockets, if there is one."""
    named = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if named.is_absolute() and named.is_dir() and named.stat().st_uid == uid == os.geteuid():
        yield named
