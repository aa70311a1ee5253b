"""Places of models with replicas: who is to have them, and that there are never too many."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inference_site.catalogue.fleet import fleet
from inference_site.catalogue.fleet.fleet import (
    claim_replica,
    give_back_replica,
    planned,
    why_no_host,
)
from inference_site.catalogue.fleet.leases import (
    Lease,
    LiveWorker,
    ModelReport,
    ModelState,
    lease_key,
)
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.storage.redis import site_client
from inference_site.runs.queue import new_id


def spec(id_: str = "m", **fields: Any) -> ModelSpec:
    return ModelSpec(id_, "scripted", **{"replicas": 1, **fields})


def worker(
    id_: str, *models: str, offers: dict[str, bool] | None = None, **fields: Any
) -> LiveWorker:
    reports = tuple(ModelReport(model, 1, 0) for model in models)
    return LiveWorker(id_, reports, offers=offers or {}, **fields)


def test_those_with_room_come_first_then_those_with_fewest_models() -> None:
    live = [
        worker("full", offers={"m": False}),
        worker("crowded", "a", "b", offers={"m": True}),
        worker("empty", offers={"m": True}),
    ]
    assert planned([spec(replicas=1)], live)["m"] == ["empty"]
    assert planned([spec(replicas=2)], live)["m"] == ["empty", "crowded"]
    assert planned([spec(replicas=9)], live)["m"] == ["empty", "crowded", "full"]


def test_who_has_a_model_keeps_it() -> None:
    live = [worker("z", "m", "a", "b"), worker("a", offers={"m": True})]
    assert planned([spec()], live)["m"] == ["z"]


def test_models_are_spread_over_workers_alike() -> None:
    offers = dict.fromkeys("abcd", True)
    live = [worker("one", offers=offers), worker("two", offers=offers)]
    plan = planned([spec(id_) for id_ in "dcba"], live)
    assert plan == {"a": ["one"], "b": ["two"], "c": ["one"], "d": ["two"]}


def test_who_drains_or_has_failed_or_lacks_the_label_gets_no_place() -> None:
    failed = LiveWorker("failed", (ModelReport("m", 1, 0, ModelState.FAILED),), labels=("gpu",))
    live = [
        worker("draining", "m", is_draining=True, labels=("gpu",)),
        worker("elsewhere", offers={"m": True}, labels=("cpu",)),
        failed,
    ]
    assert planned([spec(hosts=("gpu",))], live)["m"] == []


def test_a_label_that_nobody_has_is_named() -> None:
    live = [worker("one", labels=("cpu",))]
    assert why_no_host(spec(hosts=("gpu",)), live) == "No worker has the label gpu."
    assert why_no_host(spec(hosts=("gpu", "x")), live) == "No worker has one of the labels gpu, x."
    assert why_no_host(spec(hosts=("gpu", "cpu")), live) == ""
    assert why_no_host(spec(), live) == ""
    assert why_no_host(spec(), []) == ""
    assert why_no_host(spec(hosts=("gpu",)), []) == "No worker has the label gpu."


@pytest.fixture
def model() -> Iterator[str]:
    name = new_id("model-")
    yield name
    site_client().delete(f"replicas:{name}")


@pytest.fixture
def workers() -> Iterator[list[str]]:
    """Sixteen workers with a lease."""
    names = [new_id("host:") for _ in range(16)]
    for name in names:
        Lease(name, lambda name=name: LiveWorker(name)).renew()  # type: ignore[misc]
    yield names
    for name in names:
        site_client().delete(lease_key(name))
        site_client().srem("workers", name)


def test_of_many_claims_at_one_moment_as_many_are_good_as_there_are_places(
    model: str, workers: list[str]
) -> None:
    wanted = spec(model, replicas=3)
    with ThreadPoolExecutor(16) as pool:
        for _ in range(5):
            held = list(pool.map(lambda name: claim_replica(wanted, name), workers))
            assert sum(held) == 3
    holders = [name for name, has in zip(workers, held, strict=True) if has]
    give_back_replica(model, holders[0])
    assert claim_replica(wanted, next(name for name in workers if name not in holders))
    assert not claim_replica(wanted, holders[0])


def test_a_claim_ends_with_the_lease_and_is_lost_then(model: str, workers: list[str]) -> None:
    one, two, *_ = workers
    assert claim_replica(spec(model), one)
    assert not claim_replica(spec(model), two)
    site_client().delete(lease_key(one))
    assert claim_replica(spec(model), two)
    assert not claim_replica(spec(model), one)  # It lives again, and comes too late.


def test_a_worker_without_a_lease_whose_place_nobody_wanted_keeps_it(
    model: str, workers: list[str]
) -> None:
    assert claim_replica(spec(model), workers[0])
    site_client().delete(lease_key(workers[0]))
    assert claim_replica(spec(model), workers[0])


def test_fewer_places_leave_those_that_were_first(model: str, workers: list[str]) -> None:
    assert [claim_replica(spec(model, replicas=3), name) for name in workers[:3]] == [True] * 3
    assert [claim_replica(spec(model, replicas=1), name) for name in reversed(workers[:3])] == [
        False,
        False,
        True,
    ]


def test_without_replicas_everybody_has_a_place(workers: list[str]) -> None:
    assert all(claim_replica(ModelSpec("m", "scripted"), name) for name in workers)
    assert fleet.replicas_of(spec("m"), [worker("a", "m"), worker("b")]) == 1
