"""What a process does once before its first generation."""

from __future__ import annotations

import pytest

from inference_site.generations.models import Generation
from inference_site.generations.rehearsal import rehearse
from tests.statements import prepared_runs

pytestmark = pytest.mark.django_db


def test_a_rehearsal_writes_and_claims_a_generation_and_leaves_none() -> None:
    runs = prepared_runs()
    rehearse()
    assert prepared_runs() - runs == 2
    assert not Generation.objects.exists()


def test_a_rehearsal_takes_nothing_that_waits(project: object) -> None:
    waiting = Generation(public_id="chatcmpl-1", project_id=1, api_key_id=1, kind="chat", model="")
    waiting.insert()
    rehearse()
    waiting.refresh_from_db()
    assert (waiting.status, waiting.worker) == ("queued", "")
