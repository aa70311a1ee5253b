"""Accounting: every generation that ends is added up once, whoever does it and whenever it dies."""

from __future__ import annotations

import datetime as dt
import random
import threading
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from axes.models import AccessFailureLog
from django.contrib.sessions.models import Session
from django.db import connection
from django.utils import timezone

from inference_site.accounts.models import ApiKey, Budget, BudgetSpend, Project
from inference_site.core.domain.deltas import MAX_TOKENS
from inference_site.runs.models import Generation, Status
from inference_site.runs.usage import accounting
from inference_site.runs.usage.accounting import account
from inference_site.runs.usage.models import LatencyHistogram, Period, UsageRollup, bucket_of
from inference_site.runs.usage.pruning import prune_old
from tests.generations.rows import create_generation

Key = tuple[ApiKey, str]
NOON = dt.datetime(2026, 5, 31, 12, 0, 30, tzinfo=dt.UTC)


def ended(key: ApiKey, at: dt.datetime = NOON, **fields: Any) -> Generation:
    usual = {
        "status": Status.COMPLETED,
        "created_at": at - dt.timedelta(seconds=3),
        "claimed_at": at - dt.timedelta(seconds=2),
        "first_token_at": at - dt.timedelta(seconds=1),
        "finished_at": at,
        "input_tokens": 10,
        "output_tokens": 11,
    }
    return create_generation(key, **(usual | fields))


def rollup(period: Period, **filters: Any) -> UsageRollup:
    return UsageRollup.objects.get(period=period, **filters)


def test_an_ended_generation_is_in_the_rollups_of_its_minute_hour_and_day(api_key: Key) -> None:
    ended(api_key[0], cached_tokens=4, reasoning_tokens=5, cost=Decimal("0.25"), decode_ms=7)
    ended(api_key[0], status=Status.FAILED, cost=Decimal("0.5"), prefill_ms=2)
    ended(api_key[0], status=Status.CANCELLED, first_token_at=None, output_tokens=0)
    account()
    starts = {
        Period.MINUTE: NOON.replace(second=0),
        Period.HOUR: NOON.replace(second=0),
        Period.DAY: NOON.replace(hour=0, second=0),
    }
    for period, start in starts.items():
        row = rollup(period)
        assert row.start == start
        assert (row.requests, row.completed, row.failed, row.cancelled) == (3, 1, 1, 1)
        assert (row.input_tokens, row.cached_tokens) == (30, 4)
        assert (row.output_tokens, row.reasoning_tokens) == (22, 5)
        assert (row.queue_ms, row.prefill_ms, row.decode_ms) == (3000, 2, 7)
        assert row.cost == Decimal("0.75")


@pytest.mark.parametrize("tokens", [3_000_000, MAX_TOKENS])
def test_a_request_may_have_millions_of_tokens(api_key: Key, tokens: int) -> None:
    ended(api_key[0], input_tokens=tokens, output_tokens=tokens)
    [accounted] = account()
    assert accounted.used_tokens == 2 * tokens
    assert rollup(Period.DAY).output_tokens == tokens
    speed = LatencyHistogram.objects.filter(period=Period.DAY, measure="speed")
    assert set(speed.values_list("bucket", "count")) == {(bucket_of(tokens - 1), 1)}


def test_a_later_step_adds_to_existing_rollups(api_key: Key) -> None:
    for _ in range(3):
        ended(api_key[0])
        account()
    assert account() == []
    assert rollup(Period.DAY).requests == 3
    ttft = LatencyHistogram.objects.filter(period=Period.DAY, measure="ttft")
    assert set(ttft.values_list("bucket", "count")) == {(bucket_of(2000), 3)}


def test_running_and_waiting_generations_are_not_accounted(api_key: Key) -> None:
    create_generation(api_key[0])
    create_generation(api_key[0], status=Status.RUNNING)
    assert account() == []
    assert not UsageRollup.objects.exists()


def test_latencies_are_counted_in_their_buckets(api_key: Key) -> None:
    ended(api_key[0])  # 1 s in the queue, 2 s to the first token, then 10 tokens in 1 s.
    never_claimed: dict[str, Any] = {"claimed_at": None, "first_token_at": None}
    ended(api_key[0], status=Status.CANCELLED, output_tokens=0, **never_claimed)
    account()
    rows = LatencyHistogram.objects.filter(period=Period.MINUTE).values_list("measure", "bucket")
    assert dict(rows) == {
        "queue": bucket_of(1000),
        "ttft": bucket_of(2000),
        "prefill": bucket_of(1000),
        "speed": bucket_of(10),
    }
    assert set(LatencyHistogram.objects.values_list("count", flat=True)) == {1}


@pytest.mark.django_db(transaction=True)
def test_concurrent_steps_count_every_generation_once() -> None:
    project = Project.objects.create(name="p")
    key = ApiKey.objects.create(project=project, name="k")
    budget = Budget.objects.create(project=project, unit="tokens", every="day", amount=10**9)
    dice = random.Random(1)
    rows = [
        ended(key, NOON + dt.timedelta(seconds=dice.randrange(200_000)), model=dice.choice("abc"))
        for _ in range(200)
    ]

    def work() -> None:
        while account(max_rows=7):
            pass
        connection.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for period in Period.values:
        found = UsageRollup.objects.filter(period=period)
        assert sum(row.requests for row in found) == 200
        assert sum(row.output_tokens for row in found) == sum(row.output_tokens for row in rows)
    assert sum(spend.spent for spend in budget.spends.all()) == 200 * 21
    assert not Generation.objects.filter(is_accounted=False).exists()


def other_connection() -> psycopg.Connection[tuple[Any, ...]]:
    url = connection.get_connection_params()
    return psycopg.connect(**{k: url[k] for k in ("dbname", "user", "host", "port") if k in url})


@pytest.mark.django_db(transaction=True)
def test_budgets_are_locked_at_the_end_of_a_step_only(api_key: Key) -> None:
    """Whoever reserves waits for them; the step marks thousands of rows before."""
    budget = Budget.objects.create(project=api_key[0].project, unit="tokens", every="day", amount=9)
    BudgetSpend.objects.create(budget=budget, start=NOON.date())
    ended(api_key[0])
    seen: list[tuple[str, bool]] = []

    def look(execute: Any, sql: str, *rest: Any) -> Any:
        done = execute(sql, *rest)
        with other_connection() as other:
            free = "SELECT id FROM accounts_budgetspend WHERE start = %s FOR UPDATE SKIP LOCKED"
            seen.append((sql, bool(other.execute(free, [NOON.date()]).fetchall())))
        return done

    with connection.execute_wrapper(look):
        assert len(account()) == 1
    first = next(n for n, (_, is_free) in enumerate(seen) if not is_free)
    assert any("is_accounted = true" in sql for sql, _ in seen[:first])
    assert [is_free for _, is_free in seen] == [True] * first + [False] * (len(seen) - first)
    assert len(seen) - first <= 2
    assert spend(budget) == (21.0, 0.0)


def test_a_step_waits_for_another_at_most_wait_ms(db: None) -> None:
    with other_connection() as other:
        other.execute("SELECT pg_advisory_xact_lock(%s)", [accounting._LOCK])
        assert account() == []
        assert account(wait_ms=50) == []
        with connection.cursor() as cursor:
            cursor.execute("SHOW lock_timeout")
            assert cursor.fetchone()[0] == "0"


def spend(budget: Budget) -> tuple[float, float]:
    row = budget.spends.earliest("start")  # There is one of today, too.
    return float(row.spent), float(row.reserved)


def test_actual_usage_replaces_the_reservation_of_a_budget(api_key: Key) -> None:
    key = api_key[0]
    made = {"created_at": NOON - dt.timedelta(days=1)}
    tokens = Budget.objects.create(
        project=key.project, unit="tokens", every="day", amount=100, **made
    )
    money = Budget.objects.create(
        project=key.project, api_key=key, unit="cost", every="month", amount=1, **made
    )
    for budget, held in ((tokens, 50), (money, Decimal("0.5"))):
        start = NOON.date() if budget is tokens else NOON.date().replace(day=1)
        BudgetSpend.objects.create(budget=budget, start=start, reserved=held)
    ended(key, reserved_tokens=40, reserved_cost=Decimal("0.4"), cost=Decimal("0.01"))
    account()
    assert spend(tokens) == (21, 10)
    assert spend(money) == (0.01, 0.1)


def test_other_keys_and_projects_do_not_affect_the_budget_of_a_key(
    api_key: Key, project: Project
) -> None:
    other_key = ApiKey.objects.create(project=project, name="other")
    stranger = ApiKey.objects.create(project=Project.objects.create(name="other"), name="k")
    own = Budget.objects.create(
        project=project, api_key=api_key[0], unit="tokens", every="day", amount=1
    )
    whole = Budget.objects.create(project=project, unit="tokens", every="day", amount=1)
    for key in (api_key[0], other_key, stranger):
        ended(key)
    account()
    assert spend(own)[0] == 21
    assert spend(whole)[0] == 42


def test_a_new_budget_has_no_reservation_for_running_generations(api_key: Key) -> None:
    """Its end must not take away what is held back for another."""
    key = api_key[0]
    budget = Budget.objects.create(
        project=key.project, unit="tokens", every="day", amount=100, created_at=NOON
    )
    BudgetSpend.objects.create(budget=budget, start=NOON.date(), reserved=30)
    ended(key, reserved_tokens=30)
    account()
    assert spend(budget) == (21, 30)


def test_rollups_and_the_log_are_pruned_when_they_are_old(api_key: Key, settings: Any) -> None:
    settings.USAGE_LOG_DAYS = 10
    now = timezone.now()
    kept = [ended(api_key[0], now), ended(api_key[0], now - dt.timedelta(days=9))]
    for days in (11, 36, 500):
        ended(api_key[0], now - dt.timedelta(days=days))
    unaccounted = create_generation(api_key[0], created_at=now - dt.timedelta(days=20))
    account()
    prune_old(threading.Event())
    left = set(Generation.objects.values_list("pk", flat=True))
    assert left == {unaccounted.pk, *(row.pk for row in kept)}
    usage = UsageRollup.objects.all()
    assert usage.filter(period=Period.MINUTE).count() == 1
    assert usage.filter(period=Period.HOUR).count() == 4
    assert usage.filter(period=Period.DAY).count() == 5
    of_key = LatencyHistogram.objects.filter(api_key=api_key[0])
    hours = of_key.filter(period=Period.HOUR, measure="ttft")
    assert hours.count() == 3


@pytest.mark.django_db
def test_failed_logins_are_pruned_after_ninety_days() -> None:
    for days in (1, 89, 91, 500):
        failure = AccessFailureLog.objects.create(username="a", ip_address="192.0.2.1")
        at = timezone.now() - dt.timedelta(days=days)
        AccessFailureLog.objects.filter(pk=failure.pk).update(attempt_time=at)
    prune_old(threading.Event())
    assert AccessFailureLog.objects.count() == 2


@pytest.mark.django_db
def test_sessions_are_deleted_when_they_have_expired() -> None:
    """Each visit of the page of single sign-on makes one, also of strangers."""
    for name, hours in (("old", -1), ("live", 1)):
        at = timezone.now() + dt.timedelta(hours=hours)
        Session.objects.create(session_key=name, session_data="", expire_date=at)
    prune_old(threading.Event())
    assert list(Session.objects.values_list("pk", flat=True)) == ["live"]


def test_without_a_limit_the_log_is_kept(api_key: Key) -> None:
    ended(api_key[0], timezone.now() - dt.timedelta(days=5000))
    account()
    prune_old(threading.Event())
    assert Generation.objects.count() == 1


def test_the_rate_limits_correct_no_indexing_which_they_do_not_count(api_key: Key) -> None:
    embedding: dict[str, Any] = {"kind": "vector_store.embedding", "reserved_tokens": 40}
    ended(api_key[0], **embedding, background=True)
    ended(api_key[0], **embedding)  # Of a search in files, which is part of a response.
    ended(api_key[0], reserved_tokens=50, background=True)
    assert sorted(row.reserved_tokens for row in account()) == [0, 40, 50]
