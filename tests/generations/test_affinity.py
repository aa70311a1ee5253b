"""A generation that continues another is left to that one's worker, for a moment."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone
from pytest_django.fixtures import Settings

from completions.assemblers.chat import CHAT
from inference_site.accounts.keys import Caller
from inference_site.accounts.models import ApiKey, Project
from inference_site.catalogue.fleet.leases import LiveView, LiveWorker, ModelReport
from inference_site.core.storage.redis import broker_client
from inference_site.gateway.submission.submit import Submission, submit
from inference_site.runs import queue
from inference_site.runs.models import Generation, Status
from inference_site.runs.queue import Preference, enqueue, new_id, preference
from inference_site.runs.wake_ups import (
    DelayedWakeUps,
    count_wake_ups,
    own_queue,
    queue_name,
)
from tests.generations.rows import chat_document, create_generation
from tests.waiting import wait_until

Key = tuple[ApiKey, str]


def view_of(*workers: LiveWorker) -> LiveView:
    """A view of these workers and no others."""
    view = LiveView()
    view.workers = lambda: list(workers)  # type: ignore[method-assign]  # Nobody else is asked.
    return view


def serving(name: str, model: str = "m") -> LiveWorker:
    return LiveWorker(name, (ModelReport(model, 1, 0),))


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers of the model."""
    monkeypatch.setattr(queue, "live_view", view_of(serving("one"), serving("two")))


def before(api_key: Key, worker: str) -> str:
    row = create_generation(
        api_key[0], status=Status.COMPLETED, worker=worker, finished_at=timezone.now()
    )
    return row.public_id


def test_the_worker_of_the_one_before_is_preferred_for_a_moment(
    api_key: Key, two: None, settings: Settings
) -> None:
    settings.AFFINITY_WAIT_MS = 5_000
    preferred = preference("m", before(api_key, "two"))
    assert (preferred.worker, preferred.wait_ms) == ("two", 5_000)
    assert preferred.open_after_s > 5


def test_until_when_a_worker_is_preferred_is_a_time_of_the_database(
    api_key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is compared with the database's clock; that of the web host may be wrong."""
    real = timezone.now()
    monkeypatch.setattr(timezone, "now", lambda: real + timedelta(hours=1))
    row = create_generation(
        api_key[0], preferred_worker="one", preferred_until=Preference("one", 60_000).until
    )
    row.refresh_from_db()
    assert row.preferred_until is not None
    assert abs(row.preferred_until - real - timedelta(minutes=1)) < timedelta(minutes=1)
    assert claimed("two") is None
    assert Preference().until is None


def test_nothing_is_preferred_without_a_choice(
    api_key: Key, two: None, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert preference("m", "") == Preference()
    assert preference("m", "resp_unknown") == Preference()
    assert preference("m", before(api_key, "gone")) == Preference()
    assert preference("other", before(api_key, "one")) == Preference()
    settings.AFFINITY_WAIT_MS = 0
    assert preference("m", before(api_key, "one")) == Preference()
    settings.AFFINITY_WAIT_MS = 200
    monkeypatch.setattr(queue, "live_view", view_of(serving("one")))
    assert preference("m", before(api_key, "one")) == Preference()


def test_generations_with_one_cache_key_prefer_the_worker_of_the_latest(
    api_key: Key, two: None, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.AFFINITY_WAIT_MS = 5_000

    def accepted(cache_key: str, project_id: int = api_key[0].project_id) -> Generation:
        id_ = new_id("chatcmpl-")
        caller = Caller(api_key[0].pk, project_id)
        submit(Submission(CHAT, id_, caller, chat_document(id_, "hi"), cache_key=cache_key), "req")
        return Generation.objects.get(public_id=id_)

    key = new_id("key-")
    first = accepted(key)
    assert first.preferred_worker == ""
    Generation.objects.filter(pk=first.pk).update(worker="two")
    assert [accepted(key).preferred_worker for _ in range(3)] == ["two"] * 3  # They still wait.
    assert accepted(f"{key}x").preferred_worker == accepted("").preferred_worker == ""
    other = Project.objects.create(name="other")
    assert accepted(key, other.pk).preferred_worker == ""
    monkeypatch.setattr(queue, "live_view", view_of(serving("one")))
    assert accepted(key).preferred_worker == ""


def claimed(worker: str) -> str | None:
    claim = Generation.objects.claim("m", worker)
    return None if claim is None else claim.public_id


def test_others_leave_what_prefers_a_worker_until_its_time(api_key: Key) -> None:
    later = timezone.now() + timedelta(minutes=1)
    held = create_generation(api_key[0], preferred_worker="one", preferred_until=later)
    assert claimed("two") is None
    assert claimed("one") == held.public_id
    past = timezone.now() - timedelta(seconds=1)
    free = create_generation(api_key[0], preferred_worker="one", preferred_until=past)
    assert claimed("two") == free.public_id


def test_what_prefers_another_worker_does_not_hide_what_waits_behind_it(api_key: Key) -> None:
    later, old = timezone.now() + timedelta(minutes=1), timezone.now() - timedelta(minutes=1)
    create_generation(api_key[0], preferred_worker="one", preferred_until=later, created_at=old)
    newer = create_generation(api_key[0])
    assert claimed("two") == newer.public_id


def test_the_preferred_worker_is_woken_and_later_all(
    api_key: Key, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.AFFINITY_WAIT_MS = 100
    model, one = new_id("model-"), new_id("host:")
    monkeypatch.setattr(queue, "live_view", view_of(serving(one, model), serving("two", model)))
    monkeypatch.setattr(queue, "delayed_wake_ups", DelayedWakeUps())
    id_ = new_id("chatcmpl-")
    new = Generation(public_id=id_, model=model, api_key=api_key[0], project=api_key[0].project)
    enqueue(new, chat_document(id_, "hi"), "web.one", continues=before(api_key, one))
    assert broker_client().llen(own_queue(one)) == 1
    row = Generation.objects.get(public_id=id_)
    assert row.preferred_worker == one
    wait_until(lambda: count_wake_ups(model) == 1)
    assert row.preferred_until is not None
    assert timezone.now() >= row.preferred_until
    broker_client().delete(own_queue(one))
    broker_client().delete(queue_name(model))
