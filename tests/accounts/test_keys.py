"""API keys: made once, kept as hashes, refused when revoked."""

from __future__ import annotations

import datetime as dt
import hashlib
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.admin.models import ADDITION, LogEntry
from django.core.management import CommandError, call_command
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from inference_site.accounts import keys
from inference_site.accounts.keys import (
    Caller,
    Limits,
    create_key,
    find_caller,
    revoke_key,
    rotate_key,
)
from inference_site.accounts.models import ApiKey, KeySecret, Project
from tests.statements import prepared_runs, rows_updated

Key = tuple[ApiKey, str]


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the cache, which starts empty."""
    stopped = Clock()
    monkeypatch.setattr(keys, "time", SimpleNamespace(monotonic=stopped.monotonic))
    monkeypatch.setattr(keys, "_cache", {})
    return stopped


def test_a_key_finds_its_caller(api_key: Key) -> None:
    record, secret = api_key
    found = find_caller(secret)
    assert found == Caller(
        record.pk,
        record.project_id,
        "owner",
        frozenset({"inference", "usage:read"}),
        limits=(Limits("key"), Limits("project")),
    )


def test_the_secret_is_not_kept(api_key: Key) -> None:
    record, secret = api_key
    key = ApiKey.objects.filter(pk=record.pk).values().get()
    kept = KeySecret.objects.filter(api_key=record).values().get()
    assert kept["digest"] == hashlib.sha256(secret.encode()).hexdigest()
    assert key["prefix"] == secret[:10]
    assert not [value for row in (key, kept) for value in row.values() if secret[10:] in str(value)]


def test_a_key_is_long_random_and_its_own(project: Project) -> None:
    secrets = {create_key(project, "same name")[1] for _ in range(50)}
    assert len(secrets) == 50
    assert all(secret.startswith("sk-") and len(secret) >= 50 for secret in secrets)


def test_neither_the_prefix_nor_the_hash_is_accepted_as_a_key(api_key: Key) -> None:
    record, secret = api_key
    digest = record.secrets.get().digest
    for given in (record.prefix, digest, secret.upper(), f"{secret} ", secret[:-1]):
        assert find_caller(given) is None


def test_revoking_again_keeps_the_first_time(api_key: Key) -> None:
    record, _ = api_key
    revoke_key(record)
    first = ApiKey.objects.get(pk=record.pk).revoked_at
    revoke_key(record)
    assert ApiKey.objects.get(pk=record.pk).revoked_at == first is not None


def test_revoking_one_key_leaves_the_others(api_key: Key, project: Project) -> None:
    _, other = create_key(project, "other")
    revoke_key(api_key[0])
    assert find_caller(other) is not None


def test_finding_a_caller_is_one_statement_and_then_none_for_five_seconds(
    api_key: Key, clock: Clock, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    find_caller(api_key[1])  # The first one also notes that the key is used.
    clock.now += 5.1
    runs = prepared_runs()
    for done in (1, 2):
        with django_assert_num_queries(0):
            for _ in range(3):
                find_caller(api_key[1])
        assert prepared_runs() - runs == done
        clock.now += 5.1


def test_a_read_of_a_secret_in_a_minute_writes_nothing(api_key: Key, clock: Clock) -> None:
    before = rows_updated("accounts_apikey")
    for _ in range(3):
        assert find_caller(api_key[1]) is not None
        assert rows_updated("accounts_apikey") - before == 1
        clock.now += 5.1


def test_the_callers_of_the_last_minute_are_read_again_with_one_query(
    project: Project, clock: Clock
) -> None:
    secrets = [create_key(project, "n")[1] for _ in range(3)]
    for secret in secrets:
        find_caller(secret)
    for _ in range(17):
        clock.now += 3.5
        runs = prepared_runs()
        keys.refresh_callers()
        assert prepared_runs() - runs == 1
    Project.objects.update(requests_per_minute=7)
    keys.refresh_callers()
    clock.now += 4.9
    runs = prepared_runs()
    for found in map(find_caller, secrets):
        assert found is not None
        assert Limits("project", requests_per_minute=7) in found.limits
    assert prepared_runs() == runs
    clock.now += 60
    keys.refresh_callers()
    assert prepared_runs() == runs, "Nobody asks any more."


def test_a_key_that_another_process_revoked_is_refused_once_it_is_read_again(
    api_key: Key, clock: Clock
) -> None:
    record, secret = api_key
    find_caller(secret)
    ApiKey.objects.filter(pk=record.pk).update(revoked_at=timezone.now())
    assert find_caller(secret) is not None
    keys.refresh_callers()
    assert find_caller(secret) is None


def test_a_key_that_is_revoked_while_callers_are_read_stays_refused(
    api_key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, secret = api_key
    find_caller(secret)
    query = keys._query_callers

    def revoked_after(*args: Any, **params: Any) -> dict[str, Caller]:
        found = query(*args, **params)
        revoke_key(record)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(keys, "_query_callers", revoked_after)
        keys.refresh_callers()
    assert find_caller(secret) is None


def test_to_read_a_caller_again_is_no_use_of_the_key(api_key: Key, clock: Clock) -> None:
    record, secret = api_key
    find_caller(secret)
    long_ago = timezone.now() - dt.timedelta(seconds=90)
    ApiKey.objects.filter(pk=record.pk).update(last_used_at=long_ago)
    clock.now += 4
    keys.refresh_callers()
    record.refresh_from_db()
    assert record.last_used_at == long_ago
    find_caller(secret)
    clock.now += 3
    keys.refresh_callers()
    record.refresh_from_db()
    assert record.last_used_at > long_ago


def test_refused_secrets_are_not_cached(project: Project) -> None:
    """A key that is made while somebody tries it works at once."""
    assert find_caller("sk-chosen") is None
    record = ApiKey.objects.create(project=project, name="n", prefix="sk-chosen")
    digest = hashlib.sha256(b"sk-chosen").hexdigest()
    KeySecret.objects.create(api_key=record, digest=digest)
    assert find_caller("sk-chosen") is not None


def test_the_cache_is_bounded(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_CACHE_SIZE", 3)
    for _ in range(10):
        assert find_caller(create_key(project, "n")[1]) is not None
        assert len(keys._cache) <= 3


def test_after_a_rotation_both_secrets_are_valid_for_the_overlap(api_key: Key) -> None:
    record, old = api_key
    new = rotate_key(record, dt.timedelta(hours=1))
    assert find_caller(old) is not None
    assert find_caller(new) == find_caller(old)
    record.refresh_from_db()
    assert record.prefix == new[:10]
    record.secrets.filter(expires_at__isnull=False).update(expires_at=timezone.now())
    keys._cache.clear()
    assert find_caller(old) is None
    assert find_caller(new) is not None


def test_a_rotation_without_overlap_refuses_the_old_secret_at_once(api_key: Key) -> None:
    record, old = api_key
    assert find_caller(old) is not None
    rotate_key(record, dt.timedelta(0))
    assert find_caller(old) is None


def test_a_second_rotation_does_not_prolong_the_first_secret(api_key: Key) -> None:
    record, first = api_key
    rotate_key(record, dt.timedelta(0))
    rotate_key(record, dt.timedelta(hours=1))
    assert find_caller(first) is None


def test_revoking_refuses_all_secrets(api_key: Key) -> None:
    record, old = api_key
    new = rotate_key(record, dt.timedelta(hours=1))
    assert find_caller(old) is not None
    assert find_caller(new) is not None
    revoke_key(record)
    assert [find_caller(old), find_caller(new)] == [None, None]


def test_the_last_use_is_recorded_to_the_minute(api_key: Key, clock: Clock) -> None:
    record, secret = api_key
    find_caller(secret)
    record.refresh_from_db()
    first = record.last_used_at
    assert first is not None
    clock.now += 6
    find_caller(secret)
    record.refresh_from_db()
    assert record.last_used_at == first
    ApiKey.objects.filter(pk=record.pk).update(last_used_at=first - dt.timedelta(seconds=61))
    clock.now += 6
    find_caller(secret)
    record.refresh_from_db()
    assert record.last_used_at is not None
    assert record.last_used_at >= first


def create_api_key(*arguments: str) -> str:
    out = StringIO()
    call_command("create_api_key", *arguments, stdout=out)
    return out.getvalue()


@pytest.mark.django_db
def test_the_command_prints_the_key_and_nothing_else() -> None:
    printed = create_api_key("--project", "new", "--name", "laptop")
    caller = find_caller(printed.removesuffix("\n"))
    assert caller is not None
    record = ApiKey.objects.get(pk=caller.api_key_id)
    assert (record.name, record.project.name) == ("laptop", "new")


@pytest.mark.django_db
def test_a_key_of_the_command_is_in_the_audit_log() -> None:
    create_api_key("--project", "new", "--name", "laptop")
    said = ("command line", ADDITION, "Made by manage.py create_api_key.")
    entries = LogEntry.objects.values_list("user__username", "action_flag", "change_message")
    assert list(entries) == [said, said]
    assert {str(entry.get_edited_object()) for entry in LogEntry.objects.all()} == {
        str(Project.objects.get()),
        str(ApiKey.objects.get()),
    }


def test_the_command_uses_an_existing_project(project: Project) -> None:
    create_api_key("--project", project.name, "--name", "a")
    create_api_key("--project", f" {project.name}\n", "--name", "b")
    assert Project.objects.count() == 1
    assert project.api_keys.count() == 2


def test_the_command_says_that_a_key_of_an_inactive_project_is_refused(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """It printed a key that every request is refused with, and nothing of the reason."""
    Project.objects.update(is_active=False)
    printed = create_api_key("--project", project.name, "--name", "a")
    assert find_caller(printed.strip()) is None
    assert f"The project {project.name} is inactive" in capsys.readouterr().err


@pytest.mark.django_db
def test_the_command_gives_the_named_scopes() -> None:
    printed = create_api_key("--name", "ops", "--scope", "admin", "--scope", "models:write")
    caller = find_caller(printed.strip())
    assert caller is not None
    assert caller.scopes == {"admin", "models:write"}


@pytest.mark.django_db
def test_the_command_needs_a_name() -> None:
    with pytest.raises(CommandError, match="--name"):
        create_api_key()
    assert not ApiKey.objects.exists()


@pytest.mark.django_db
@pytest.mark.parametrize("wrong", ["", " ", "x" * 101])
@pytest.mark.parametrize("option", ["--name", "--project"])
def test_a_name_that_no_form_takes_makes_neither_a_key_nor_a_project(
    option: str, wrong: str
) -> None:
    given = {"--name": "laptop", "--project": "new", option: wrong}
    with pytest.raises(CommandError, match=option):
        create_api_key(*(text for pair in given.items() for text in pair))
    assert not Project.objects.exists()
