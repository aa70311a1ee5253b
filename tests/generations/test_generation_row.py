"""The moves of a generation and what the database refuses."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from inference_site.accounts.models import ApiKey
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.runs.models import TERMINAL, Claim, Generation, ServiceClass, Status
from tests.generations.rows import create_generation

Key = tuple[ApiKey, str]
START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def claim(api_key: Key) -> Claim:
    """A hold on a running generation."""
    create_generation(api_key[0])
    held = Generation.objects.claim("m", "w")
    assert held is not None
    return held


def finished(public_id: str) -> Generation:
    return Generation.objects.get(public_id=public_id)


def test_finishing_stores_the_result(claim: Claim) -> None:
    assert Generation.objects.finish(claim, Status.COMPLETED, output_tokens=7, finish_reason="stop")
    row = finished(claim.public_id)
    assert (row.status, row.output_tokens, row.finish_reason) == (Status.COMPLETED, 7, "stop")
    assert row.finished_at is not None


@pytest.mark.parametrize(
    "other",
    [
        {"worker": "somebody else"},
        {"attempt": 2},
    ],
)
def test_only_the_holder_of_the_claim_finishes(claim: Claim, other: dict[str, Any]) -> None:
    Generation.objects.filter(public_id=claim.public_id).update(**other)
    assert not Generation.objects.finish(claim, Status.COMPLETED, output_tokens=7)
    row = finished(claim.public_id)
    assert (row.status, row.output_tokens) == (Status.RUNNING, 0)


def test_a_row_that_is_inserted_has_what_it_was_made_with(api_key: Key) -> None:
    made = Generation(
        public_id="chatcmpl-1",
        kind="chat.completion",
        project_id=api_key[0].project_id,
        api_key_id=api_key[0].pk,
        model="m",
        request_id="req_test",
        service_class=ServiceClass.BACKGROUND,
        streamed=True,
        background=True,
        end_user="somebody",
        ignored_params=["a", "b"],
        preferred_worker="w",
        reserved_tokens=7,
        reserved_cost=Decimal("0.25"),
        created_at=START,
    )
    made.insert()
    stored = Generation.objects.values().get(pk=made.pk)
    assert stored == {name: getattr(made, name) for name in stored}


def test_what_waits_cannot_be_finished(claim: Claim) -> None:
    Generation.objects.filter(public_id=claim.public_id).update(status=Status.QUEUED)
    assert not Generation.objects.finish(claim, Status.COMPLETED)
    assert finished(claim.public_id).status == Status.QUEUED


MOVES: dict[str, Callable[[Claim], object]] = {
    "finish": lambda claim: Generation.objects.finish(claim, Status.COMPLETED, output_tokens=9),
    "fail_running": lambda claim: Generation.objects.fail_running(
        claim.public_id, claim.worker, claim.attempt, "worker_lost"
    ),
    "expire_queued": lambda claim: Generation.objects.expire_queued(
        claim.public_id, "queue_timeout"
    ),
    "cancel_queued": lambda claim: Generation.objects.cancel_queued([claim.public_id]),
    "claim": lambda _: Generation.objects.claim("m", "w"),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("status", sorted(TERMINAL))
def test_no_move_changes_a_terminal_state(claim: Claim, status: Status, move: str) -> None:
    Generation.objects.finish(claim, status, output_tokens=5, error_code="first")
    before = Generation.objects.filter(public_id=claim.public_id).values().get()
    assert not MOVES[move](claim)
    assert Generation.objects.filter(public_id=claim.public_id).values().get() == before


def test_an_abandoned_generation_fails_once(claim: Claim) -> None:
    assert not Generation.objects.fail_running(claim.public_id, "somebody else", 1, "worker_lost")
    assert not Generation.objects.fail_running(claim.public_id, "w", 2, "worker_lost")
    assert Generation.objects.fail_running(claim.public_id, "w", 1, "worker_lost")
    row = finished(claim.public_id)
    assert (row.status, row.error_code) == (Status.FAILED, "worker_lost")


def test_a_claimed_generation_neither_expires_nor_is_cancelled_behind_its_worker(
    claim: Claim,
) -> None:
    assert not Generation.objects.expire_queued(claim.public_id, "queue_timeout")
    assert not Generation.objects.cancel_queued([claim.public_id])
    assert finished(claim.public_id).status == Status.RUNNING


def test_what_waits_is_cancelled_at_once_and_never_claimed(api_key: Key) -> None:
    row = create_generation(api_key[0])
    assert Generation.objects.cancel_queued([row.public_id]) == [row.public_id]
    assert finished(row.public_id).status == Status.CANCELLED
    assert finished(row.public_id).finished_at is not None
    assert Generation.objects.claim("m", "w") is None


@pytest.mark.parametrize(
    ("constraint", "fields"),
    [
        ("generation_status_known", {"status": "paused"}),
        ("generation_finished_iff_terminal", {"status": Status.COMPLETED}),
        ("generation_finished_iff_terminal", {"status": Status.RUNNING, "finished_at": START}),
        ("generation_finished_iff_terminal", {"status": Status.QUEUED, "finished_at": START}),
        ("generation_token_parts", {"input_tokens": 3, "cached_tokens": 4}),
        ("generation_token_parts", {"output_tokens": 3, "reasoning_tokens": 4}),
        ("attempt_check", {"attempt": -1}),
        ("public_id", {"public_id": "twice"}),
    ],
)
def test_the_database_refuses_impossible_rows(
    api_key: Key, constraint: str, fields: dict[str, Any]
) -> None:
    create_generation(api_key[0], public_id="twice")
    with pytest.raises(IntegrityError, match=constraint), transaction.atomic():
        create_generation(api_key[0], **fields)


@pytest.mark.django_db
def test_a_connection_is_not_given_back_inside_a_transaction() -> None:
    with release_connection_after(), connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    assert connection.connection is not None


@pytest.mark.django_db(transaction=True)
def test_a_connection_is_given_back_after_a_move(claim: Claim) -> None:
    assert connection.connection is None
    Generation.objects.finish(claim, Status.COMPLETED)
    assert connection.connection is None


def test_times_are_milliseconds_from_acceptance() -> None:
    row = Generation(
        created_at=START,
        claimed_at=START + timedelta(seconds=1.5),
        first_token_at=START + timedelta(seconds=2),
    )
    assert (row.queue_ms, row.ttft_ms) == (1500.0, 2000.0)


def test_times_of_what_has_not_happened_are_unknown() -> None:
    row = Generation(created_at=timezone.now())
    assert (row.queue_ms, row.ttft_ms, row.tokens_per_s) == (None, None, None)


@pytest.mark.parametrize(
    ("output_tokens", "decode_s", "speed"),
    [(11, 2.0, 5.0), (2, 0.5, 2.0), (1, 2.0, None), (0, 2.0, None), (11, 0.0, None)],
)
def test_speed_is_tokens_after_the_first_over_the_time_since_it(
    output_tokens: int, decode_s: float, speed: float | None
) -> None:
    row = Generation(
        created_at=START,
        first_token_at=START + timedelta(seconds=60),
        finished_at=START + timedelta(seconds=60 + decode_s),
        output_tokens=output_tokens,
    )
    assert row.tokens_per_s == speed
