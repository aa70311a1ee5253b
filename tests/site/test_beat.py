"""The periodic work of the site: failures stay apart, nothing piles up, two beats do no harm."""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from itertools import pairwise

import pytest
import redis.exceptions
from django.db import OperationalError
from django.utils import timezone
from pytest_django.fixtures import Settings

from inference_site.accounts.models import ApiKey
from inference_site.core.observability.metrics import MAINTENANCE_DONE
from inference_site.management.commands import beat
from inference_site.management.commands.beat import repeat, run_periodically
from inference_site.runs.models import Generation, Status
from inference_site.runs.streams.event_log import read_log
from inference_site.runs.usage.models import Period, UsageRollup
from tests.generations.rows import create_generation
from tests.waiting import wait_until

Key = tuple[ApiKey, str]


def in_thread(stopped: threading.Event) -> threading.Thread:
    thread = threading.Thread(target=run_periodically, args=(stopped.wait,))
    thread.start()
    return thread


def test_a_job_that_fails_keeps_no_other_from_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()

    def fail() -> None:
        raise KeyError("a fault")

    monkeypatch.setattr(beat, "_maintain", fail)
    monkeypatch.setattr(beat, "account_ended", done.set)
    monkeypatch.setattr(beat, "prune_old", lambda stopped: None)
    stopped = threading.Event()
    thread = in_thread(stopped)
    assert done.wait(60)
    stopped.set()
    thread.join(60)
    assert not thread.is_alive()


def test_both_jobs_of_batches_fail_while_the_database_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the log says of one that it works again, each time the other has asked in vain."""

    def fail() -> None:
        raise OperationalError("down")

    monkeypatch.setattr(beat, "_one_open_batch", fail)
    monkeypatch.setattr(beat, "_has_open", False)
    monkeypatch.setattr(beat, "_looked_at", time.monotonic() - 10)
    for job in (beat._feed_batches, beat._prepare_batches):
        with pytest.raises(OperationalError):
            job()


@pytest.mark.parametrize(
    "fault", [OperationalError("down"), redis.exceptions.ConnectionError("down")]
)
def test_a_job_waits_for_its_next_turn_when_a_server_is_down(
    caplog: pytest.LogCaptureFixture, fault: Exception
) -> None:
    stopped, turns = threading.Event(), list[float]()

    def act() -> None:
        turns.append(time.monotonic())
        if len(turns) < 4:
            raise fault
        stopped.set()

    repeat("a job", act, 0.05, stopped)
    assert len(turns) == 4
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    begins, ends = (record.getMessage() for record in caplog.records)
    assert begins == "a job: down"
    assert ends.startswith("a job: works again, after")


def test_a_late_run_is_followed_by_one_and_not_by_those_that_were_missed() -> None:
    stopped, turns = threading.Event(), list[float]()

    def act() -> None:
        turns.append(time.monotonic())
        if len(turns) == 1:
            time.sleep(0.5)  # Five periods.
        if len(turns) == 4:
            stopped.set()

    repeat("a job", act, 0.1, stopped)
    gaps = [after - before for before, after in pairwise(turns)]
    assert gaps[0] >= 0.5
    assert min(gaps[1:]) >= 0.05


@pytest.mark.django_db(transaction=True)
def test_two_beats_at_once_end_and_account_each_generation_once(
    api_key: Key, settings: Settings
) -> None:
    settings.QUEUE_TIMEOUT_S = 60
    old = timezone.now() - timedelta(seconds=100)
    rows = [create_generation(api_key[0], created_at=old) for _ in range(40)]
    MAINTENANCE_DONE.set(0)
    stopped = threading.Event()
    beats = [in_thread(stopped) for _ in range(2)]
    wait_until(lambda: not Generation.objects.filter(is_accounted=False).exists(), 90)
    wait_until(lambda: MAINTENANCE_DONE.collect()[0].samples[0].value > 0)  # type: ignore[index]
    stopped.set()
    for thread in beats:
        thread.join(60)
    assert set(Generation.objects.values_list("status", flat=True)) == {Status.FAILED}
    for row in rows:
        assert [batch.ending is not None for batch in read_log(row.public_id)] == [True]
    per_minute = UsageRollup.objects.filter(period=Period.MINUTE)
    assert sum(per_minute.values_list("requests", flat=True)) == len(rows)
