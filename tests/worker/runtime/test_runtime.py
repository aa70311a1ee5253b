"""What a worker process holds: it answers wake-ups, fills its slots, and drains."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import redis
import redis.exceptions
from django.db import OperationalError
from django.utils import timezone
from pytest_django.fixtures import Settings

from completions.assemblers.chat import ChatAssembler
from inference_site.accounts.models import ApiKey
from inference_site.catalogue.catalogue import CatalogueChanges
from inference_site.catalogue.fleet import fleet, orders
from inference_site.catalogue.fleet.leases import (
    LiveWorker,
    ModelReport,
    ModelState,
    live_view,
    live_workers,
)
from inference_site.catalogue.model_store import adapters
from inference_site.catalogue.model_store.models import OrderState, WorkerOrder
from inference_site.core.domain.errors import EngineLoadError
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.site_tools import SiteCall
from inference_site.core.storage.redis import client_for
from inference_site.runs.models import Generation, Status
from inference_site.runs.streams.batches import Batch
from inference_site.runs.streams.event_log import log_key
from inference_site.runs.streams.request_documents import save_document
from tests.generations.rows import chat_document, create_generation
from tests.waiting import wait_until
from worker import tasks
from worker.engines.base import Engine, load_engine
from worker.engines.scripted import ScriptedEngine
from worker.runtime import loading, residency, runs, served_model
from worker.runtime import runtime as runtime_module
from worker.runtime.residency import Capacity
from worker.runtime.run import Run
from worker.runtime.runtime import Runtime

Key = tuple[ApiKey, str]
pytestmark = pytest.mark.django_db


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """A worker that serves the model ``m``, two at once."""
    worker = Runtime([ModelSpec("m", "scripted", slots=2)])
    worker.start()
    yield worker
    worker.stop()


def waiting(api_key: Key, script: list[dict[str, Any]], model: str = "m") -> Generation:
    row = create_generation(api_key[0], model=model)
    save_document(row.public_id, chat_document(row.public_id, json.dumps(script)), "web.one")
    return row


def announced(runtime: Runtime) -> LiveWorker | None:
    """Return what the site believes of the worker; None when it does not know it."""
    return next((worker for worker in live_workers() if worker.id == runtime.id), None)


def busy(runtime: Runtime) -> int:
    """Return how many slots of its model ``m`` are taken."""
    served = runtime.described().model("m")
    assert served is not None
    return served.busy


def is_ended(row: Generation) -> bool:
    entries: Any = client_for(row.public_id).xrevrange(log_key(row.public_id), count=1)
    return bool(entries) and Batch.unpack(entries[0][1][b"b"]).ending is not None


def test_one_wake_up_is_enough_for_all_that_waits(runtime: Runtime, api_key: Key) -> None:
    rows = [waiting(api_key, [{"text": "hi"}]) for _ in range(3)]
    other = waiting(api_key, [{"text": "hi"}], model="another")
    runtime.serve("m")
    states = dict(Generation.objects.values_list("pk", "status"))
    assert states == {**{row.pk: Status.COMPLETED for row in rows}, other.pk: Status.QUEUED}
    for row in rows:
        wait_until(lambda row=row: is_ended(row))  # type: ignore[misc]  # Binds this round's row.


def test_a_failed_generation_does_not_keep_the_next_from_running(
    runtime: Runtime, api_key: Key
) -> None:
    for script in ([{"fail": "boom"}], [{"text": "hi"}]):
        waiting(api_key, script)
    runtime.serve("m")
    assert sorted(Generation.objects.values_list("status", flat=True)) == ["completed", "failed"]


@pytest.mark.django_db(transaction=True)
def test_no_more_run_than_there_are_slots(runtime: Runtime, api_key: Key) -> None:
    rows = [waiting(api_key, [{"text": "a"}, {"sleep_ms": 60_000}]) for _ in range(3)]
    with ThreadPoolExecutor(2) as pool:
        tasks_ = [pool.submit(runtime.serve, "m") for _ in range(2)]
        wait_until(lambda: Generation.objects.filter(status=Status.RUNNING).count() == 2)
        runtime.serve("m")  # A third wake-up comes back at once.
        assert busy(runtime) == 2
        assert Generation.objects.filter(status=Status.QUEUED).count() == 1
        runtime.drain()
        runtime._publisher.stop_all()
        for task in tasks_:
            task.result(60)
    left = Generation.objects.filter(pk__in=[row.pk for row in rows])
    assert sorted(left.values_list("status", flat=True)) == ["failed", "failed", "queued"]


@pytest.mark.django_db(transaction=True)
def test_tokens_of_a_whole_answer_are_known_while_its_tools_are_called(
    runtime: Runtime, api_key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the worker dies in a call, they are all that is known of the turns before."""
    is_called, goes_on = threading.Event(), threading.Event()

    def call_tools(run: Run) -> bool:
        is_called.set()
        goes_on.wait(60)
        monkeypatch.undo()
        run.calls_tools = False
        run.end(None)
        return False

    def calls(assembler: ChatAssembler) -> list[SiteCall]:
        has_ended = assembler._choices[0].finish is not None
        return [SiteCall(0, 0, "search", "{}")] if has_ended else []

    monkeypatch.setattr(ChatAssembler, "calls", calls)
    monkeypatch.setattr(Run, "call_tools", call_tools)
    row = create_generation(api_key[0])
    script = json.dumps([{"text": "one"}, {"text": "two"}])
    save_document(row.public_id, chat_document(row.public_id, script, stream=False), None)
    runtime.serve("m")
    assert is_called.wait(60)
    try:
        assert runtime.runs.unsent_tokens == {row.public_id: 2}
    finally:
        goes_on.set()
    wait_until(lambda: runtime.is_idle)


@pytest.mark.django_db(transaction=True)
def test_a_redis_that_stays_away_costs_no_attempt_of_what_waits(
    own_redis: tuple[subprocess.Popen[bytes], redis.Redis], api_key: Key, settings: Settings
) -> None:
    settings.EVENT_LOG_PATIENCE_S = 1
    server, _ = own_redis
    with started([ModelSpec("m", "scripted", slots=1)]) as worker:
        lost = waiting(api_key, [{"text": "a"}, {"sleep_ms": 60_000}])
        late = waiting(api_key, [{"text": "b"}])
        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(worker.serve, "m")
            wait_until(lambda: Generation.objects.filter(status=Status.RUNNING).exists())
            server.send_signal(signal.SIGSTOP)
            served.result(60)  # It claims nothing more.
        lost.refresh_from_db()
        assert (lost.status, lost.error_code) == (Status.FAILED, "worker_unavailable")
        late.refresh_from_db()
        assert (late.status, late.attempt) == (Status.QUEUED, 0)
        server.send_signal(signal.SIGCONT)
        worker.serve("m")
        late.refresh_from_db()
        assert (late.status, late.attempt) == (Status.COMPLETED, 1)


@pytest.mark.django_db(transaction=True)
def test_nothing_runs_beside_what_may_have_killed_its_worker(
    runtime: Runtime, api_key: Key
) -> None:
    long_ago = timezone.now() - timedelta(hours=1)
    running = {"status": Status.RUNNING}
    neighbour = waiting(api_key, [{"text": "a"}, {"sleep_ms": 1000}])
    with ThreadPoolExecutor(4) as pool:
        tasks_ = [pool.submit(runtime.serve, "m")]
        wait_until(lambda: Generation.objects.filter(**running).exists())
        suspects = [waiting(api_key, [{"text": "b"}, {"sleep_ms": 300}]) for _ in range(2)]
        ids = [row.pk for row in suspects]
        Generation.objects.filter(pk__in=ids).update(alone_since=long_ago)
        tasks_.append(pool.submit(runtime.serve, "m"))
        wait_until(lambda: runtime.open_models() == [])
        late = waiting(api_key, [{"text": "c"}])
        runtime.serve("m")  # It comes back at once.
        for task in tasks_:
            task.result(60)
    rows = [Generation.objects.get(pk=row.pk) for row in (neighbour, *suspects, late)]
    assert {row.status for row in rows} == {Status.COMPLETED}
    spans = sorted((row.first_token_at, row.finished_at) for row in rows)
    assert all(ended <= began for (_, ended), (began, _) in pairwise(spans))  # type: ignore[operator]  # They have ended.
    assert runtime.open_models() == ["m"]


@pytest.mark.django_db(transaction=True)
def test_what_may_have_killed_its_worker_holds_others_up_for_a_while_only(
    runtime: Runtime, api_key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_model, "_TRIAL_S", 0.2)
    monkeypatch.setattr(served_model, "_DRAIN_S", 0.2)
    endless: list[dict[str, Any]] = [{"text": "a"}, {"sleep_ms": 60_000}]
    running = Generation.objects.filter(status=Status.RUNNING)
    with ThreadPoolExecutor(4) as pool:
        waiting(api_key, endless)
        pool.submit(runtime.serve, "m")
        wait_until(lambda: running.count() == 1)
        suspect = waiting(api_key, endless)
        Generation.objects.filter(pk=suspect.pk).update(
            alone_since=timezone.now() - timedelta(hours=1)
        )
        pool.submit(runtime.serve, "m")
        wait_until(lambda: running.count() == 2)  # It does not wait for the other's end,
        wait_until(
            lambda: runtime.loader.models["m"].isolation.is_open
        )  # and has given output for long enough.
        runtime.drain()
        runtime._publisher.stop_all()


@pytest.mark.django_db(transaction=True)
def test_a_drain_gives_what_runs_its_time_and_no_more(
    runtime: Runtime, api_key: Key, settings: Settings
) -> None:
    settings.DRAIN_TIMEOUT_S = 1.0
    short = waiting(api_key, [{"text": "a"}, {"sleep_ms": 30}])
    long = waiting(api_key, [{"text": "a"}, {"sleep_ms": 60_000}])
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(runtime.serve, "m")
        wait_until(lambda: Generation.objects.filter(status=Status.RUNNING).count() == 2)
        runtime.drain()
    for row in (short, long):
        row.refresh_from_db()
    assert (short.status, long.status) == (Status.COMPLETED, Status.FAILED)
    assert long.error_code == "worker_unavailable"


def test_a_draining_worker_claims_nothing_and_says_that_it_serves_nothing(
    runtime: Runtime, api_key: Key
) -> None:
    row = waiting(api_key, [{"text": "hi"}])
    runtime.drain()
    runtime.serve("m")
    row.refresh_from_db()
    assert row.status == Status.QUEUED
    assert "m" not in runtime.open_models()
    wait_until(lambda: not runtime.described().serves("m"))  # A thread of its own says so.


@pytest.mark.django_db
def test_a_wake_up_that_a_draining_worker_receives_is_left_to_another(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    monkeypatch.setattr(runs, "send_wake_up", sent.append)
    other = LiveWorker("other", (ModelReport("m", 1, 0),))
    monkeypatch.setattr(live_view, "workers", lambda: [other])
    runtime.serve("m")
    assert sent == []
    runtime.drain()
    runtime.serve("m")
    assert sent == ["m"]


def test_a_wake_up_that_cannot_be_passed_on_is_left_to_maintenance(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def down() -> list[LiveWorker]:
        raise redis.exceptions.ConnectionError("down")

    monkeypatch.setattr(live_view, "workers", down)
    runtime.drain()
    runtime.serve("m")
    assert "a wake-up for m is lost" in caplog.text


BROKEN = ModelSpec("broken", "llama_cpp")  # It has no file.


@pytest.mark.django_db(transaction=True)
def test_a_worker_that_can_load_nothing_does_not_start() -> None:
    worker = Runtime([BROKEN, replace(BROKEN, id="broken-too")])
    with pytest.raises(EngineLoadError, match=r"broken'.*\n.*broken-too"):
        worker.start()
    assert announced(worker) is None
    worker._publisher._loop.close()  # It never ran.


@pytest.mark.django_db(transaction=True)
def test_a_model_for_which_room_cannot_be_made_is_failed_and_not_loading_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Capacity, "fits", Mock(side_effect=RuntimeError("boom")))
    worker = Runtime([ModelSpec("m", "scripted")])
    with pytest.raises(EngineLoadError, match=r"Model 'm': no room could be made .*RuntimeError"):
        worker.start()
    assert "boom" in caplog.text
    worker._publisher._loop.close()  # It never ran.


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("engine", ["scripted", "openai_upstream"])
def test_a_model_whose_load_fails_in_an_unknown_way_is_failed_and_not_loading_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, engine: str
) -> None:
    monkeypatch.setattr(served_model, "load_engine", Mock(side_effect=RuntimeError("boom")))
    worker = Runtime([ModelSpec("m", engine)])
    with pytest.raises(EngineLoadError, match=r"Model 'm': .*could not be loaded \(RuntimeError"):
        worker.start()
    assert "boom" in caplog.text
    worker._publisher._loop.close()  # It never ran.


def test_a_model_that_cannot_load_beside_one_that_can_is_announced_with_the_reason() -> None:
    with started([ModelSpec("m", "scripted"), BROKEN]) as worker:
        wait_until(lambda: reports(worker)[1].state == ModelState.FAILED)
        found = announced(worker)
        assert found is not None
        good, bad = found.models
        assert (good.state, good.reason) == (ModelState.READY, "")
        assert (bad.state, bad.free) == (ModelState.FAILED, 0)
        assert "needs a 'file'" in bad.reason
        assert not found.serves("broken")
        assert worker.not_ready() == ["broken"]


def test_a_worker_is_ready_without_a_server_that_is_not_its_own_while_another_model_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else no upgrade of the workers would end before the last of these servers is back."""
    monkeypatch.setattr(runtime_module, "_AWAY_S", 0.0)
    nowhere = {"base_url": "http://127.0.0.1:9/v1"}
    away = ModelSpec("away", "openai_upstream", options=nowhere, context_length=2048)
    with started([ModelSpec("m", "scripted"), away]) as worker:
        wait_until(lambda: reports(worker)[1].state == ModelState.FAILED)
        wait_until(lambda: not worker.not_ready())
    with started([away]) as worker:
        wait_until(lambda: reports(worker)[0].state == ModelState.FAILED)
        assert worker.not_ready() == ["away"]


def reports(worker: Runtime) -> Sequence[ModelReport]:
    """What the worker's lease says of its models."""
    found = announced(worker)
    assert found is not None
    return found.models


@contextmanager
def started(specs: list[ModelSpec]) -> Iterator[Runtime]:
    """A worker that serves these models."""
    worker = Runtime(specs)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


@pytest.mark.parametrize("ready", [0, 4])
def test_a_model_takes_work_while_others_load(monkeypatch: pytest.MonkeyPatch, ready: int) -> None:
    """Whatever their order is, and however many take long."""
    worker = Runtime([ModelSpec(str(number), "scripted") for number in range(5)])
    go_on = threading.Event()

    def load(spec: ModelSpec) -> Engine:
        if spec.id != str(ready):
            go_on.wait(60)
        return load_engine(spec)

    monkeypatch.setattr(served_model, "load_engine", load)
    worker.start()
    found, lacking = announced(worker), worker.not_ready()
    go_on.set()
    wait_until(lambda: all(one.state == "ready" for one in worker.described().models))
    worker.stop()
    assert lacking == [str(number) for number in range(5) if number != ready]
    assert found is not None
    assert [model.id for model in found.models if model.state == "ready"] == [str(ready)]


def test_a_model_may_be_dropped_while_the_lease_is_written(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = served_model.ServedModel.report.fget  # type: ignore[attr-defined]  # It is a property.

    def dropped(model: served_model.ServedModel) -> ModelReport:
        runtime.loader.models.clear()
        made: ModelReport = report(model)
        return made

    monkeypatch.setattr(served_model.ServedModel, "report", property(dropped))
    runtime.loader.models["another"] = served_model.ServedModel(ModelSpec("another", "scripted"))
    assert [model.id for model in runtime.described().models] == ["m", "another"]


def test_a_model_has_failed_since_its_load_failed_and_never_since_the_future(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its load is repeated a minute later, also if the clock is set back meanwhile."""
    clock = Mock(return_value=1_000.0)
    monkeypatch.setattr(time, "time", clock)
    model = served_model.ServedModel(ModelSpec("another", "scripted"))
    clock.return_value = 1_500.0
    model.fail("It has no weights.")
    assert model.report.since == 1_500
    clock.return_value = 100.0
    assert model.report.since == 100
    clock.return_value = 130.0
    assert model.report.since == 100


def test_a_load_tells_how_much_of_its_file_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(1000))
    monkeypatch.setattr(loading, "_CHUNK_BYTES", 250)
    assert list(loading.read_ahead(file)) == [0.25, 0.5, 0.75, 1.0]
    assert list(loading.read_ahead(tmp_path / "absent")) == []


def test_a_worker_tells_its_host_its_memory_and_what_runs_its_models(runtime: Runtime) -> None:
    found = announced(runtime)
    assert found is not None
    assert found.host == socket.gethostname()
    assert 0 < time.time() - found.started_at < 60
    assert 0 < found.devices[0].memory_free <= found.devices[0].memory_total
    model = found.models[0]
    assert (model.id, model.engine, model.free) == ("m", "scripted", 2)
    assert "chat" in model.capabilities


@pytest.mark.django_db(transaction=True)
def test_an_unloaded_model_ends_what_runs_and_is_gone(
    runtime: Runtime, api_key: Key, settings: Settings
) -> None:
    settings.DRAIN_TIMEOUT_S = 0.1
    row = waiting(api_key, [{"text": "a"}, {"sleep_ms": 60_000}])
    with ThreadPoolExecutor(1) as pool:
        pool.submit(runtime.serve, "m")
        wait_until(lambda: busy(runtime) == 1)
        orders.give(OrderState.UNLOADED, [runtime.id], "m")
        wait_until(lambda: (found := announced(runtime)) is not None and not found.models)
    row.refresh_from_db()
    assert (row.status, row.error_code) == (Status.FAILED, "worker_unavailable")
    assert "m" not in runtime.open_models()


@pytest.mark.django_db(transaction=True)
def test_a_worker_carries_out_an_order_that_was_given_while_it_was_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Runtime([ModelSpec("m", "scripted")])

    def load(spec: ModelSpec) -> Engine:
        WorkerOrder.objects.create(worker=worker.id, model_id="m", state=OrderState.UNLOADED)
        return load_engine(spec)

    monkeypatch.setattr(served_model, "load_engine", load)
    worker.start()
    wait_until(lambda: (found := announced(worker)) is not None and not found.models)
    worker.stop()


@pytest.mark.django_db(transaction=True)
def test_a_model_that_is_unloaded_while_it_loads_has_neither_failed_nor_been_loaded(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its newest adapter stays, and so does the order to have it nowhere."""
    is_loading, may_end = threading.Event(), threading.Event()

    def load(spec: ModelSpec) -> Engine:
        is_loading.set()
        may_end.wait(60)
        return load_engine(spec)

    monkeypatch.setattr(served_model, "load_engine", load)
    monkeypatch.setattr(runtime.loader, "_find_spec", lambda id_: ModelSpec(id_, "scripted"))
    adapters.add("m", "terse", "terse.gguf")
    runtime.loader.reload("m")
    assert is_loading.wait(60)
    [reloaded] = runtime.loader.models.values()
    WorkerOrder.objects.create(worker=orders.ALL, model_id="m", state=OrderState.UNLOADED)
    runtime.loader.unload("m")
    settled = Mock(wraps=runtime.loader._settle)
    monkeypatch.setattr(runtime.loader, "_settle", settled)
    may_end.set()
    wait_until(lambda: settled.called)
    assert not reloaded.is_loaded
    assert adapters.read().models_with("terse") == ["m"]
    assert orders.unloaded_everywhere() == {"m"}


def with_adapters(id_: str) -> ModelSpec:
    """A model with the adapters that were added to it."""
    return adapters.read().to(ModelSpec(id_, "scripted"))


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("by_process", [False, True])
def test_adapter_is_dropped_only_for_a_fault_that_may_be_its_own(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, by_process: bool
) -> None:
    def load(spec: ModelSpec) -> Engine:
        if "terse" in spec.lora_adapters:
            raise EngineLoadError("It cannot be loaded.", by_process=by_process)
        return load_engine(spec)

    monkeypatch.setattr(served_model, "load_engine", load)
    monkeypatch.setattr(runtime.loader, "_find_spec", with_adapters)
    adapters.add("m", "terse", "terse.gguf")
    runtime.loader.reload("m")
    expected = ModelState.READY if by_process else ModelState.FAILED
    wait_until(lambda: runtime.loader.models["m"].state == expected)
    time.sleep(0.5)  # Nothing else follows.
    assert runtime.loader.models["m"].state == expected
    assert adapters.read().models_with("terse") == ([] if by_process else ["m"])


@pytest.mark.django_db(transaction=True)
def test_an_adapter_that_another_worker_has_dropped_takes_no_other_along(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two workers with the model, the second had dropped the adapter that was added before."""

    def load(spec: ModelSpec) -> Engine:
        if "terse" in spec.lora_adapters:
            adapters.remove("m", "terse")  # As the other worker does, at the same time.
            raise EngineLoadError("It cannot be loaded.", by_process=True)
        return load_engine(spec)

    monkeypatch.setattr(served_model, "load_engine", load)
    monkeypatch.setattr(runtime.loader, "_find_spec", with_adapters)
    adapters.add("m", "good", "good.gguf")
    adapters.add("m", "terse", "terse.gguf")
    runtime.loader.reload("m")
    wait_until(lambda: runtime.loader.models["m"].state == ModelState.READY)
    assert list(runtime.loader.models["m"].spec.lora_adapters) == ["good"]
    assert adapters.read().models_with("good") == ["m"]


def know_only(monkeypatch: pytest.MonkeyPatch, spec: ModelSpec) -> None:
    """Let the catalogue of the loader have this model alone."""
    known = SimpleNamespace(models={spec.id: spec}, find=lambda _: spec)
    monkeypatch.setattr(loading, "catalogue", lambda: known)


@pytest.mark.django_db(transaction=True)
def test_a_model_that_was_loaded_again_is_not_unloaded_for_the_time_before(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "_CHECK_IDLE_S", 0.05)
    monkeypatch.setattr(residency, "_ANNOUNCED_S", 0.2)
    spec = ModelSpec("m", "scripted", keep_alive_s=0.4)
    monkeypatch.setattr(runtime.loader, "_find_spec", lambda _: spec)
    runtime.loader._loaded_on_demand.add("m")

    def reload() -> served_model.ServedModel:
        runtime.loader.reload("m")
        model, watches = runtime.loader.models["m"], runtime.loader._idle_watches
        wait_until(lambda: model.state == ModelState.READY and watches["m"].model is model)
        return model

    reload()
    in_use = reload()
    assert in_use.take_slot()
    time.sleep(0.8)
    assert runtime.loader.models["m"] is in_use
    assert in_use.state == ModelState.READY
    in_use.release_slot()
    wait_until(lambda: "m" not in runtime.loader.models)


@pytest.mark.django_db(transaction=True)
def test_a_model_that_is_dropped_just_after_its_load_can_be_loaded_again(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModelSpec("n", "scripted")
    know_only(monkeypatch, spec)
    is_dropped, is_settled = threading.Event(), threading.Event()

    def release(model: str) -> None:
        is_dropped.set()
        is_settled.wait(10)

    def drop(model: str) -> None:
        monkeypatch.setattr(orders, "note_loaded", lambda _: None)
        loading.in_background(runtime.loader.unload, model)
        assert is_dropped.wait(10)

    monkeypatch.setattr(runtime.loader.replicas, "release", release)
    monkeypatch.setattr(orders, "note_loaded", drop)
    runtime.loader.load("n")
    wait_until(lambda: is_dropped.is_set() and not runtime.loader._placed)
    is_settled.set()
    wait_until(lambda: not runtime.loader._closing)
    runtime.loader.load("n")
    wait_until(lambda: "n" in runtime.loader.models and runtime.loader.models["n"].is_loaded)


@pytest.mark.django_db(transaction=True)
def test_a_model_that_is_wanted_again_while_its_server_goes_to_sleep_has_one_server(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "_CHECK_IDLE_S", 0.05)
    monkeypatch.setattr(residency, "_ANNOUNCED_S", 0.05)
    spec = ModelSpec("m", "scripted", keep_alive_s=0.1)
    know_only(monkeypatch, spec)
    opened: list[Engine] = []
    goes_to_sleep, go_on = threading.Event(), threading.Event()

    class Sleeper(ScriptedEngine):
        def __init__(self, spec: ModelSpec) -> None:
            super().__init__(spec)
            opened.append(self)

        def sleep(self) -> bool:
            goes_to_sleep.set()
            go_on.wait(60)
            return True

        def wake(self) -> bool:
            return True

    monkeypatch.setattr(served_model, "load_engine", Sleeper)
    runtime.loader._loaded_on_demand.add("m")
    runtime.loader.reload("m")
    assert goes_to_sleep.wait(60)
    monkeypatch.setattr(residency, "_ANNOUNCED_S", 60)  # It is not unloaded once more.
    runtime.loader.load("m")
    time.sleep(0.5)
    go_on.set()
    wait_until(lambda: runtime.loader.models["m"].is_loaded)
    assert len(opened) == 1
    assert not runtime.loader.sleeping


@pytest.mark.django_db(transaction=True)
def test_an_entry_that_is_there_again_is_loaded_once_its_model_of_before_has_ended(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModelSpec("m", "scripted")
    know_only(monkeypatch, spec)
    before = runtime.loader.models["m"]
    assert before.take_slot()
    runtime.loader.apply(CatalogueChanges(removed=[spec]), takes_new=True)
    wait_until(lambda: runtime.open_models() == [])
    runtime.loader.apply(CatalogueChanges(new=[spec]), takes_new=True)
    time.sleep(0.2)
    before.release_slot()
    wait_until(lambda: runtime.open_models() == ["m"])
    assert runtime.loader.models["m"] is not before


@pytest.mark.django_db(transaction=True)
def test_a_model_that_was_added_while_its_worker_was_drained_is_loaded_afterwards(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModelSpec("added", "scripted")
    know_only(monkeypatch, spec)
    orders.give(OrderState.DRAINED, [runtime.id])
    runtime.loader.apply(CatalogueChanges(new=[spec]), takes_new=True)
    time.sleep(0.2)
    assert "added" not in runtime.loader.models
    orders.give(OrderState.ACTIVE, [runtime.id])
    wait_until(lambda: sorted(runtime.open_models()) == ["added", "m"])


@pytest.mark.django_db(transaction=True)
def test_a_model_that_belongs_on_other_hosts_goes_also_if_it_is_reloaded_meanwhile(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One change of an entry may be of its hosts and of the settings of its engine."""
    spec = ModelSpec("m", "scripted", hosts=("elsewhere",))
    monkeypatch.setattr(residency, "catalogue", lambda: SimpleNamespace(models={"m": spec}))
    monkeypatch.setattr(runtime.loader, "_find_spec", lambda _: spec)
    renew, this_thread = runtime.lease.renew, threading.current_thread()
    is_reloaded = threading.Event()

    def renew_after_reload() -> None:
        if threading.current_thread() is not this_thread:
            is_reloaded.wait(60)
        renew()

    monkeypatch.setattr(runtime.lease, "renew", renew_after_reload)
    runtime.loader.replicas.reconcile()
    runtime.loader.reload("m")
    is_reloaded.set()
    wait_until(lambda: "m" not in runtime.loader.models)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("change", ["unload", "reload"])
def test_a_worker_that_drops_a_model_whose_entry_was_removed_keeps_no_replica_of_it(
    runtime: Runtime, change: str
) -> None:
    """Else no other worker could load the model when its entry is there again."""
    spec = ModelSpec("m", "scripted", replicas=1)
    assert fleet.claim_replica(spec, runtime.id)
    assert not fleet.claim_replica(spec, "another")
    getattr(runtime.loader, change)("m")  # The catalogue of the tests lacks the model.
    assert "m" not in runtime.loader.models
    assert fleet.claim_replica(spec, "another")
    fleet.give_back_replica("m", "another")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("last", ["reload", "unload"])
def test_of_two_orders_that_wait_for_the_same_run_the_last_counts_and_no_engine_is_left(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    opened: list[Engine] = []

    class SlowToClose(ScriptedEngine):
        def __init__(self, spec: ModelSpec) -> None:
            super().__init__(spec)
            opened.append(self)

        def close(self) -> None:
            time.sleep(0.2)
            opened.remove(self)

    monkeypatch.setattr(served_model, "load_engine", SlowToClose)
    monkeypatch.setattr(runtime.loader, "_find_spec", lambda id_: ModelSpec(id_, "scripted"))
    runtime.loader.reload("m")
    wait_until(lambda: runtime.open_models() == ["m"])
    busy_model = runtime.loader.models["m"]
    assert busy_model.take_slot()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(runtime.loader.reload, "m")
        wait_until(lambda: runtime.open_models() == [])
        second = pool.submit(getattr(runtime.loader, last), "m")
        time.sleep(0.1)  # Both wait for the run.
        busy_model.release_slot()
        first.result(60)
        second.result(60)
    if last == "reload":
        wait_until(lambda: runtime.open_models() == ["m"])
    time.sleep(0.5)  # A load that was replaced ends meanwhile.
    assert len(opened) == (last == "reload")
    assert list(runtime.loader.models) == (["m"] if last == "reload" else [])


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("is_asleep", "wanted"), [(False, "m"), (True, "other")])
def test_a_model_takes_its_room_until_its_server_has_ended(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, is_asleep: bool, wanted: str
) -> None:
    """A model that is loaded while its server still ends would need the memory twice."""
    settings.MAX_LOADED_MODELS = 1
    opened: list[Engine] = []
    most, is_closing, go_on = [0], threading.Event(), threading.Event()

    class SlowToClose(ScriptedEngine):
        def __init__(self, spec: ModelSpec) -> None:
            super().__init__(spec)
            opened.append(self)
            most.append(len(opened))

        def sleep(self) -> bool:
            return True

        def close(self) -> None:
            is_closing.set()
            go_on.wait(60)
            opened.remove(self)

    monkeypatch.setattr(served_model, "load_engine", SlowToClose)
    with started([ModelSpec("m", "scripted")]) as worker:
        monkeypatch.setattr(worker.loader, "_find_spec", lambda id_: ModelSpec(id_, "scripted"))
        if is_asleep:
            worker.loader.unload("m", may_sleep=True)
        unloading = threading.Thread(target=worker.loader.unload, args=["m"])
        unloading.start()
        assert is_closing.wait(60)
        worker.loader.load_replica(wanted)
        time.sleep(0.5)
        go_on.set()
        unloading.join(60)
        wait_until(lambda: worker.open_models() == [wanted])
    assert max(most) == 1


@pytest.mark.django_db(transaction=True)
def test_a_model_that_is_being_unloaded_takes_no_work_when_it_need_not_make_room_any_more(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its new runs would be stopped after ``DRAIN_TIMEOUT_S``."""
    settings.MAX_LOADED_MODELS = 1
    with started([ModelSpec("m", "scripted", min_resident_s=0.0)]) as worker:
        monkeypatch.setattr(worker.loader, "_find_spec", lambda id_: ModelSpec(id_, "scripted"))
        busy_model = worker.loader.models["m"]
        assert busy_model.take_slot()
        worker.loader.load_replica("wanted")
        wait_until(lambda: worker.open_models() == [])
        unloading = threading.Thread(target=worker.loader.unload, args=["m"])
        unloading.start()
        time.sleep(0.1)
        worker.loader.unload("wanted")
        time.sleep(0.5)
        opened = worker.open_models()
        busy_model.release_slot()
        unloading.join(60)
        assert opened == []
        assert not worker.loader.models


@pytest.mark.django_db(transaction=True)
def test_what_waits_for_a_model_that_made_room_has_it_loaded_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, api_key: Key
) -> None:
    """Also without ``LOAD_ON_DEMAND``: the model was loaded when the request was accepted."""
    settings.MAX_LOADED_MODELS = 1
    monkeypatch.setattr(loading, "_CHECK_WAITING_S", 0.05)
    loaded: list[str] = []
    monkeypatch.setattr(orders, "note_loaded", loaded.append)
    specs = [ModelSpec(id_, "scripted", min_resident_s=0.0) for id_ in ("m", "wanted")]
    by_id = {spec.id: spec for spec in specs}
    known = SimpleNamespace(models=by_id, find=by_id.get)
    for module in (loading, fleet):
        monkeypatch.setattr(module, "catalogue", lambda: known)
    with started(specs[:1]) as worker:
        waiting(api_key, [{"text": "hi"}])
        worker.loader.load("wanted")
        wait_until(lambda: loaded == ["m", "wanted", "m"])
        wait_until(lambda: worker.open_models() == ["m"])


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("order", ["reload", "unload"])
def test_an_order_is_carried_out_after_a_run_that_did_not_stop_in_time(
    runtime: Runtime, settings: Settings, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """A run cannot end, for example, while PostgreSQL is away."""
    settings.DRAIN_TIMEOUT_S = 0.1
    monkeypatch.setattr(loading, "STOP_S", 0.1)
    monkeypatch.setattr(runtime.loader, "_find_spec", lambda id_: ModelSpec(id_, "scripted"))
    busy_model = runtime.loader.models["m"]
    assert busy_model.take_slot()
    with ThreadPoolExecutor(1) as pool:
        carried_out = pool.submit(getattr(runtime.loader, order), "m")
        time.sleep(0.5)
        assert runtime.open_models() == []
        busy_model.release_slot()
        carried_out.result(60)
    if order == "reload":
        wait_until(lambda: runtime.open_models() == ["m"])
    assert runtime.loader.models.get("m") is not busy_model


@pytest.mark.django_db(transaction=True)
def test_models_are_loaded_on_demand_after_a_fault_of_their_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "_CHECK_WAITING_S", 0.05)
    faults = [OSError("Stale file handle")]
    looked = threading.Event()
    with started([ModelSpec("m", "scripted")]) as worker:

        def loadable() -> tuple[str, ...]:
            if faults:
                raise faults.pop()
            looked.set()
            return ()

        monkeypatch.setattr(worker.loader, "loadable", loadable)
        assert looked.wait(10)


@pytest.mark.django_db(transaction=True)
def test_a_drained_worker_says_so_once_the_order_is_seen_and_takes_work_again(
    runtime: Runtime,
) -> None:
    orders.give(OrderState.DRAINED, [runtime.id])
    found = announced(runtime)
    assert found is not None
    assert found.is_draining
    assert "m" not in runtime.open_models()
    orders.give(OrderState.ACTIVE, [runtime.id])
    assert "m" in runtime.open_models()


@pytest.mark.django_db(transaction=True)
def test_an_order_without_its_hint_is_carried_out_all_the_same(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "channel", lambda _: "another")
    orders.give(OrderState.DRAINED, [runtime.id])
    wait_until(lambda: "m" not in runtime.open_models())


@pytest.mark.django_db(transaction=True)
def test_an_order_that_fails_is_not_repeated_and_does_not_stop_the_next(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runtime.loader, "load", Mock(side_effect=ValueError("broken")))
    orders.give(OrderState.LOADED, [runtime.id], "m")
    orders.give(OrderState.DRAINED, [runtime.id])
    assert runtime.described().is_draining
    assert caplog.text.count("orders: loaded m failed") == 1


class RuntimeWithoutDatabase:
    """A worker whose database is down."""

    def serve(self, model: str) -> None:
        raise OperationalError("down")


def test_a_wake_up_is_lost_and_not_an_error_while_the_database_is_down(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "current_runtime", RuntimeWithoutDatabase)
    tasks.generate("m")
    assert "cannot claim for m" in caplog.text
