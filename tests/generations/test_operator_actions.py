"""What an operator does to a generation; that which waits is in tests/console/test_queue.py."""

from __future__ import annotations

import pytest

from inference_site.accounts.models import ApiKey
from inference_site.runs.cancellation import stop
from inference_site.runs.models import Generation, ServiceClass, Status
from inference_site.runs.queue import move_up
from inference_site.runs.streams.request_documents import load_document
from tests.generations.rows import create_generation

Key = tuple[ApiKey, str]


@pytest.fixture
def running(api_key: Key) -> Generation:
    """A generation that a worker has claimed."""
    create_generation(api_key[0])
    assert Generation.objects.claim("m", "w") is not None
    return Generation.objects.get()


def test_the_worker_of_a_running_one_is_asked_to_stop(running: Generation) -> None:
    assert stop(running)
    assert load_document(running.public_id).is_cancelled
    running.refresh_from_db()
    assert running.status == Status.RUNNING  # Its worker says when it has ended.


def test_one_that_was_claimed_meanwhile_is_stopped_too(api_key: Key) -> None:
    seen = create_generation(api_key[0])
    assert Generation.objects.claim("m", "w") is not None
    assert seen.status == Status.QUEUED
    assert stop(seen)
    assert load_document(seen.public_id).is_cancelled


def test_one_that_runs_cannot_be_moved_up(running: Generation) -> None:
    assert not move_up(running)
    running.refresh_from_db()
    assert running.service_class == ServiceClass.FOREGROUND
