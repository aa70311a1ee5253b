"""What counts as ready, and which models are told to be without a worker."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from inference_site.status.site_metrics import SiteMetrics
from tests.ports import free_port

pytestmark = pytest.mark.redis


def redis_check(client: Client) -> str:
    """What ``/health/ready`` says of Redis."""
    told: str = client.get("/health/ready").json()["checks"]["redis"]
    return told


def test_a_site_whose_limits_cannot_be_counted_is_not_ready(client: Client, settings: Any) -> None:
    assert redis_check(client) == "ok"
    settings.RATE_LIMIT_URL = f"redis://127.0.0.1:{free_port()}/0"
    assert redis_check(client) == "ConnectionError: not reachable"
    settings.RATE_LIMITS_FAIL_OPEN = True
    assert redis_check(client) == "ok"


def without_workers() -> set[str]:
    """The models of which ``/metrics`` says that no worker serves them."""
    return {
        sample.labels["model"]
        for family in SiteMetrics().collect()
        for sample in family.samples
        if sample.name == "inference_live_workers" and sample.value == 0
    }


@pytest.mark.parametrize(
    ("start", "on_demand", "expected"),
    [([], False, True), (["none"], False, False), (["demo"], True, True), ([], True, False)],
)
def test_only_models_that_should_be_loaded_are_told_to_have_no_worker(
    settings: Any, *, start: list[str], on_demand: bool, expected: bool
) -> None:
    settings.START_MODELS, settings.LOAD_ON_DEMAND = start, on_demand
    assert ("demo" in without_workers()) is expected
