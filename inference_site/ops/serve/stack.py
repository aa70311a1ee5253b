"""The processes of ``manage.py serve``: PostgreSQL, Redis, web, workers and beat."""

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

from inference_site.core import environment
from inference_site.ops.serve.processes import Child, Program, Supervisor, say
from inference_site.ops.serve.services import (
    EmbeddedPostgres,
    ServiceError,
    plan_redis,
    wait_for_redis,
)

_ROOT = Path(__file__).resolve().parents[3]
_BACKLOG = 4096
"""How many connections may wait while the web process starts."""
_CANNOT_START = 1
"""The exit status of a process that cannot start with its settings or models."""
_LOCK_TRIES, _LOCK_PAUSE_S = 5, 0.1
_CHOSEN_SETTINGS = (
    *("DATABASE_URL", "REDIS_URL", "DATA_DIR", "MODELS_DIR", "MODELS_FILE"),
    *("SECRET_KEY", "HTTPS"),
)
"""Settings that ``serve`` chooses, or whose paths it makes absolute, for its processes."""


class Stack:
    """All processes of ``manage.py serve``."""

    def __init__(
        self,
        data_dir: Path,
        host: str,
        port: int,
        web_processes: int = 1,
        worker_processes: int = 1,
    ) -> None:
        self._data_dir, self._host, self._port = data_dir, host, port
        self._web_processes, self._worker_processes = web_processes, worker_processes
        self._logs = data_dir / "log"
        self._lock: IO[str] | None = None
        self._socket: socket.socket | None = None
        self.env = dict(os.environ)
        # The web processes wait until the writing end is closed.
        self._start_read_fd, self._start_write_fd = os.pipe()
        self.supervisor = Supervisor()

    def start_services(self) -> None:
        """Start PostgreSQL and Redis, unless their addresses are set. Raise ServiceError."""
        if self._web_processes > 1 and ":" in self._host:
            raise ServiceError("Several web processes share a socket, which must be of IPv4.")
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = lock_directory(self._data_dir)
        self._socket = listening_socket(self._host, self._port)
        open_files = [file for file in (self._lock, self._socket) if file is not None]
        self.supervisor.descriptors = [
            *(file.fileno() for file in open_files),
            self._start_read_fd,
        ]
        redis_url = environment.text("REDIS_URL")
        if not redis_url:
            plan = plan_redis(self._data_dir)
            self.supervisor.redis = self._child("redis", plan.command)
            self.supervisor.redis.start()
            redis_url = plan.url
        database_url = environment.text("DATABASE_URL")
        if not database_url:
            self.supervisor.postgres = EmbeddedPostgres(self._data_dir)
            database_url = self.supervisor.postgres.start()
        # The embedded PostgreSQL, started as root, has opened the directory to its user.
        _restrict_directory(self._data_dir)
        wait_for_redis(redis_url)
        # All children have the same addresses and absolute paths.
        for name in ("DATABASE_URL", "REDIS_URL"):
            self.env.pop(f"{name}_FILE", None)
        self.env |= {"DATABASE_URL": database_url, "REDIS_URL": redis_url}
        self.env |= {"DATA_DIR": str(self._data_dir), "PYTHONUNBUFFERED": "1"}
        self.env["MODELS_DIR"] = str(settings.MODELS_DIR)
        if settings.MODELS_FILE is not None:
            self.env["MODELS_FILE"] = str(settings.MODELS_FILE)
        if not environment.text("SECRET_KEY"):
            self.env["SECRET_KEY"] = kept_secret_key(self._data_dir)
        self.env.setdefault("HTTPS", "false")
        # Other `manage.py` commands read it while this one runs: core/environment.py.
        served = {name: self.env[name] for name in _CHOSEN_SETTINGS if name in self.env}
        write_private(
            self._data_dir / "services.json", json.dumps(environment.given() | served, indent=1)
        )

    @property
    def database_url(self) -> str:
        """The address of the database, after the services have started."""
        return self.env.get("DATABASE_URL") or environment.text("DATABASE_URL")

    def start_processes(self) -> None:
        """Start web, worker and beat, which wait until the database is migrated."""
        children = [self._web(name) for name in _names("web", self._web_processes)]
        for number, name in enumerate(_names("worker", self._worker_processes)):
            # Each worker serves its metrics on its own port, if at all.
            port = settings.METRICS_PORT and settings.METRICS_PORT + number
            env = {"METRICS_PORT": str(port)} if port else {}
            children.append(self._child(name, _manage("worker"), env=env))
        # The workers use the ports for metrics.
        children.append(self._child("beat", _manage("beat"), env={"METRICS_PORT": ""}))
        self.supervisor.children = children
        for child in children:
            child.start()

    def _web(self, name: str) -> Child:
        """Return a web process, which answers after ``open_web``.

        All web processes accept connections from one socket, which the supervisor keeps open.
        """
        start = ["--wait-for-fd", str(self._start_read_fd)]
        if self._socket is None:
            listen = ["--host", self._host, "--port", str(self._port)]
            command = [*_manage("web"), *listen, *start]
            return self._child(name, command, (self._start_read_fd,), starts_alone=True)
        socket_fd = self._socket.fileno()
        command = [*_manage("web"), "--fd", str(socket_fd), *start]
        return self._child(name, command, (socket_fd, self._start_read_fd))

    def open_web(self) -> None:
        """Have the web processes answer: the first key and the first user exist."""
        os.close(self._start_write_fd)

    def require_started(self) -> None:
        """Raise ServiceError with the reason when a process could not start."""
        for child in self.supervisor.children:
            if child.exit_status == _CANNOT_START:
                _, _, reason = child.logged().rpartition("CommandError: ")
                raise ServiceError(
                    f"{child.program.name} cannot start: {reason.strip() or child.program.log}"
                )

    def log_of(self, name: str) -> str:
        """Return the logs of the current processes of this kind."""
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


def _names(kind: str, count: int) -> list[str]:
    """Return the names of the processes of a kind, and of their logs: web, web-2, web-3."""
    return [kind, *(f"{kind}-{number}" for number in range(2, count + 1))]


def _manage(command: str) -> list[str]:
    return [sys.executable, str(_ROOT / "manage.py"), command, "--wait-for-migrations"]


def lock_directory(data_dir: Path) -> IO[str]:
    """Lock the directory until the file is closed. Raise ServiceError if it is locked already.

    It is tried several times, because a command that checks the lock holds it for a moment. Every
    user who can open the file can lock it, so only its owner may open it.
    """
    _restrict_directory(data_dir)
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


def _restrict_directory(data_dir: Path) -> None:
    """Let no other user read or write in the directory, if this user owns it.

    As root, ``serve`` runs PostgreSQL as another user, which must be able to pass through it.
    """
    mode = stat.S_IMODE(data_dir.stat().st_mode)
    passable = 0o011 if os.geteuid() == 0 else 0
    with contextlib.suppress(PermissionError):
        data_dir.chmod(mode & (0o700 | passable) | passable)


def listening_socket(host: str, port: int) -> socket.socket | None:
    """Return a listening socket; clients may connect at once. Raise ServiceError if it is in use.

    Return None for an IPv6 address: Daphne accepts only inherited IPv4 sockets, and listens itself.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if port == 0:  # The system would choose one, and nobody would know it.
            raise OverflowError
        listening.bind((host, port))
    except (OSError, OverflowError) as exc:
        listening.close()
        why = getattr(exc, "strerror", None) or "a port is from 1 to 65535"
        raise ServiceError(
            f"Cannot listen on {host}:{port}: {why}. Choose another: "
            "`make serve PORT=… HOST=…`, or --port and --host."
        ) from exc
    if family == socket.AF_INET6:
        listening.close()
        return None
    listening.listen(_BACKLOG)
    return listening


def kept_secret_key(data_dir: Path) -> str:
    """Return the site's key of ``DATA_DIR/secret_key``; the first start makes it.

    Earlier releases left an empty file when the disk was full.
    """
    path = data_dir / "secret_key"
    if not path.exists() or not path.stat().st_size:
        write_private(path, secrets.token_urlsafe(50))
    return path.read_text()


def write_private(path: Path, content: str) -> None:
    """Write a file that only its owner can read, from the moment it is created.

    With a full disk, or without power, the file stays as it was.
    """
    new = path.with_name(f"{path.name}.new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
