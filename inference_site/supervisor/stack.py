"""Starts the whole stack on one host: services, web, worker and beat."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO

from django.conf import settings

from inference_site import environment
from inference_site.supervisor.processes import Child, Program
from inference_site.supervisor.services import (
    EmbeddedPostgres,
    ServiceError,
    plan_redis,
    wait_for_redis,
)
from inference_site.supervisor.supervision import Supervisor, say

_ROOT = Path(__file__).resolve().parent.parent.parent
_BACKLOG = 4096
"""How many connections may wait while the web process starts."""
_REFUSED = 1
"""The exit status of a process that cannot start with its settings or models."""
_LOCK_TRIES, _LOCK_PAUSE_S = 5, 0.1
_OWN = (
    *("DATABASE_URL", "REDIS_URL", "DATA_DIR", "MODELS_DIR", "MODELS_FILE"),
    *("SECRET_KEY", "HTTPS"),
)
"""Settings that ``serve`` chooses, or makes absolute, for its processes."""


class Stack:
    """All processes of ``manage.py serve``."""

    def __init__(
        self,
        data_dir: Path,
        host: str,
        port: int,
        webs: int = 1,
        workers: int = 1,
    ) -> None:
        self._data_dir, self._host, self._port = data_dir, host, port
        self._webs, self._workers = webs, workers
        self._logs = data_dir / "log"
        self._lock: IO[str] | None = None
        self._socket: socket.socket | None = None
        self.env = dict(os.environ)
        self._gate, self._closed_gate = os.pipe()
        self.supervisor = Supervisor()
        """Watches and stops what has been started."""

    def start_services(self) -> None:
        """Start PostgreSQL and Redis, unless their addresses are set. Raise ServiceError."""
        if self._webs > 1 and ":" in self._host:
            raise ServiceError("Several web processes share a socket, which must be of IPv4.")
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = lock_directory(self._data_dir)
        self._socket = listening_socket(self._host, self._port)
        held = [file for file in (self._lock, self._socket) if file is not None]
        self.supervisor.descriptors = [*(file.fileno() for file in held), self._gate]
        redis_url = environment.text("REDIS_URL") or self._start_redis()
        database_url = environment.text("DATABASE_URL") or self._start_postgres()
        _close_to_others(self._data_dir)  # As root, the embedded PostgreSQL opens it to its user.
        wait_for_redis(redis_url)
        self._set_environment({"DATABASE_URL": database_url, "REDIS_URL": redis_url})
        # What other `manage.py` commands read while this one runs: inference_site/environment.py.
        served = {name: self.env[name] for name in _OWN if name in self.env}
        write_private(
            self._data_dir / "services.json", json.dumps(environment.given() | served, indent=1)
        )

    def _start_redis(self) -> str:
        plan = plan_redis(self._data_dir)
        self.supervisor.redis = self._child("redis", plan.command)
        self.supervisor.redis.start()
        return plan.url

    def _start_postgres(self) -> str:
        self.supervisor.postgres = EmbeddedPostgres(self._data_dir)
        return self.supervisor.postgres.start()

    def _set_environment(self, services: dict[str, str]) -> None:
        """Give all children the same addresses and absolute paths."""
        for name in services:
            self.env.pop(f"{name}_FILE", None)
        self.env |= services
        self.env |= {"DATA_DIR": str(self._data_dir), "PYTHONUNBUFFERED": "1"}
        self.env["MODELS_DIR"] = str(settings.MODELS_DIR)
        if settings.MODELS_FILE is not None:
            self.env["MODELS_FILE"] = str(settings.MODELS_FILE)
        if not environment.text("SECRET_KEY"):
            self.env["SECRET_KEY"] = self._secret_key()
        self.env.setdefault("HTTPS", "false")

    @property
    def database_url(self) -> str:
        """The address of the database, after the services have started."""
        return self.env.get("DATABASE_URL") or environment.text("DATABASE_URL")

    def start_processes(self) -> None:
        """Start web, worker and beat, which wait until the database is migrated."""
        manage = [sys.executable, str(_ROOT / "manage.py")]
        wait = "--wait-for-migrations"
        self.supervisor.children = [
            *(self._web(name, [*manage, "web", wait]) for name in _names("web", self._webs)),
            *(
                self._worker(name, [*manage, "worker", wait], number)
                for number, name in enumerate(_names("worker", self._workers))
            ),
            # The workers have the ports.
            self._child("beat", [*manage, "beat", wait], env={"METRICS_PORT": ""}),
        ]
        for child in self.supervisor.children:
            child.start()

    def open_web(self) -> None:
        """Have the web processes answer: the first key and the first user are there."""
        os.close(self._closed_gate)

    def _web(self, name: str, command: list[str]) -> Child:
        """Return a web process. All inherit the socket, which outlives their restarts; whoever has
        time takes the next connection. They answer once ``open_web`` was called."""
        wait = ["--wait-for-fd", str(self._gate)]
        if self._socket is None:
            own = ["--host", self._host, "--port", str(self._port)]
            return self._child(name, [*command, *own, *wait], (self._gate,), starts_alone=True)
        inherited = self._socket.fileno()
        own = ["--fd", str(inherited)]
        return self._child(name, [*command, *own, *wait], (inherited, self._gate))

    def _worker(self, name: str, command: list[str], number: int) -> Child:
        """Return a worker. Each has a port of its own for its metrics, if there are any."""
        port = settings.METRICS_PORT and settings.METRICS_PORT + number
        env = {"METRICS_PORT": str(port)} if port else {}
        return self._child(name, command, env=env)

    def require_started(self) -> None:
        """Raise ServiceError with the reason when a process has refused to start."""
        for child in self.supervisor.children:
            if child.exit_status == _REFUSED:
                _, _, reason = child.logged().rpartition("CommandError: ")
                raise ServiceError(
                    f"{child.program.name} cannot start: {reason.strip() or child.program.log}"
                )

    def log_of(self, name: str) -> str:
        """Return what the last processes of this kind have logged."""
        children = self.supervisor.children
        found = (child for child in children if child.program.name.partition("-")[0] == name)
        return "".join(child.logged() for child in found)

    def _child(
        self,
        name: str,
        command: list[str],
        descriptors: tuple[int, ...] = (),
        *,
        env: Mapping[str, str] = MappingProxyType({}),
        starts_alone: bool = False,
    ) -> Child:
        log = self._logs / f"{name}.log"
        program = Program(name, command, log, descriptors, starts_alone)
        return Child(program, {**self.env, **env}, say)

    def _secret_key(self) -> str:
        path = self._data_dir / "secret_key"
        if not path.exists():
            write_private(path, secrets.token_urlsafe(50))
        return path.read_text()


def _names(kind: str, count: int) -> list[str]:
    """Return the names of the processes of a kind, which their logs have: web, web-2, web-3."""
    return [kind, *(f"{kind}-{number}" for number in range(2, count + 1))]


def lock_directory(data_dir: Path) -> IO[str]:
    """Lock the directory until the file is closed. Raise ServiceError if it is locked already.

    A command that looks whether it is locked holds the lock for a moment: hence the tries. Whoever
    can open the file can lock it, so nobody else may.
    """
    _close_to_others(data_dir)
    descriptor = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    os.fchmod(descriptor, 0o600)  # Earlier releases made it readable for everybody.
    lock = os.fdopen(descriptor, "w")
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(_LOCK_PAUSE_S)
        else:
            return lock
    lock.close()
    raise ServiceError(f"Another `serve` runs in {data_dir}.")


def _close_to_others(data_dir: Path) -> None:
    """Let no other user read or write in the directory, as far as it belongs to this one.

    As root, ``serve`` runs PostgreSQL as another user, which must be able to pass through.
    """
    mode = stat.S_IMODE(data_dir.stat().st_mode)
    passable = 0o011 if os.geteuid() == 0 else 0
    with contextlib.suppress(PermissionError):
        data_dir.chmod(mode & (0o700 | passable) | passable)


def listening_socket(host: str, port: int) -> socket.socket | None:
    """Listen; raise ServiceError when the port is in use. Clients that come early wait.

    Return None for an IPv6 address: Daphne takes over IPv4 sockets only, and listens itself.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as exc:
        listening.close()
        raise ServiceError(
            f"Cannot listen on {host}:{port}: {exc.strerror}. Choose another with --port."
        ) from exc
    if family == socket.AF_INET6:
        listening.close()
        return None
    listening.listen(_BACKLOG)
    return listening


def write_private(path: Path, content: str) -> None:
    """Write a file that is readable only by its owner from the moment it is created."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(content)
