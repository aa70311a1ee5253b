"""Who is claimed next, and that no two claimers meet."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils import timezone

from inference_site.accounts.keys import create_key
from inference_site.accounts.models import ApiKey, Project
from inference_site.runs.models import CLAIM, Claim, Generation, ServiceClass, Status
from tests.generations.rows import create_generation

Key = tuple[ApiKey, str]
_ENDED = """
INSERT INTO generations_generation
SELECT filled.* FROM generations_generation one, generate_series(1, 20000) number,
    LATERAL jsonb_populate_record(one, jsonb_build_object(
        'id', nextval(pg_get_serial_sequence('generations_generation', 'id')),
        'public_id', 'ended-' || number, 'status', 'completed', 'claimed_at', now(),
        'finished_at', now())) filled
"""


@pytest.fixture
def other_key(db: None) -> ApiKey:
    """A key of another project."""
    return create_key(Project.objects.create(name="other"), "test")[0]


def waiting(api_key: ApiKey, age_s: float, **fields: object) -> Generation:
    created_at = timezone.now() - timedelta(seconds=age_s)
    return create_generation(api_key, created_at=created_at, **fields)


def claimed_order(count: int, model: str = "m") -> list[str]:
    claims = [Generation.objects.claim(model, "w") for _ in range(count)]
    return [claim.public_id for claim in claims if claim is not None]


def test_the_oldest_is_claimed_first(api_key: Key) -> None:
    middle, oldest, newest = (waiting(api_key[0], age_s=age) for age in (20, 30, 10))
    assert claimed_order(4) == [oldest.public_id, middle.public_id, newest.public_id]


def test_what_runs_is_counted_once_for_all_that_wait(api_key: Key, other_key: ApiKey) -> None:
    for key in (api_key[0], api_key[0], other_key):
        waiting(key, age_s=1)
        create_generation(key, status=Status.RUNNING, claimed_at=timezone.now())
    [share] = [node for node in nodes(claim_plan()) if node.get("Subplan Name") == "CTE share"]
    assert (share["Actual Rows"], share["Actual Loops"]) == (2, 1)


def test_a_claim_reads_few_rows_however_many_wait(api_key: Key, other_key: ApiKey) -> None:
    ended_and_analyzed(api_key[0])
    for age in range(100):
        waiting(api_key[0], age_s=age)
        waiting(other_key, age_s=age, service_class=ServiceClass.BACKGROUND)
    scans = [node for node in nodes(claim_plan()) if "Scan" in node["Node Type"]]
    assert sum(node["Actual Rows"] * node["Actual Loops"] for node in scans) < 30


def ended_and_analyzed(api_key: ApiKey) -> None:
    """Give PostgreSQL the statistics of a time when thousands had ended and nothing waited."""
    row = waiting(api_key, age_s=5)
    with connection.cursor() as cursor:
        cursor.execute(_ENDED)
        row.delete()
        cursor.execute("ANALYZE generations_generation")


def claim_plan() -> dict[str, Any]:
    """Claim; return how PostgreSQL did it."""
    given: dict[str, str | bool | int] = {
        "model": "m",
        "worker": "w",
        "served": "{}",
        "is_idle": True,
        "may_drain": True,
        "below": 11,
    }
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {CLAIM}", given)
        (found,) = cursor.fetchone()[0]
    plan: dict[str, Any] = found["Plan"]
    return plan


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all nodes of a plan."""
    return [plan, *(node for part in plan.get("Plans", ()) for node in nodes(part))]


def test_better_classes_go_before_older_generations(api_key: Key) -> None:
    background = waiting(api_key[0], age_s=100, service_class=ServiceClass.BACKGROUND)
    foreground = waiting(api_key[0], age_s=10, service_class=ServiceClass.FOREGROUND)
    priority = waiting(api_key[0], age_s=1, service_class=ServiceClass.PRIORITY)
    expected = [priority.public_id, foreground.public_id, background.public_id]
    assert claimed_order(3) == expected


def test_projects_take_turns_whatever_the_age_of_their_requests(
    api_key: Key, other_key: ApiKey
) -> None:
    crowd = [waiting(api_key[0], age_s=100 - n) for n in range(3)]
    late = [waiting(other_key, age_s=10 - n) for n in range(2)]
    assert claimed_order(5) == [
        g.public_id for g in (crowd[0], late[0], crowd[1], late[1], crowd[2])
    ]


def test_a_single_slot_goes_from_one_project_to_the_next(api_key: Key, other_key: ApiKey) -> None:
    """Nothing runs when it is free, so only who was served last tells whose turn it is."""
    third = create_key(Project.objects.create(name="third"), "test")[0]
    crowd = [waiting(api_key[0], age_s=100 - n) for n in range(5)]
    late = [waiting(key, age_s=10) for key in (other_key, third)]
    served: list[int] = []
    order = []
    for _ in range(7):
        claim = Generation.objects.claim("m", "w", served)
        assert claim is not None
        assert Generation.objects.finish(claim, Status.COMPLETED)
        order.append(claim.public_id)
        served = [one for one in served if one != claim.project_id] + [claim.project_id]
    first, *rest = crowd
    assert order == [g.public_id for g in (first, *late, *rest)]


def test_the_class_counts_more_than_the_share(api_key: Key, other_key: ApiKey) -> None:
    create_generation(api_key[0], status=Status.RUNNING)
    foreground = waiting(api_key[0], age_s=1)
    background = waiting(other_key, age_s=100, service_class=ServiceClass.BACKGROUND)
    assert claimed_order(2) == [foreground.public_id, background.public_id]


def test_what_runs_on_other_models_is_no_part_of_the_share(api_key: Key, other_key: ApiKey) -> None:
    for _ in range(3):
        create_generation(api_key[0], model="another", status=Status.RUNNING)
    older, newer = waiting(api_key[0], age_s=20), waiting(other_key, age_s=10)
    assert claimed_order(2) == [older.public_id, newer.public_id]


def test_only_waiting_rows_of_the_model_are_claimed(api_key: Key) -> None:
    waiting(api_key[0], age_s=10, model="another")
    create_generation(api_key[0], status=Status.RUNNING)
    create_generation(api_key[0], status=Status.FAILED, finished_at=timezone.now())
    assert Generation.objects.claim("m", "w") is None


def test_a_claim_says_what_was_claimed_and_the_row_by_whom(api_key: Key) -> None:
    row = waiting(api_key[0], age_s=10)
    claim = Generation.objects.claim("m", "host:1")
    assert claim is not None
    assert claim == Claim(
        row.public_id, row.kind, attempt=1, worker="host:1", request_id=row.request_id, model="m"
    )
    row.refresh_from_db()
    assert (row.status, row.worker, row.attempt) == (Status.RUNNING, "host:1", 1)
    assert row.queue_ms is not None
    assert 10_000 <= row.queue_ms < 60_000
    assert claim.waited_s == pytest.approx(row.queue_ms / 1000)


@pytest.mark.parametrize("ahead_s", [3600, -3600])
def test_the_end_of_a_run_is_by_the_clock_that_its_claim_is_by(
    api_key: Key, ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a worker whose clock differs, or is set during a run, makes durations of an hour."""
    row = waiting(api_key[0], age_s=10)
    wrong = timezone.now() + timedelta(seconds=ahead_s)
    monkeypatch.setattr(timezone, "now", lambda: wrong)
    claim = Generation.objects.claim("m", "w")
    assert claim is not None
    assert Generation.objects.finish(claim, Status.COMPLETED, first_token_at=claim.now())
    row.refresh_from_db()
    assert row.claimed_at is not None
    assert row.first_token_at is not None
    assert row.finished_at is not None
    assert row.claimed_at <= row.first_token_at <= row.finished_at
    assert row.finished_at < row.claimed_at + timedelta(minutes=1)


def test_an_isolated_run_is_left_to_an_idle_worker_for_a_minute(api_key: Key) -> None:
    suspect = waiting(api_key[0], age_s=90, alone_since=timezone.now())
    assert Generation.objects.claim("m", "busy", is_idle=False) is None
    claim = Generation.objects.claim("m", "idle")
    assert claim is not None
    assert claim.is_isolated
    Generation.objects.requeue(claim.public_id, claim.worker, claim.attempt)
    assert Generation.objects.claim("m", "busy", is_idle=False) is None
    later = timezone.now() - timedelta(seconds=61)
    Generation.objects.filter(pk=suspect.pk).update(alone_since=later)
    claim = Generation.objects.claim("m", "busy", is_idle=False)
    assert claim is not None
    assert claim.is_isolated


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("claimers", [4, pytest.param(16, marks=pytest.mark.stress)])
def test_concurrent_claimers_take_every_row_exactly_once(api_key: Key, claimers: int) -> None:
    other = create_key(Project.objects.create(name="other"), "test")[0]
    keys = (api_key[0], other)
    rows = {waiting(keys[n % 3 == 0], age_s=n).public_id for n in range(160)}
    start = threading.Barrier(claimers)

    def claim_all(number: int) -> list[str]:
        start.wait(60)
        mine = []
        while (claim := Generation.objects.claim("m", f"w{number}")) is not None:
            mine.append(claim.public_id)
        return mine

    with ThreadPoolExecutor(claimers) as pool:
        taken = [id_ for mine in pool.map(claim_all, range(claimers)) for id_ in mine]
    assert len(taken) == 160
    assert set(taken) == rows
    assert set(Generation.objects.values_list("attempt", flat=True)) == {1}


@pytest.mark.django_db(transaction=True)
def test_what_fifteen_others_are_taking_changes_no_order(api_key: Key) -> None:
    other = create_key(Project.objects.create(name="other"), "test")[0]
    crowd = [waiting(api_key[0], age_s=1000 - n) for n in range(20)]
    few = [waiting(other, age_s=10 - n) for n in range(3)]
    urgent = [waiting(other, age_s=1, service_class=ServiceClass.URGENT) for _ in range(2)]
    held = [row.pk for row in (*crowd[:13], few[0], urgent[0])]

    with ThreadPoolExecutor(1) as pool, transaction.atomic():
        assert len(Generation.objects.select_for_update().filter(pk__in=held)) == 15
        taken = pool.submit(claimed_order, 6).result(timeout=60)
    next_of_crowd = (crowd[n].public_id for n in (13, 14, 15))
    first, second, third = next_of_crowd
    assert taken == [urgent[1].public_id, first, second, few[1].public_id, third, few[2].public_id]


@pytest.mark.django_db(transaction=True)
def test_a_claimer_passes_over_what_another_is_taking(api_key: Key) -> None:
    first, second = waiting(api_key[0], age_s=20), waiting(api_key[0], age_s=10)

    def claim() -> Claim | None:
        return pool.submit(Generation.objects.claim, "m", "w").result(timeout=60)

    with ThreadPoolExecutor(1) as pool, transaction.atomic():
        Generation.objects.select_for_update().get(pk=first.pk)
        taken = claim()
        assert taken is not None
        assert taken.public_id == second.public_id
        assert claim() is None
    assert claimed_order(1) == [first.public_id]
