"""What an operator sees of the workers, and what is told to which of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from inference_site.catalogue.catalogue import Catalogue
from inference_site.catalogue.fleet import fleet
from inference_site.catalogue.fleet.commands import Command, CommandListener, send
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
from inference_site.core.domain.device import Device
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.storage.redis import site_client
from inference_site.runs.queue import new_id
from tests.waiting import wait_until

Announce = Callable[..., str]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A model of the catalogue, with an alias; nobody has it."""
    name = new_id("model-")
    catalogue = Catalogue([ModelSpec(name, "scripted", aliases=(f"{name}-too",))])
    monkeypatch.setattr(fleet, "catalogue", lambda: catalogue)
    monkeypatch.setattr(fleet, "live_view", LiveView(ttl_s=0))
    yield name
    site_client().delete(f"load:{name}", f"unload:{name}")


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
        site_client().delete(f"worker:{name}", f"worker:{name}:commands")
    prune()


def told(worker: str) -> list[tuple[str, str]]:
    """Return what a worker was told, in order."""
    messages: Any = site_client().lrange(f"worker:{worker}:commands", 0, -1)
    return [(c["do"], c["model"]) for c in map(orjson.loads, reversed(messages))]


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


def test_the_state_of_many_models_is_one_reading(
    model: str, announce: Announce, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(ModelReport(model, 1, 0))
    live, client = fleet.workers(), site_client()
    client.set("load:asked-for", "w", ex=5)
    asked: list[list[str]] = []

    def mget(keys: list[str]) -> list[bytes | None]:
        asked.append(keys)
        return type(client).mget(client, keys)  # type: ignore[return-value]

    monkeypatch.setattr(client, "mget", mget)
    found = fleet.statuses_among(live, [model, "asked-for", "nowhere"])
    client.delete("load:asked-for")
    assert found == {
        model: ModelStatus.LOADED,
        "asked-for": ModelStatus.LOADING,
        "nowhere": ModelStatus.UNLOADED,
    }
    assert asked == [["load:asked-for", "load:nowhere"]]


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
    assert told(roomy) == [("load", model)]
    assert fleet.status_of(model) == ModelStatus.LOADING


def test_a_load_that_is_asked_for_twice_is_one_load(model: str, announce: Announce) -> None:
    workers = [announce(loadable=(model,)) for _ in range(2)]
    chosen = {fleet.load(None, model), fleet.load(None, f"{model}-too")}
    assert len(chosen) == 1
    assert sum(len(told(worker)) for worker in workers) == 1


def test_a_load_that_takes_long_is_not_begun_again(model: str, announce: Announce) -> None:
    loading = announce(ModelReport(model, 1, 0, ModelState.LOADING))
    other = announce(loadable=(model,))
    with pytest.raises(AlreadyLoading):
        fleet.load(None, model)
    assert told(loading) == told(other) == []
    assert fleet.load(other, model) == other


def test_a_load_may_name_its_worker_beside_one_that_goes_on(model: str, announce: Announce) -> None:
    one, two = (announce(loadable=(model,)) for _ in range(2))
    assert fleet.load(one, model) == one
    assert fleet.load(two, model) == two
    assert told(one) == told(two) == [("load", model)]


def test_what_cannot_be_loaded_is_refused(model: str, announce: Announce) -> None:
    unable = announce(ModelReport(model, 1, 0))
    with pytest.raises(UnknownModel):
        fleet.load(None, "ghost")
    with pytest.raises(UnknownWorker):
        fleet.load("ghost", model)
    with pytest.raises(NotLoadable):
        fleet.load(unable, model)
    with pytest.raises(NotLoadable):
        fleet.load(None, model)


def test_an_unload_goes_to_who_has_the_model(model: str, announce: Announce) -> None:
    has, has_too, has_not = (
        announce(ModelReport(model, 1, 0)),
        announce(ModelReport(model, 1, 0)),
        announce(),
    )
    with pytest.raises(NotLoaded):
        fleet.unload(has_not, model)
    assert fleet.unload(has, model) == [has]
    assert model not in fleet.unloaded_on_purpose()  # Another worker has it.
    assert fleet.has_pending_command(model)
    assert set(fleet.unload(None, model)) == {has, has_too}
    assert told(has) == [("unload", model)] * 2
    assert (told(has_too), told(has_not)) == ([("unload", model)], [])
    assert model in fleet.unloaded_on_purpose()
    fleet.clear_pending_load(model)  # As a worker does that has it again.
    assert model not in fleet.unloaded_on_purpose()


def test_a_worker_is_drained_and_takes_work_again(model: str, announce: Announce) -> None:
    drained, other = announce(), announce()
    fleet.drain(drained)
    fleet.resume(drained)
    assert (told(drained), told(other)) == ([("drain", ""), ("resume", "")], [])
    with pytest.raises(UnknownWorker):
        fleet.drain("ghost")


def test_capabilities_are_those_that_a_worker_announces(
    model: str, announce: Announce, tmp_path: Path
) -> None:
    """A web host may lack the file that says whether a model chats."""
    spec = ModelSpec(model, "ctransformers", file=tmp_path / "only-on-the-worker.gguf")
    assert "chat" not in fleet.capabilities_of(spec)
    announce(ModelReport(model, 1, 0, capabilities=("chat", "completions")))
    assert fleet.capabilities_of(spec) == {"chat", "completions"}


def test_commands_are_obeyed_in_order_and_not_after_the_end() -> None:
    worker, heard = new_id("host:"), list[Command]()
    listener = CommandListener(worker, heard.append)
    commands = [Command("load", "a"), Command("unload", "a"), Command("drain")]
    for command in commands:
        send(worker, command)
    listener.start()
    wait_until(lambda: heard == commands)
    listener.stop()
    send(worker, Command("resume"))
    assert heard == commands
    assert 0 < int(site_client().ttl(f"worker:{worker}:commands")) <= 3600
    site_client().delete(f"worker:{worker}:commands")
