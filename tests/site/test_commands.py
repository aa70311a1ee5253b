"""What ``manage.py`` prints when a setting is wrong, or a service does not answer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from inference_site.celery import app

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = "127.0.0.1:9"


def manage(tmp_path: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command without any service."""
    return manage_into(subprocess.PIPE, tmp_path, *arguments, **env)


def manage_into(
    stdout: int, tmp_path: Path, *arguments: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command without any service, with this standard output."""
    addresses = {"DATABASE_URL": f"postgresql://{NOWHERE}/none", "REDIS_URL": f"redis://{NOWHERE}"}
    return subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=ROOT,
        env={**os.environ, **addresses, "DATA_DIR": str(tmp_path / "data"), **env},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("command", ["migrate", "forget --user x"])
def test_without_postgresql_a_command_names_it_in_one_line(tmp_path: Path, command: str) -> None:
    done = manage(tmp_path, *command.split(), SECRET_KEY="x" * 50)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("CommandError: PostgreSQL cannot do this now: connection failed: ")
    assert "Connection refused" in line


def test_the_server_of_django_is_refused_because_it_cannot_stream(tmp_path: Path) -> None:
    done = manage(tmp_path, "runserver")
    assert done.returncode == 1
    assert done.stderr.endswith("start `manage.py serve`.\n")


@pytest.mark.django_db  # The command uses the server of the tests.
def test_a_database_that_there_is_not_is_told_in_one_line(tmp_path: Path) -> None:
    address = urlsplit(os.environ["DATABASE_URL"])._replace(path="/not_there").geturl()
    done = manage(tmp_path, "usage", DATABASE_URL=address, SECRET_KEY="x" * 50)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.endswith('database "not_there" does not exist. `manage.py doctor` checks it.')


@pytest.mark.django_db  # The command uses the server of the tests.
def test_a_database_without_tables_is_told_in_one_line(tmp_path: Path) -> None:
    env = {"PGOPTIONS": "-c search_path=pg_catalog", "SECRET_KEY": "x" * 50}
    done = manage(tmp_path, "usage", DATABASE_URL=os.environ["DATABASE_URL"], **env)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith('CommandError: The database is not migrated: relation "usage_')
    assert line.endswith('" does not exist. Run `manage.py migrate`.')


@pytest.mark.django_db  # The command uses the server of the tests.
def test_a_role_that_may_create_no_tables_is_told_in_one_line(tmp_path: Path) -> None:
    nowhere = {"PGOPTIONS": "-c search_path=nowhere", "SECRET_KEY": "x" * 50}
    done = manage(tmp_path, "migrate", DATABASE_URL=os.environ["DATABASE_URL"], **nowhere)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "CommandError: PostgreSQL refuses this to the role of DATABASE_URL: "
        "no schema has been selected to create in."
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "env", "told"),
    [
        ("usage", {"EMAIL_PORT": "smtp"}, "EMAIL_PORT: expected a whole number from 1, got 'smtp'"),
        ("usage", {"EMAIL_PORT": "65536"}, "EMAIL_PORT: expected a port up to 65535, got 65536"),
        ("worker", {"METRICS_PORT": "99999"}, "METRICS_PORT: expected a port up to 65535"),
        (
            "serve",
            {"METRICS_PORT": "65535", "WORKER_PROCESSES": "2"},
            "METRICS_PORT: 65535 leaves no",
        ),
        (
            "usage",
            {"USAGE_LOG_DAYS": "999999"},
            "USAGE_LOG_DAYS: expected a whole number from 0 to",
        ),
        ("usage", {"DATABASE_TIMEOUT_S": "9999999"}, "DATABASE_TIMEOUT_S: expected a whole number"),
        ("serve", {"PORT": "http"}, "PORT: expected a whole number from 0, got 'http'"),
        (
            "check",
            {"EMAIL_USE_TLS": "true", "EMAIL_USE_SSL": "true"},
            "EMAIL_USE_TLS and EMAIL_USE_SSL: set one of them",
        ),
        ("usage", {"DATABASE_URL": "postgresql://db"}, "DATABASE_URL: expected an address that"),
        ("usage", {"QUEUE_TIMEOUT_S": "9" * 12}, "QUEUE_TIMEOUT_S: expected a whole number from 1"),
        ("usage", {"EVENT_LOG_URLS": ","}, "EVENT_LOG_URLS: expected an address that begins"),
        ("beat", {"MODELS_FILE": "/nowhere"}, "MODELS_FILE: /nowhere: cannot be read"),
        ("web --wait-for-fd 99", {}, "argument --wait-for-fd: 99 is not open in this process"),
        ("web --skip-checks", {"STATIC_ROOT": "/nowhere"}, "STATIC_ROOT: run `manage.py collect"),
        ("pull a/b", {"HF_ENDPOINT": "nope"}, "HF_ENDPOINT is not the address of a hub: nope."),
        ("pull a/b", {"HF_ENDPOINT": "http://[::1"}, "HF_ENDPOINT is not the address of a hub: "),
        ("worker --loglevel loud", {}, "argument --loglevel: invalid choice: 'LOUD'"),
    ],
)
def test_a_wrong_setting_is_told_in_one_line(
    tmp_path: Path, command: str, env: dict[str, str], told: str
) -> None:
    done = manage(tmp_path, *command.split(), **env)
    assert done.returncode in (1, 2)
    assert told in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_celerys_commands_tell_a_wrong_setting_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "celery", "-A", "inference_site", "inspect", "ping"]
    env = {**os.environ, "DATA_DIR": str(tmp_path), "REDIS_URL": "http://redis"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("REDIS_URL: expected ")
    assert done.stderr.endswith(" See docs/settings.md.\n")
    assert len(done.stderr.splitlines()) == 1


def test_celerys_report_names_no_password_and_loads_the_tasks(tmp_path: Path) -> None:
    """The report is made to be sent to others; a worker sends the same to `inspect conf`."""
    roles = ("REDIS_URL", "BROKER_URL", "EVENT_LOG_URLS", "CHANNEL_LAYER_URLS")
    addresses = dict.fromkeys(roles, "redis://site:a-password@redis/0")
    env = {**os.environ, "DATA_DIR": str(tmp_path), "SECRET_KEY": "x" * 50, **addresses}
    command = [str(Path(sys.executable).with_name("celery")), "-A", "inference_site", "report"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "broker_url: 'redis://site:********@redis:6379/0'" in done.stdout
    assert "a-password" not in done.stdout


@pytest.mark.parametrize("command", ["worker", "beat"])
def test_celerys_program_starts_no_process_that_would_do_nothing(
    tmp_path: Path, command: str
) -> None:
    env = {**os.environ, "DATA_DIR": str(tmp_path), "SECRET_KEY": "x" * 50}
    program = [str(Path(sys.executable).with_name("celery")), "-A", "inference_site"]
    options = ["--schedule", str(tmp_path / "schedule")] if command == "beat" else []
    done = subprocess.run(
        [*program, command, *options],
        cwd=ROOT,
        env={**env, "BROKER_URL": f"redis://{NOWHERE}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert f"`manage.py {command}`" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_worker_connects_to_its_broker_twice_a_second_at_most() -> None:
    """Celery connects again at once when a Redis that takes no writes refuses what follows."""
    began = time.monotonic()
    for _ in range(3):
        with app.connection_for_read("memory://") as connection:
            connection.ensure_connection()
    assert time.monotonic() - began > 0.9


def test_an_argument_that_is_no_text_is_told_in_one_line(tmp_path: Path) -> None:
    done = manage(tmp_path, "shell", "-c", "\udcff", SECRET_KEY="x" * 50)
    assert done.returncode == 1
    assert done.stderr.endswith("CommandError: An argument is not valid UTF-8.\n")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("rediss://db", "{'ssl_cert_reqs': 'required'}"),
        ("rediss://db?ssl_ca_certs=/ca.pem", "{'ssl_ca_certs': '/ca.pem'}"),
        ("redis://db", "False"),
    ],
)
def test_celery_checks_the_certificate_of_its_redis(tmp_path: Path, url: str, told: str) -> None:
    code = "from inference_site.celery import app; print(app.connection().ssl)"
    done = manage(tmp_path, "shell", "-c", code, BROKER_URL=url, SECRET_KEY="x" * 50)
    assert done.stdout.splitlines()[-1] == told
    assert "insecure SSL" not in done.stderr


def test_a_reader_that_has_ended_is_no_fault(tmp_path: Path) -> None:
    """As in `manage.py openapi | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    done = manage_into(writer, tmp_path, "openapi", SECRET_KEY="x" * 50)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_full_disk_is_told_in_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = manage_into(full.fileno(), tmp_path, "help", SECRET_KEY="x" * 50)
    told = "CommandError: No space is left on the disk that this writes to.\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_an_interrupted_command_prints_nothing(tmp_path: Path) -> None:
    # Below a shell in the background it would be ignored.
    handle = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    interrupt = f"import signal; {handle}; signal.raise_signal(signal.SIGINT)"
    done = manage(tmp_path, "shell", "--no-imports", "-c", interrupt, SECRET_KEY="x" * 50)
    assert (done.returncode, done.stderr) == (130, "")


def test_the_traceback_is_shown_when_it_is_asked_for(tmp_path: Path) -> None:
    assert "Traceback" in manage(tmp_path, "usage", "--traceback", EMAIL_PORT="smtp").stderr
