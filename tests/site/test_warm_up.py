"""What a process does once before its first generation."""

from __future__ import annotations

import pytest

from inference_site.accounts.models import ApiKey
from inference_site.runs.models import Generation
from inference_site.runs.warm_up import warm_up
from tests.generations.rows import create_generation
from tests.statements import prepared_runs

pytestmark = pytest.mark.django_db


def test_a_rehearsal_writes_and_claims_a_generation_and_leaves_none() -> None:
    runs = prepared_runs()
    warm_up()
    assert prepared_runs() - runs == 2
    assert not Generation.objects.exists()


def test_a_rehearsal_takes_nothing_that_waits(api_key: tuple[ApiKey, str]) -> None:
    waiting = create_generation(api_key[0])
    warm_up()
    waiting.refresh_from_db()
    assert (waiting.status, waiting.worker) == ("queued", "")
