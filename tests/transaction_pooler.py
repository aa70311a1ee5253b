"""PgBouncer in front of the PostgreSQL of the tests, each transaction in another session of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from django.db import connection

from tests.ports import free_port
from tests.waiting import wait_until

_CONFIG = """
[databases]
* = host={host} port={port} user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own_port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
server_round_robin = 1
min_pool_size = 3
"""
_KEEPS_NONE = "max_prepared_statements = 0\n"


@contextmanager
def transaction_pooler() -> Iterator[int]:
    """Run it, and yield its port. It keeps no prepared statements. Skip the test without it."""
    program = shutil.which("pgbouncer")
    if program is None:
        pytest.skip("PgBouncer is not installed here")
    shown = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=True
    ).stdout
    release = re.match(r"PgBouncer (\d+)\.(\d+)", shown)
    assert release is not None, shown
    target, own_port = connection.get_connection_params(), free_port()
    host = target["host"]
    config = _CONFIG.format(
        host=host, port=target.get("port", 5432), user=target["user"], own_port=own_port
    )
    if (int(release[1]), int(release[2])) >= (1, 21):  # Earlier ones know no such setting.
        config += _KEEPS_NONE
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "pgbouncer.ini"
        path.write_text(config)
        # It refuses to run as root, as PostgreSQL does, whose user may connect.
        user = Path(host).stat().st_uid if os.geteuid() == 0 and host.startswith("/") else None
        process = subprocess.Popen([program, "-q", str(path)], user=user)
        try:
            wait_until(lambda: _answers(own_port, target["dbname"]))
            yield own_port
        finally:
            process.kill()
            process.wait()


def _answers(port: int, database: str) -> bool:
    try:
        psycopg.connect(host="127.0.0.1", port=port, user="any", dbname=database).close()
    except psycopg.OperationalError:
        return False
    return True
