"""What an operator sees of the workers, and which worker gets which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from inference_site.catalogue.catalogue import Catalogue
from inference_site.catalogue.fleet import fleet, orders
from inference_site.catalogue.fleet.fleet import (
    AlreadyLoading,
    ModelStatus,
    NotLoadable,
    NotLoaded,
    UnknownModel,
    UnknownWorker,
)
from inference_site.catalogue.fleet.leases import (
    Lease,
    LiveView,
    LiveWorker,
    ModelReport,
    ModelState,
    prune,
)
from inference_site.catalogue.model_store.models import OrderState, WorkerOrder
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.host import Device
from inference_site.core.storage.redis import site_client
from inference_site.runs.queue import new_id

Announce = Callable[..., str]
pytestmark = pytest.mark.django_db


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> str:
    """A model of the catalogue, with an alias; nobody has it."""
    name = new_id("model-")
    catalogue = Catalogue([ModelSpec(name, "scripted", aliases=(f"{name}-too",))])
    monkeypatch.setattr(fleet, "catalogue", lambda: catalogue)
    monkeypatch.setattr(fleet, "live_view", LiveView(ttl_s=0))
    return name


@pytest.fixture
def announce() -> Iterator[Announce]:
    """Announce workers; return their ids."""
    names = []

    def lease(*models: ModelReport, **facts: Any) -> str:
        name = new_id("host:")
        names.append(name)
        Lease(name, lambda: LiveWorker(name, models, **facts)).renew()
        return name

    yield lease
    for name in names:
        site_client().delete(f"worker:{name}")
    prune()


def ordered(worker: str) -> list[tuple[str, str]]:
    """Return the orders that a worker has not seen yet."""
    unseen = WorkerOrder.objects.filter(worker=worker, seen_at=None)
    return list(unseen.values_list("state", "model_id"))


def memory(free: int) -> tuple[Device, ...]:
    return (Device("GPU", 100, free),)


@pytest.mark.parametrize(
    ("states", "status"),
    [
        ([], ModelStatus.UNLOADED),
        ([ModelState.LOADING], ModelStatus.LOADING),
        ([ModelState.FAILED, ModelState.LOADING, ModelState.READY], ModelStatus.LOADED),
        ([ModelState.FAILED, ModelState.LOADING], ModelStatus.LOADING),
        ([ModelState.FAILED, ModelState.DRAINING], ModelStatus.FAILED),
        ([ModelState.DRAINING], ModelStatus.UNLOADED),
    ],
)
def test_a_model_is_as_the_best_of_its_workers(
    model: str, announce: Announce, states: list[ModelState], status: ModelStatus
) -> None:
    for state in states:
        announce(ModelReport(model, 1, 0, state))
    assert fleet.status_of(model) == status


def test_a_worker_that_takes_nothing_does_not_make_a_model_loaded(
    model: str, announce: Announce
) -> None:
    announce(ModelReport(model, 1, 0), is_draining=True)
    assert fleet.status_of(model) == ModelStatus.UNLOADED


def test_a_model_is_loaded_where_most_memory_is_free(model: str, announce: Announce) -> None:
    announce(loadable=(model,), devices=memory(10))
    roomy = announce(loadable=(model,), devices=memory(50))
    announce(loadable=(), devices=memory(90))
    announce(loadable=(model,), devices=memory(90), is_draining=True)
    assert fleet.load(None, f"{model}-TOO") == roomy
    assert ordered(roomy) == [("loaded", model)]


def test_a_load_that_is_asked_for_twice_is_one_load(model: str, announce: Announce) -> None:
    workers = [announce(loadable=(model,)) for _ in range(2)]
    chosen = {fleet.load(None, model), fleet.load(None, f"{model}-too")}
    assert len(chosen) == 1
    assert sum(len(ordered(worker)) for worker in workers) == 1


def test_a_load_that_takes_long_is_not_begun_again(model: str, announce: Announce) -> None:
    loading = announce(ModelReport(model, 1, 0, ModelState.LOADING))
    other = announce(loadable=(model,))
    with pytest.raises(AlreadyLoading):
        fleet.load(None, model)
    assert ordered(loading) == ordered(other) == []
    assert fleet.load(other, model) == other


def test_a_load_may_name_its_worker_beside_one_that_goes_on(model: str, announce: Announce) -> None:
    one, two = (announce(loadable=(model,)) for _ in range(2))
    assert fleet.load(one, model) == one
    assert fleet.load(two, model) == two
    assert ordered(one) == ordered(two) == [("loaded", model)]


def test_what_cannot_be_loaded_is_refused(model: str, announce: Announce) -> None:
    unable = announce(ModelReport(model, 1, 0))
    with pytest.raises(UnknownModel):
        fleet.load(None, "ghost")
    with pytest.raises(UnknownWorker):
        fleet.load("ghost", model)
    for worker in (unable, None):
        with pytest.raises(AlreadyLoading, match=f"The model '{model}' is loaded already."):
            fleet.load(worker, model)
    empty = announce()
    with pytest.raises(NotLoadable, match=f"No live worker can load the model '{model}'."):
        fleet.load(empty, model)


def test_an_unload_goes_to_who_has_the_model(model: str, announce: Announce) -> None:
    has, has_too, has_not = (
        announce(ModelReport(model, 1, 0)),
        announce(ModelReport(model, 1, 0)),
        announce(),
    )
    with pytest.raises(NotLoaded):
        fleet.unload(has_not, model)
    assert fleet.unload(has, model) == [has]
    assert model not in orders.unloaded_everywhere()  # Another worker has it.
    assert orders.is_pending(model)
    assert ordered(has) == [("unloaded", model)]
    assert set(fleet.unload(None, model)) == {has, has_too}
    assert ordered(has) == ordered(has_too) == [("unloaded", model)]
    assert ordered(has_not) == []
    assert model in orders.unloaded_everywhere()
    orders.note_loaded(model)  # As a worker does that has it again.
    assert model not in orders.unloaded_everywhere()


def test_an_unload_takes_back_a_load_that_no_worker_has_seen(
    model: str, announce: Announce
) -> None:
    has, loads = announce(ModelReport(model, 1, 0)), announce(loadable=(model,))
    fleet.load(loads, model)
    fleet.unload(None, model)
    assert (ordered(has), ordered(loads)) == ([("unloaded", model)], [])


def test_an_order_that_its_worker_does_not_see_keeps_no_other_worker_from_loading(
    model: str, announce: Announce
) -> None:
    silent = announce(loadable=(model,))
    assert fleet.load(None, model) == silent
    site_client().delete(f"worker:{silent}")
    other = announce(loadable=(model,))
    assert fleet.load(None, model) == silent
    long_ago = timezone.now() - timedelta(minutes=1)
    WorkerOrder.objects.filter(worker=silent).update(ordered_at=long_ago)
    assert fleet.load(None, model) == other


def test_a_worker_is_drained_and_takes_work_again(model: str, announce: Announce) -> None:
    drained, other = announce(), announce()
    fleet.drain(drained)
    assert ordered(drained) == [("drained", "")]
    fleet.resume(drained)
    assert (ordered(drained), ordered(other)) == ([("active", "")], [])
    with pytest.raises(UnknownWorker):
        fleet.drain("ghost")


def test_orders_of_a_worker_that_is_gone_for_a_day_are_deleted(announce: Announce) -> None:
    live, frozen, gone = announce(), announce(), announce()
    for worker in (live, frozen, gone):
        fleet.drain(worker)
    site_client().delete(f"worker:{frozen}", f"worker:{gone}")
    two_days_ago = timezone.now() - timedelta(days=2)
    WorkerOrder.objects.filter(worker__in=(live, gone)).update(ordered_at=two_days_ago)
    fleet.resume(announce())
    assert (ordered(live), ordered(frozen), ordered(gone)) == ([("drained", "")],) * 2 + ([],)


def test_an_order_that_was_replaced_meanwhile_is_not_marked_as_seen(announce: Announce) -> None:
    worker = announce()
    orders.give(OrderState.DRAINED, [worker])
    read = orders.orders_of(worker)
    WorkerOrder.objects.filter(worker=worker).update(state="active", ordered_at=timezone.now())
    orders.mark_seen(read)
    assert ordered(worker) == [("active", "")]


def test_capabilities_are_those_that_a_worker_announces(
    model: str, announce: Announce, tmp_path: Path
) -> None:
    """A web host may lack the file that says whether a model chats."""
    spec = ModelSpec(model, "ctransformers", file=tmp_path / "only-on-the-worker.gguf")
    assert "chat" not in fleet.capabilities_of(spec)
    announce(ModelReport(model, 1, 0, capabilities=("chat", "completions")))
    assert fleet.capabilities_of(spec) == {"chat", "completions"}
