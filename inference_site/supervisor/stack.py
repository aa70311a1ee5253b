"""Starts, watches and stops the whole stack on one host: services, web, worker and beat."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO

from django.conf import settings

from inference_site import environment
from inference_site.supervisor.postgres import EmbeddedPostgres
from inference_site.supervisor.processes import Child, Program
from inference_site.supervisor.services import ServiceError, plan_redis, wait_for_redis

_ROOT = Path(__file__).resolve().parent.parent.parent
_STOP_S, _DRAIN_S = 7.0, 3.0
"""How long processes may take to end when ``serve`` stops, and for how long of this they drain."""
_WATCH_S = 0.2
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
    """All processes of ``manage.py serve``. ``say`` prints one line for the operator."""

    def __init__(
        self,
        data_dir: Path,
        host: str,
        port: int,
        say: Callable[[str], None],
        webs: int = 1,
        workers: int = 1,
    ) -> None:
        self._data_dir, self._host, self._port, self._say = data_dir, host, port, say
        self._webs, self._workers = webs, workers
        self._logs = data_dir / "log"
        self._postgres: EmbeddedPostgres | None = None
        self._redis: Child | None = None
        self._children: list[Child] = []
        self._postgres_at = 0.0
        self._lock: IO[str] | None = None
        self._socket: socket.socket | None = None
        self._stop = threading.Event()
        self._is_to_roll = False
        self._to_roll: list[Child] = []
        self.env = dict(os.environ)

    def start_services(self) -> None:
        """Start PostgreSQL and Redis, unless their addresses are set. Raise ServiceError."""
        if self._webs > 1 and ":" in self._host:
            raise ServiceError("Several web processes share a socket, which must be of IPv4.")
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = lock_directory(self._data_dir)
        self._socket = listening_socket(self._host, self._port)
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
        self._redis = self._child("redis", plan.command)
        self._redis.start()
        return plan.url

    def _start_postgres(self) -> str:
        self._postgres = EmbeddedPostgres(self._data_dir)
        return self._postgres.start()

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
        """Start worker and beat, which wait until the database is migrated; have web stand by."""
        manage = [sys.executable, str(_ROOT / "manage.py")]
        wait = "--wait-for-migrations"
        self._children = [
            *(self._web(name, [*manage, "web", wait]) for name in _names("web", self._webs)),
            *(
                self._worker(name, [*manage, "worker", wait], number)
                for number, name in enumerate(_names("worker", self._workers))
            ),
            # The workers have the ports.
            self._child("beat", [*manage, "beat", wait], env={"METRICS_PORT": ""}),
        ]
        for child in self._children[: self._webs]:
            child.stand_by()
        for child in self._children[self._webs :]:
            child.start()

    def open_web(self) -> None:
        """Have the web processes answer: the first key and the first user are there."""
        for child in self._children[: self._webs]:
            child.start()

    def _web(self, name: str, command: list[str]) -> Child:
        """Return a web process. All inherit the socket, which outlives their restarts; whoever has
        time takes the next connection."""
        inherited = () if self._socket is None else (self._socket.fileno(),)
        if inherited:
            own = ["--fd", str(inherited[0])]
        else:
            own = ["--host", self._host, "--port", str(self._port)]
        return self._child(
            name,
            [*command, *own],
            inherited,
            has_spare=self._webs == 1,
            starts_alone=not inherited,
        )

    def _worker(self, name: str, command: list[str], number: int) -> Child:
        """Return a worker. Each has a port of its own for its metrics, if there are any."""
        port = settings.METRICS_PORT and settings.METRICS_PORT + number
        env = {"METRICS_PORT": str(port)} if port else {}
        return self._child(name, command, env=env, has_spare=self._workers == 1)

    def processes(self) -> list[tuple[str, int | None]]:
        """Return the name and process id of each child."""
        own = [*([self._redis] if self._redis else []), *self._children]
        return [(child.program.name, child.pid) for child in own]

    def require_started(self) -> None:
        """Raise ServiceError with the reason when a process has refused to start."""
        for child in self._children:
            if child.exit_status == _REFUSED:
                _, _, reason = child.logged().rpartition("CommandError: ")
                raise ServiceError(
                    f"{child.program.name} cannot start: {reason.strip() or child.program.log}"
                )

    def log_of(self, name: str) -> str:
        """Return what the last processes of this kind have logged."""
        kinds = ((child, child.program.name.partition("-")[0]) for child in self._children)
        return "".join(child.logged() for child, kind in kinds if kind == name)

    def watch(self) -> None:
        """Restart dead processes until SIGINT or SIGTERM arrives.

        SIGHUP replaces web, worker and beat, one process after the other. From a terminal it means
        that the terminal is gone, and stops everything.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._stop.set())
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # See ``nohup``.
            signal.signal(signal.SIGHUP, self._on_hangup)
        while not self._stop.wait(_WATCH_S):
            if self._is_to_roll:
                self._is_to_roll, self._to_roll = False, list(self._children)
            self.restart_dead()
            self._roll_next()

    def _on_hangup(self, *_: object) -> None:
        if sys.stdout.isatty():
            self._stop.set()
        else:
            self._is_to_roll = True

    def _roll_next(self) -> None:
        """Have one process after the other replaced: what is there of two costs memory."""
        if self._to_roll and not any(child.is_rolling for child in self._children):
            self._to_roll.pop(0).roll(time.monotonic())

    def restart_dead(self) -> None:
        """Restart each dead process whose restart delay is over."""
        now = time.monotonic()
        for child in [*([self._redis] if self._redis else []), *self._children]:
            child.restart_if_dead(now)
            child.keep_spare(now)
        self._restart_postgres(now)

    def _restart_postgres(self, now: float) -> None:
        """Check an embedded PostgreSQL every second: it is no child process of the supervisor."""
        if self._postgres is None or now < self._postgres_at:
            return
        self._postgres_at = now + 1
        try:
            if self._postgres.restart_if_dead():
                self._say("postgres had died; started again")
        except ServiceError as exc:
            self._postgres_at = now + 10
            self._say(str(exc))

    def stop(self) -> None:
        """Stop web, worker and beat, then Redis and PostgreSQL."""
        # A second Ctrl-C must not interrupt the shutdown.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        started = time.monotonic()
        for child in self._children:
            child.terminate()
        ended = [child.wait(started + _DRAIN_S, kills=False) for child in self._children]
        if not all(ended):
            for child in self._children:
                child.interrupt()
        for child in self._children:
            child.wait(started + _STOP_S)
        if self._redis is not None:
            self._redis.terminate()
            self._redis.wait(time.monotonic() + 2)
        if self._postgres is not None:
            self._postgres.stop()
        if self._socket is not None:
            self._socket.close()
        if self._lock is not None:
            self._lock.close()

    def _child(
        self,
        name: str,
        command: list[str],
        descriptors: tuple[int, ...] = (),
        *,
        env: Mapping[str, str] = MappingProxyType({}),
        has_spare: bool = False,
        starts_alone: bool = False,
    ) -> Child:
        has_spare = has_spare and environment.boolean("SPARE_PROCESSES", default=True)
        log = self._logs / f"{name}.log"
        program = Program(name, command, log, descriptors, has_spare, starts_alone)
        return Child(program, {**self.env, **env}, self._say)

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
