"""Which processes ``manage.py serve`` starts, and how many."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from django.conf import LazySettings
from django.contrib.auth import get_user_model
from django.core.management import call_command

from inference_site.ops.serve import services
from inference_site.ops.serve.processes import Child
from inference_site.ops.serve.services import ServiceError, wait_for_redis
from inference_site.ops.serve.stack import (
    Stack,
    kept_secret_key,
    listening_socket,
    lock_directory,
    write_private,
)
from inference_site.ops.serve.startup import FirstSecrets, create_first_secrets
from tests.ports import free_port


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Child]:
    """The processes that a stack would have started, by name."""
    found: dict[str, Child] = {}
    monkeypatch.setattr(Child, "start", lambda self: found.update({self.program.name: self}))
    return found


def test_it_starts_as_many_as_are_asked_for_with_a_log_each(
    tmp_path: Path, started: dict[str, Child]
) -> None:
    Stack(tmp_path, "127.0.0.1", 8000, web_processes=3, worker_processes=2).start_processes()
    assert list(started) == ["web", "web-2", "web-3", "worker", "worker-2", "beat"]
    assert len({child.program.log for child in started.values()}) == 6


def test_each_worker_has_a_port_of_its_own_for_metrics(
    tmp_path: Path, started: dict[str, Child], settings: LazySettings
) -> None:
    settings.METRICS_PORT = 9100
    Stack(tmp_path, "127.0.0.1", 8000, worker_processes=2).start_processes()
    asked = ("worker", "worker-2", "beat")
    ports = [started[name].environment["METRICS_PORT"] for name in asked]
    assert ports == ["9100", "9101", ""]


def test_several_web_processes_need_a_socket_that_they_can_share(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="IPv4"):
        Stack(tmp_path, "::1", 0, web_processes=2).start_services()


def test_a_full_disk_leaves_a_private_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret_key"
    write_private(path, "old")

    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        write_private(path, "new")
    assert path.read_text() == "old"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_empty_file_of_the_secret_key_gets_a_key(tmp_path: Path) -> None:
    (tmp_path / "secret_key").touch()
    made = kept_secret_key(tmp_path)
    assert len(made) > 50
    assert kept_secret_key(tmp_path) == made


@pytest.mark.django_db
def test_without_a_file_for_the_first_key_there_is_neither_key_nor_admin(tmp_path: Path) -> None:
    """The next start shows both: each is shown only once."""
    (tmp_path / "api_key").mkdir()
    with pytest.raises(IsADirectoryError):
        create_first_secrets(tmp_path)
    assert not get_user_model().objects.exists()
    (tmp_path / "api_key").rmdir()
    created = create_first_secrets(tmp_path)
    assert created.admin_password
    assert created.api_key == (tmp_path / "api_key").read_text()
    assert create_first_secrets(tmp_path) == FirstSecrets(None, None)


@pytest.mark.django_db
def test_a_site_whose_first_key_was_made_by_the_command_gets_its_first_user(tmp_path: Path) -> None:
    call_command("create_api_key", "--name", "laptop", stdout=StringIO())
    assert create_first_secrets(tmp_path).admin_password


@pytest.mark.django_db
def test_a_user_admin_who_is_no_operator_keeps_name_and_rights(tmp_path: Path) -> None:
    users = get_user_model().objects
    users.create_user("admin")
    created = create_first_secrets(tmp_path)
    assert (created.admin_name, bool(created.admin_password)) == ("admin-2", True)
    assert [user.username for user in users.filter(is_superuser=True)] == ["admin-2"]
    assert create_first_secrets(tmp_path) == FirstSecrets(None, None, "admin-2")


@pytest.mark.parametrize("port", [-1, 0, 65_536])
def test_a_port_that_there_is_not_is_told(port: int) -> None:
    with pytest.raises(ServiceError, match=f":{port}: a port is from 1 to 65535"):
        listening_socket("127.0.0.1", port)


def test_an_address_that_is_taken_is_told_with_what_make_takes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServiceError, match=f":{port}: .*make serve PORT="):
            listening_socket("127.0.0.1", port)


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o700])
def test_nobody_else_can_take_the_lock(tmp_path: Path, mode: int) -> None:
    (tmp_path / "lock").touch(0o644)
    tmp_path.chmod(mode)
    with lock_directory(tmp_path):
        assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o600
        # Root lets the user of PostgreSQL pass through.
        assert stat.S_IMODE(tmp_path.stat().st_mode) == (0o711 if os.geteuid() == 0 else 0o700)
        with pytest.raises(ServiceError, match="Another `serve` runs"):
            lock_directory(tmp_path)


SUPERVISED = """
from inference_site.ops.serve import processes
processes._WATCH_S = 1e-6

class Supervisor(processes.Supervisor):
    watches = False

    def restart_dead(self):
        if not self.watches:
            self.watches = True
            print("watches", flush=True)

while True:
    print(Supervisor().watch(), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_is_taken_at_any_moment(number: signal.Signals) -> None:
    """Also between two waits, of which there are as many as possible here."""
    command = [sys.executable, "-c", SUPERVISED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for _ in range(300):
                assert process.stdout.readline() == "watches\n"
                process.send_signal(number)
                assert process.stdout.readline() == "True\n"
        finally:
            process.kill()


def test_a_redis_that_does_not_answer_is_told_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(services, "_REDIS_START_S", 0)
    with pytest.raises(ServiceError, match=r"refused\. See its log, or correct REDIS_URL"):
        wait_for_redis(f"redis://127.0.0.1:{free_port()}")
