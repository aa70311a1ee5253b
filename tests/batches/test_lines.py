"""The lines of a batch: each state change is guarded by the state of its batch."""

from __future__ import annotations

import datetime as dt
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection, transaction
from django.test import Client
from django.utils import timezone

from inference_site.accounts.models import ApiKey
from inference_site.batches.models import (
    MAX_FEEDS,
    Batch,
    BatchLine,
    BatchStatus,
    LineState,
    deliver,
    prune,
)
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.runs.models import Status
from inference_site.runs.streams.batches import Ending

Key = tuple[ApiKey, str]


REFUSED = Ending((), 429, b"{}", error_code="rate_limit_exceeded", retry_after_s=1)
LOST = Ending((), 503, b"{}", error_code="worker_lost")


def two_lines(key: ApiKey) -> tuple[Batch, BatchLine, BatchLine]:
    """Return a batch that is in progress, and its lines, which wait."""
    batch = Batch.objects.create(
        public_id="batch_1",
        project_id=key.project_id,
        api_key=key,
        window_s=60,
        expires_at=timezone.now() + dt.timedelta(hours=1),
        status=BatchStatus.IN_PROGRESS,
    )
    first, second = (
        BatchLine.objects.create(batch=batch, number=number, custom_id=str(number), request="")
        for number in (1, 2)
    )
    return batch, first, second


def rest_after(line: BatchLine, ending: Ending) -> float:
    """Let a line run and end like this; return the seconds until it runs again, 0 for never."""
    generation_id = f"chatcmpl-{line.number}"
    assert BatchLine.objects.begin(line, generation_id)
    deliver(generation_id, Status.FAILED, ending, Decimal(0))
    line.refresh_from_db()
    if line.state == LineState.ENDED:
        return 0
    assert line.state == LineState.PENDING
    assert line.resume_at is not None
    return (line.resume_at - timezone.now()).total_seconds()


@pytest.mark.django_db
def test_lines_of_ended_batches_are_deleted_and_those_of_others_are_not_read(api_key: Key) -> None:
    """All lines were read once a minute: half a million took a second and a half."""
    key, most = api_key[0], 5_000
    going_on, *_ = two_lines(key)
    window = {"window_s": 60, "expires_at": going_on.expires_at}
    ended = Batch.objects.bulk_create(
        Batch(
            public_id=f"batch_{number}",
            project_id=key.project_id,
            api_key=key,
            status=BatchStatus.COMPLETED,
            **window,
        )
        for number in range(2, 202)
    )
    BatchLine.objects.bulk_create(
        BatchLine(batch=batch, number=number, custom_id=str(number), request="")
        for batch, numbers in ((going_on, range(3, most + 1)), (ended[7], range(1, 4)))
        for number in numbers
    )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE batches_batch, batches_batchline")
    assert prune(time.monotonic() + 60) == 3
    read = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = %s"
    counts = []
    for _ in range(2):
        with connection.cursor() as cursor:
            cursor.execute(read, ["batches_batchline"])
            counts += cursor.fetchone()
        assert prune(time.monotonic() + 60) == 0
    assert counts[1] - counts[0] < most / 5
    assert BatchLine.objects.filter(batch=going_on).count() == most


@pytest.mark.django_db
def test_line_that_a_server_refuses_for_now_is_tried_again_after_longer_and_longer(
    api_key: Key,
) -> None:
    _, line, _ = two_lines(api_key[0])
    rests = [rest_after(line, REFUSED) for _ in range(12)]
    for rest, expected in zip(rests, (5, 10, 20, 40, 80, 160, 320, *[600] * 5), strict=True):
        assert expected - 4 < rest <= expected + 1
    later = Ending((), 429, b"{}", error_code="rate_limit_exceeded", retry_after_s=3000)
    assert rest_after(line, later) > 2900
    assert line.answer == ""
    assert rest_after(line, Ending((), 200, b"{}")) == 0


@pytest.mark.django_db
def test_server_that_refuses_lines_for_now_gets_no_others_meanwhile(api_key: Key) -> None:
    batch, line, other = two_lines(api_key[0])
    held_up = []
    for _ in range(4):
        rest_after(line, REFUSED)
        held_up.append(bool(BatchLine.objects.held_up([batch])))
    # A line that is refused again and again, for its size say, does not hold up the others.
    assert held_up == [True, True, True, False]
    rest_after(other, REFUSED)
    assert BatchLine.objects.held_up([batch])
    BatchLine.objects.filter(batch=batch).update(resume_at=timezone.now())
    assert not BatchLine.objects.held_up([batch])


@pytest.mark.django_db
def test_refusals_do_not_count_as_faults_of_the_site(api_key: Key) -> None:
    _, line, other = two_lines(api_key[0])
    for _ in range(MAX_FEEDS):
        rest_after(line, REFUSED)
    assert rest_after(line, LOST) > 0
    assert rest_after(line, LOST) == 0
    assert [rest_after(other, LOST) > 0 for _ in range(MAX_FEEDS)] == [True, True, False]


@pytest.mark.django_db(transaction=True)
def test_a_cancel_waits_for_the_line_that_is_being_put_into_the_queue(api_key: Key) -> None:
    """Otherwise the results could be written without it, although it runs."""
    batch, first, second = two_lines(api_key[0])

    def cancel() -> list[str | None]:
        with release_connection_after():
            Batch.objects.cancel(Batch.objects.get(pk=batch.pk))
            running = BatchLine.objects.filter(batch=batch, state=LineState.RUNNING)
            return list(running.values_list("generation_id", flat=True))

    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            assert BatchLine.objects.begin(first, "chatcmpl-1")
            cancelled = pool.submit(cancel)
            with pytest.raises(TimeoutError):
                cancelled.result(0.5)
        assert cancelled.result(60) == ["chatcmpl-1"]
    assert not BatchLine.objects.begin(second, "chatcmpl-2")


def test_an_operator_cancels_a_batch_once(admin: Client, api_key: Key) -> None:
    batch, _, _ = two_lines(api_key[0])
    page = f"/admin/batches/batch/{batch.pk}/"
    assert "Nothing was cancelled" not in admin.post(f"{page}cancel/", follow=True).content.decode()
    assert "Nothing was cancelled" in admin.post(f"{page}cancel/", follow=True).content.decode()
    batch.refresh_from_db()
    assert batch.status == BatchStatus.CANCELLING
    assert LogEntry.objects.filter(change_message="Cancelled the batch.").count() == 1
