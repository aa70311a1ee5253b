"""Files of a PostgreSQL whose database is migrated: made once, copied for each site and process.

To initialize and to migrate one takes a processor for four seconds, to copy it a tenth of that. It
is made when pytest-xdist spreads the tests; in one process it would not be used often enough.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psycopg
from psycopg import sql

from inference_site.ops.serve.services import EmbeddedPostgres

_ROOT = Path(__file__).resolve().parent.parent
_PLACE = "MIGRATED_POSTGRES"
"""Names the directory in which all processes of a run find it; each inherits it."""
DATABASE = "postgres"
"""The database that is migrated."""


def share() -> None:
    """Have this process, and those that it starts, use one; it goes with this process."""
    place = Path(tempfile.mkdtemp(prefix="inference-test-"))
    place.chmod(0o755)  # PostgreSQL runs as a user of its own when the tests run as root.
    os.environ[_PLACE] = str(place)
    atexit.register(shutil.rmtree, place, ignore_errors=True)


def copy_to(data_dir: Path) -> bool:
    """Put a copy where ``EmbeddedPostgres`` of this directory has its files; whether there is one.

    The first process that asks makes it, while the others wait.
    """
    if _PLACE not in os.environ:
        return False
    place = Path(os.environ[_PLACE])
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "postgres").exists():
            _make(place)
    command = ["cp", "-a", str(place / "postgres"), str(data_dir / "postgres")]
    subprocess.run(command, check=True)  # It keeps the owner, as `shutil` does not.
    return True


def _make(place: Path) -> None:
    made = place / "made"
    made.mkdir()
    made.chmod(0o755)
    server = EmbeddedPostgres(made)
    url = server.start()
    # A site that tests kill may lose nothing, but the machine stays up.
    set_all(url, fsync="off", full_page_writes="off")
    env = {**os.environ, "DATABASE_URL": url}
    command = [sys.executable, "manage.py", "migrate", "-v0"]
    subprocess.run(command, cwd=_ROOT, env=env, check=True)
    server.stop()
    (made / "postgres").rename(place / "postgres")


def set_all(url: str, **settings: str) -> None:
    """Set what a whole server does."""
    with psycopg.connect(url, autocommit=True) as connection:
        for name, value in settings.items():
            connection.execute(
                sql.SQL("ALTER SYSTEM SET {} = {}").format(sql.Identifier(name), sql.Literal(value))
            )
        connection.execute("SELECT pg_reload_conf()")
