"""Refused requests: kept up to a rate, counted past it, and never a burden."""

from __future__ import annotations

import datetime as dt
import logging
import sys
import threading
import time
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from inference_site.accounts.keys import digest_of, revoke_key
from inference_site.accounts.models import ApiKey
from inference_site.gateway import access
from inference_site.gateway.access import Access
from inference_site.runs.request_log.models import Refusal
from inference_site.runs.request_log.refusals import (
    RefusalBuffer,
    RefusalWriter,
    RefusedRequest,
    log_counted,
    refusals,
)
from inference_site.runs.usage.pruning import prune_old

Key = tuple[ApiKey, str]


def refused(**fields: Any) -> RefusedRequest:
    return RefusedRequest(**{"status": 401, "error_code": "invalid_api_key", **fields})


def test_each_of_a_few_is_kept() -> None:
    source = RefusalBuffer()
    for number in range(20):
        source.add(refused(path=f"/v1/{number}"))
    taken = source.take()
    assert [one.path for one in taken] == [f"/v1/{number}" for number in range(20)]
    assert {one.count for one in taken} == {1}
    assert source.take() == []


def test_what_comes_past_a_rate_is_counted_and_takes_no_memory() -> None:
    source = RefusalBuffer()
    for number in range(100_000):
        source.add(refused(digest=digest_of(str(number)), path=f"/v1/{number}"))
    taken = source.take()
    assert sum(one.count for one in taken) == 100_000
    assert len(taken) <= 61
    assert sum(map(sys.getsizeof, taken)) < 20_000


def test_a_flood_hides_nobody_elses_requests() -> None:
    source = RefusalBuffer()
    for _ in range(10_000):
        source.add(refused())
    source.add(refused(status=403, api_key_id=7))
    assert [one.api_key_id for one in source.take() if one.status == 403] == [7]


def test_any_number_of_kinds_is_bounded_and_none_is_lost() -> None:
    source = RefusalBuffer()
    for key in range(5_000):
        source.add(refused(api_key_id=key))
    taken = source.take()
    assert sum(one.count for one in taken) == 5_000
    assert len(taken) < 1_000


@pytest.mark.parametrize(("status", "lines"), [(503, 60), (400, 100)])
def test_of_a_flood_of_503_the_log_has_some_and_a_number(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, status: int, lines: int
) -> None:
    scope = {"type": "http", "method": "POST", "path": "/v1/models", "headers": []}
    source = RefusalBuffer()
    monkeypatch.setattr(access, "refusals", source)
    with caplog.at_level(logging.INFO):
        for _ in range(100):
            one = Access(scope, lambda _: None)  # type: ignore[arg-type,return-value]  # Unused.
            one._status, one._is_complete = status, True
            one.facts.update(error_code="queue_full", api_key=1)
            one.end()
        log_counted(source.take())
    assert sum(record.message == "answered" for record in caplog.records) == lines
    assert "refused 40 requests with the same error" in caplog.text


def test_a_request_waits_less_than_a_fifth_of_a_millisecond() -> None:
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [(b"authorization", b"Bearer sk-unknown" + b"x" * 40)],
    }

    def ended(**facts: Any) -> float:
        times = []
        for _ in range(500):
            one = Access(scope, lambda _: None)  # type: ignore[arg-type,return-value]  # Unused.
            one._status, one._is_complete = 401, True
            one.facts.update(route="v1/chat/completions", **facts)
            began = time.process_time()
            one.end()
            times.append(time.process_time() - began)
        return sorted(times)[len(times) // 2]

    try:
        added_s = ended(error_code="invalid_api_key") - ended()
    finally:
        refusals.take()
    print(f"{added_s * 1e6:.1f} µs")
    assert added_s < 0.0002


@pytest.mark.django_db
def test_a_key_that_was_revoked_is_named_and_an_unknown_one_is_not(api_key: Key) -> None:
    key, secret = api_key
    revoke_key(key)
    source = RefusalBuffer()
    source.add(refused(digest=digest_of(secret)))
    source.add(refused(digest=digest_of("sk-nobody's")))
    assert RefusalWriter(source).write()
    known, unknown = Refusal.objects.order_by("pk")
    assert (known.api_key_id, known.project_id) == (key.pk, key.project_id)
    assert (unknown.api_key_id, unknown.project_id) == (None, None)


@pytest.mark.django_db(transaction=True)
def test_what_cannot_be_stored_is_held_up_to_a_bound_and_stored_later() -> None:
    source = RefusalBuffer()
    writer = RefusalWriter(source)
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE request_log_refusal RENAME TO elsewhere")
    try:
        for key in range(300):
            source.add(refused(api_key_id=key))
        assert not writer.write()
        source.add(refused(status=503))
        assert not writer.write()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE elsewhere RENAME TO request_log_refusal")
    assert writer.write()
    assert Refusal.objects.count() == 301


@pytest.mark.django_db
def test_they_are_kept_for_their_days(settings: Any) -> None:
    settings.REFUSALS_DAYS = 3
    for days in (5, 4, 2, 0):
        at = timezone.now() - dt.timedelta(days=days)
        Refusal.objects.create(status=401, created_at=at)
    prune_old(threading.Event())
    assert Refusal.objects.count() == 2
    settings.REFUSALS_DAYS = 0
    prune_old(threading.Event())
    assert Refusal.objects.count() == 2
