"""What becomes of a request for a model that nobody serves yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from pytest_django.fixtures import Settings

from completions.assemblers.chat import CHAT
from inference_site.accounts.keys import Caller
from inference_site.accounts.models import ApiKey
from inference_site.catalogue.catalogue import Catalogue
from inference_site.catalogue.fleet import fleet, leases
from inference_site.catalogue.fleet.leases import (
    Lease,
    LiveView,
    LiveWorker,
    ModelReport,
    ModelState,
)
from inference_site.catalogue.models_file import Route, Target
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.errors.api_errors import UnavailableError
from inference_site.core.storage.redis import site_client
from inference_site.gateway.submission import model_access
from inference_site.gateway.submission.model_access import require_served, served_model
from inference_site.runs import maintenance, queue
from inference_site.runs.maintenance import expire_server_away, expire_while_loading
from inference_site.runs.models import Generation, ServiceClass, Status
from inference_site.runs.queue import enqueue, new_id
from inference_site.runs.streams.request_documents import save_document
from tests.generations.rows import chat_document, create_generation
from tests.waiting import wait_until

Key = tuple[ApiKey, str]
Show = Callable[..., None]
SPEC = ModelSpec("m", "scripted")


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Show:
    """Have the site see one worker that has the model in some state, or has it not."""

    def see(state: ModelState | None, since: float = 0.0, away_since: float = 0.0) -> None:
        models: tuple[ModelReport, ...] = ()
        if state is not None:
            models = (ModelReport("m", 1, 0, state, since=since, away_since=away_since),)
        view = LiveView(ttl_s=0)
        monkeypatch.setattr(leases, "live_workers", lambda: [LiveWorker("one", models)])
        for module in (model_access, model_access, fleet, queue, maintenance):
            monkeypatch.setattr(module, "live_view", view)

    return see


def refused(*, background: bool = False) -> tuple[str | None, int | None] | None:
    """Return the code and when to try again; None for a request that may be queued."""
    try:
        require_served(SPEC, background=background)
    except UnavailableError as exc:
        return exc.code, exc.retry_after_s
    return None


def test_a_worker_is_used_as_soon_as_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    view, name = LiveView(), new_id("worker-")
    monkeypatch.setattr(model_access, "live_view", view)
    spec = ModelSpec(new_id("m-"), "scripted")
    assert view.serving(spec.id) == []
    lease = Lease(name, lambda: LiveWorker(name, (ModelReport(spec.id, 1, 0),)))
    lease.start()
    try:
        wait_until(lambda: name in [worker.id for worker in leases.live_workers()])
        time.sleep(2 * leases._MIN_READ_INTERVAL_S)
        require_served(spec)
    finally:
        lease.stop()


def test_a_model_that_is_ready_is_served(show: Show) -> None:
    show(ModelState.READY)
    assert refused() is None


@pytest.mark.parametrize("state", [None, ModelState.DRAINING, ModelState.FAILED])
def test_a_model_that_nobody_will_serve_is_refused_in_the_background_too(
    show: Show, state: ModelState | None
) -> None:
    show(state)
    assert refused() == ("no_worker", 5)
    assert refused(background=True) == ("no_worker", 5)


def test_while_a_model_loads_only_the_background_waits(show: Show) -> None:
    show(ModelState.LOADING)
    assert refused() == ("model_loading", 10)
    assert refused(background=True) is None


def test_with_a_wait_for_loads_everybody_waits(show: Show, settings: Settings) -> None:
    settings.LOAD_WAIT_S = 30
    show(ModelState.LOADING)
    assert refused() is None


@pytest.mark.parametrize("state", [ModelState.FAILED, ModelState.LOADING])
def test_a_server_that_may_come_back_is_waited_for(
    show: Show, settings: Settings, state: ModelState
) -> None:
    show(state, away_since=time.time())
    assert refused() is None
    settings.SERVER_WAIT_S = 0
    assert refused() == ("engine_unavailable", 5)
    assert refused(background=True) is None


@pytest.mark.parametrize("state", [None, ModelState.LOADING, ModelState.DRAINING])
def test_while_the_only_worker_of_a_model_is_replaced_everybody_waits(
    show: Show, restarting: ModelSpec, state: ModelState | None
) -> None:
    show(state)
    require_served(restarting)
    require_served(restarting, background=True)


def test_a_model_that_its_next_worker_cannot_load_is_refused(
    show: Show, restarting: ModelSpec
) -> None:
    show(ModelState.FAILED)
    assert refused() == ("no_worker", 5)


def test_a_restart_that_is_over_is_forgotten_once_all_have_seen_it(
    show: Show, restarting: ModelSpec
) -> None:
    show(None)
    fleet.note_restarted([restarting.id])
    require_served(restarting)  # This process may have seen the leases a second ago.
    wait_until(lambda: refused() == ("no_worker", 5))


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("on_demand", "is_preloaded", "is_loaded"),
    [(False, True, False), (True, True, True), (False, False, True)],
)
def test_a_fallback_answers_while_the_target_of_a_route_is_loaded(
    show: Show,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    on_demand: bool,
    is_preloaded: bool,
    is_loaded: bool,
) -> None:
    settings.LOAD_ON_DEMAND = on_demand
    show(ModelState.READY)
    loads = Loads()
    monkeypatch.setattr(fleet, "load", loads)
    target = ModelSpec(new_id("m-"), "scripted", is_preloaded=is_preloaded)
    route = Route("r", (Target(target, 2048, 1.0),), (Target(SPEC, 2048),))
    known = Catalogue([target, SPEC], routes=[route])
    monkeypatch.setattr(model_access, "catalogue", lambda: known)
    found = served_model(Caller(1, 1, "p"), "r")
    assert (found.spec, found.route) == (SPEC, "r")
    assert loads.asked == ([(None, target.id)] if is_loaded else [])
    show(None)
    monkeypatch.setattr(fleet, "load", Loads(fleet.NotLoadable("no")))
    with pytest.raises(UnavailableError, match=target.id):
        served_model(Caller(1, 1, "p"), "r")


@pytest.fixture
def restarting() -> Iterator[ModelSpec]:
    """The model, whose worker has said that another takes its place."""
    fleet.note_restart([SPEC.id])
    yield SPEC
    site_client().delete(f"restart:{SPEC.id}")


class Loads:
    """Notes the loads that are asked for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[tuple[str | None, str]] = []
        self._error = error

    def __call__(self, worker: str | None, model: str) -> str:
        if self._error is not None:
            raise self._error
        self.asked.append((worker, model))
        return "one"


def test_a_model_is_loaded_on_demand_if_that_is_allowed(
    show: Show, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Loads()
    monkeypatch.setattr(fleet, "load", loads)
    show(None)
    assert refused() == ("no_worker", 5)
    assert loads.asked == []
    settings.LOAD_ON_DEMAND = True
    assert refused() == ("model_loading", 10)
    assert loads.asked == [(None, "m")]


def test_a_model_that_just_failed_is_not_tried_again_at_once(
    show: Show, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.LOAD_ON_DEMAND = True
    loads = Loads()
    monkeypatch.setattr(fleet, "load", loads)
    show(ModelState.FAILED, since=time.time() - 10)
    assert refused() == ("no_worker", 5)
    show(ModelState.FAILED, since=time.time() - 100)
    assert refused() == ("model_loading", 10)
    assert len(loads.asked) == 1


def test_a_model_that_no_worker_can_load_has_no_worker(
    show: Show, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.LOAD_ON_DEMAND = True
    monkeypatch.setattr(fleet, "load", Loads(fleet.NotLoadable("none can")))
    show(None)
    assert refused() == ("no_worker", 5)


def accept(api_key: Key, *, background: bool = False) -> Generation:
    id_ = new_id("chatcmpl-")
    key, project = api_key[0], api_key[0].project
    new = Generation(
        kind=CHAT, public_id=id_, model="m", api_key=key, project=project, background=background
    )
    enqueue(new, chat_document(id_, "hi"), "web.one")
    return Generation.objects.get(public_id=id_)


def pass_time(row: Generation) -> None:
    """Let the time pass until which a generation waits for its model, if it does."""
    site_client().zadd("load-deadlines", {row.public_id: 1}, xx=True)


def test_who_waits_too_long_for_a_load_is_told_so(
    api_key: Key, show: Show, settings: Settings
) -> None:
    settings.LOAD_WAIT_S = 30
    show(ModelState.LOADING)
    late, early, background = accept(api_key), accept(api_key), accept(api_key, background=True)
    show(ModelState.READY)
    accepted_before = accept(api_key)
    show(ModelState.LOADING)
    for row in (late, background, accepted_before):
        pass_time(row)
    expire_while_loading()
    for row in (late, early, background, accepted_before):
        row.refresh_from_db()
    assert (late.status, late.error_code) == (Status.FAILED, "model_loading")
    waiting = {early.status, background.status, accepted_before.status}
    assert waiting == {Status.QUEUED}
    assert site_client().zscore("load-deadlines", late.public_id) is None


def test_who_waited_for_a_load_that_failed_is_told_so(
    api_key: Key, show: Show, settings: Settings
) -> None:
    settings.LOAD_WAIT_S = 30
    show(ModelState.LOADING)
    row = accept(api_key)
    pass_time(row)
    show(ModelState.FAILED)
    expire_while_loading()
    row.refresh_from_db()
    assert (row.status, row.error_code) == (Status.FAILED, "no_worker")


def test_who_waits_for_a_load_is_told_as_soon_as_it_has_failed(
    api_key: Key, show: Show, settings: Settings
) -> None:
    settings.LOAD_WAIT_S = 30
    show(ModelState.LOADING)
    row, background = accept(api_key), accept(api_key, background=True)
    now = time.time()
    not_yet = {"since": now - 60}, {"since": now + 1, "away_since": now + 1}
    for times in not_yet:  # Of an earlier load, and of a server that may come back.
        show(ModelState.FAILED, **times)
        expire_while_loading()
        row.refresh_from_db()
        assert row.status == Status.QUEUED
    show(ModelState.FAILED, since=now + 1)
    expire_while_loading()
    row.refresh_from_db()
    background.refresh_from_db()
    assert (row.status, row.error_code) == (Status.FAILED, "no_worker")
    assert background.status == Status.QUEUED
    assert site_client().zscore("load-deadlines", row.public_id) is None


def test_who_waits_for_a_slot_is_told_when_the_model_is_loaded_again_and_that_fails(
    api_key: Key, show: Show
) -> None:
    """An operator's edit broke the model: its clients had waited for QUEUE_TIMEOUT_S."""
    show(ModelState.READY)
    row, background = accept(api_key), accept(api_key, background=True)
    show(ModelState.DRAINING)
    expire_while_loading()
    show(ModelState.LOADING)
    expire_while_loading()
    row.refresh_from_db()
    assert row.status == Status.QUEUED
    show(ModelState.FAILED, since=time.time() + 1)
    expire_while_loading()
    row.refresh_from_db()
    background.refresh_from_db()
    assert (row.status, row.error_code) == (Status.FAILED, "no_worker")
    assert background.status == Status.QUEUED


@pytest.mark.parametrize(
    ("came_s", "went_s", "changes", "expected"),
    [
        (40, 31, {}, "engine_unavailable"),  # It came before the server went, or after.
        (31, 40, {}, "engine_unavailable"),
        (40, 29, {}, ""),
        (29, 40, {}, ""),
        (40, 0, {}, ""),
        (40, 40, {"background": True}, ""),
        (40, 40, {"service_class": ServiceClass.BACKGROUND}, ""),  # Flex.
    ],
)
def test_who_waits_too_long_for_a_server_is_told_so(
    api_key: Key,
    show: Show,
    came_s: int,
    went_s: int,
    changes: dict[str, Any],
    expected: str,
) -> None:
    row = create_generation(api_key[0], model="m", status=Status.QUEUED, **changes)
    Generation.objects.filter(pk=row.pk).update(
        created_at=timezone.now() - timedelta(seconds=came_s)
    )
    state = ModelState.FAILED if went_s else ModelState.READY
    show(state, away_since=time.time() - went_s if went_s else 0)
    expire_server_away()
    row.refresh_from_db()
    assert (row.status, row.error_code) == ("failed" if expected else "queued", expected)


def test_who_waited_for_a_load_waits_for_a_slot_once_it_is_done(
    api_key: Key, show: Show, settings: Settings
) -> None:
    settings.LOAD_WAIT_S = 30
    show(ModelState.LOADING)
    row = accept(api_key)
    pass_time(row)
    show(ModelState.READY)
    expire_while_loading()
    row.refresh_from_db()
    assert row.status == Status.QUEUED


def test_an_old_row_that_never_waited_for_a_load_is_left_alone(api_key: Key, show: Show) -> None:
    show(ModelState.LOADING)
    old = timezone.now() - timedelta(hours=1)
    row = create_generation(api_key[0], created_at=old)
    save_document(row.public_id, chat_document(row.public_id, "hi"), "web.one")
    expire_while_loading()
    row.refresh_from_db()
    assert row.status == Status.QUEUED
