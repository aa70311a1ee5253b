"""What counts as ready, and which models are told to be without a worker."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from django.test import Client
from django.utils import timezone

from inference_site.accounts.models import ApiKey
from inference_site.catalogue.fleet import fleet
from inference_site.catalogue.fleet.leases import (
    Lease,
    LiveWorker,
    ModelReport,
    ModelState,
    live_view,
    prune,
)
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.storage.migrations import migrations_of_release
from inference_site.core.storage.redis import site_client
from inference_site.ops import status
from inference_site.ops.status import SiteMetrics
from inference_site.runs.models import Generation, ServiceClass
from tests.generations.rows import create_generation
from tests.ports import free_port

pytestmark = [pytest.mark.redis, pytest.mark.django_db]


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


def test_a_site_whose_redis_takes_no_writes_is_not_ready(client: Client) -> None:
    """As a replica does, after a failover or before one."""
    site_client().config_set("min-replicas-to-write", 1)
    try:
        assert redis_check(client) == "it takes no writes"
    finally:
        site_client().config_set("min-replicas-to-write", 0)
    assert redis_check(client) == "ok"


def test_a_site_whose_database_lacks_a_migration_is_not_ready(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.get("/health/ready").json()["checks"]["postgres"] == "ok"
    of_next_release = frozenset({*migrations_of_release(), ("accounts", "9999_next")})
    monkeypatch.setattr(status, "migrations_of_release", lambda: of_next_release)
    answer = client.get("/health/ready")
    assert answer.status_code == 503
    assert answer.json()["checks"]["postgres"] == "it lacks migrations of this release"


def without_workers() -> set[str]:
    """The models of which ``/metrics`` says that no worker serves them."""
    return {
        sample.labels["model"]
        for family in SiteMetrics().collect()
        for sample in family.samples
        if sample.name == "inference_live_workers" and sample.value == 0
    }


@pytest.mark.django_db(transaction=True)
def test_work_in_the_background_is_not_the_oldest_that_waits(
    api_key: tuple[ApiKey, str],
) -> None:
    """Nobody waits for the lines of a batch; the alert of requests that wait reads this metric."""

    def waits(service_class: ServiceClass, seconds: int) -> None:
        row = create_generation(api_key[0], model="demo", service_class=service_class)
        created_at = timezone.now() - timedelta(seconds=seconds)
        Generation.objects.filter(pk=row.pk).update(created_at=created_at)

    def told(metric: str) -> float:
        samples = (sample for family in SiteMetrics().collect() for sample in family.samples)
        named = (one for one in samples if one.name == f"inference_{metric}")
        return next(one.value for one in named if one.labels["model"] == "demo")

    waits(ServiceClass.BACKGROUND, 500)
    assert (told("queue_length"), told("queue_oldest_seconds")) == (1, 0)
    waits(ServiceClass.FOREGROUND, 100)
    assert told("queue_length") == 2
    assert 100 <= told("queue_oldest_seconds") < 200


@pytest.mark.parametrize(
    ("start", "on_demand", "expected"),
    [([], False, True), (["none"], False, False), (["demo"], True, True), ([], True, False)],
)
def test_only_models_that_should_be_loaded_are_told_to_have_no_worker(
    settings: Any, *, start: list[str], on_demand: bool, expected: bool
) -> None:
    settings.START_MODELS, settings.LOAD_ON_DEMAND = start, on_demand
    assert ("demo" in without_workers()) is expected


def fleet_of(**states: ModelState) -> LiveWorker:
    """A worker with these models."""
    return LiveWorker("w", tuple(ModelReport(id_, 1, 0, state) for id_, state in states.items()))


SPECS = {
    "here": ModelSpec("here", "scripted"),
    "far": ModelSpec("far", "openai_upstream"),
    "farther": ModelSpec("farther", "openai_upstream"),
}


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> list[LiveWorker]:
    """A catalogue of a model here and two of other servers; the workers that are alive."""
    workers: list[LiveWorker] = []
    monkeypatch.setattr(status, "catalogue", lambda: Mock(models=dict(SPECS), optional=frozenset()))
    monkeypatch.setattr(status, "live_view", Mock(refresh=lambda: workers))
    return workers


READY, FAILED = ModelState.READY, ModelState.FAILED


@pytest.mark.parametrize(
    ("states", "fault", "absent"),
    [
        ({"here": READY, "far": READY, "farther": READY}, "ok", {}),
        ({"here": READY, "far": FAILED, "farther": READY}, "ok", {"far": "failed"}),
        (
            {"here": READY, "far": FAILED, "farther": FAILED},
            "ok",
            {"far": "failed", "farther": "failed"},
        ),
        ({"here": FAILED, "far": READY, "farther": READY}, "no live worker for: here (failed)", {}),
        ({"here": READY, "far": READY}, "no live worker for: farther", {}),
    ],
)
def test_a_model_whose_server_is_down_leaves_the_site_ready(
    client: Client,
    three: list[LiveWorker],
    states: dict[str, ModelState],
    fault: str,
    absent: dict[str, str],
) -> None:
    three.append(fleet_of(**states))
    told = client.get("/health/ready").json()
    assert (told["checks"]["workers"], told["models"]) == (fault, absent)
    assert (told["status"] == "ready") is (fault == "ok")


def test_a_site_that_has_nothing_but_servers_that_are_down_is_not_ready(
    client: Client, three: list[LiveWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(SPECS, "here")
    three.append(fleet_of(far=FAILED, farther=FAILED))
    fault = client.get("/health/ready").json()["checks"]["workers"]
    assert fault == "no live worker for: far (failed), farther (failed)"


def test_a_model_that_was_unloaded_on_purpose_leaves_the_site_ready(
    client: Client, three: list[LiveWorker]
) -> None:
    three.append(replace(fleet_of(far=READY, farther=READY), unloaded=("here",)))
    told = client.get("/health/ready").json()
    assert (told["status"], told["models"]) == ("ready", {"here": "unloaded"})


@pytest.mark.parametrize(
    ("state", "models"), [(ModelState.LOADING, {"here": "restarting"}), (FAILED, {})]
)
def test_a_model_whose_worker_is_being_replaced_leaves_the_site_ready_unless_it_fails(
    client: Client, three: list[LiveWorker], state: ModelState, models: dict[str, str]
) -> None:
    three.append(fleet_of(here=state, far=READY, farther=READY))
    fleet.note_restart(["here"])
    try:
        told = client.get("/health/ready").json()
    finally:
        site_client().delete("restart:here")
    assert told["models"] == models
    assert (told["status"] == "ready") is bool(models)


def test_a_model_that_is_told_to_be_ready_is_used_by_the_next_request(
    client: Client, settings: Any
) -> None:
    settings.START_MODELS = ["demo"]
    states = iter([ModelState.LOADING, ModelState.READY])
    lease = Lease("w", lambda: fleet_of(demo=next(states)))
    try:
        lease.renew()
        live_view.forget()
        assert not live_view.serving("demo")
        lease.renew()
        assert client.get("/health/ready").json()["checks"]["workers"] == "ok"
        assert live_view.serving("demo")
    finally:
        site_client().delete("worker:w")
        prune()
        live_view.forget()
