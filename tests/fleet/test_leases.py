"""Leases on a real Redis: who lives, and for how long that is believed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import redis.exceptions

from inference_site.catalogue.fleet import leases
from inference_site.catalogue.fleet.leases import (
    LEASE_S,
    Lease,
    LiveView,
    LiveWorker,
    ModelReport,
    is_alive,
    live_workers,
    prune,
    unsent_tokens,
)
from inference_site.core.storage import cached_value
from inference_site.core.storage.redis import site_client
from inference_site.runs.queue import new_id
from tests.waiting import wait_until

SERVED = (ModelReport("demo", slots=4, busy=1), ModelReport("other", slots=1, busy=0))


@pytest.fixture
def worker() -> Iterator[str]:
    name = new_id("host:")
    yield name
    site_client().delete(f"worker:{name}", f"worker:{name}:unsent")
    prune()


def found(name: str) -> LiveWorker | None:
    """Return the worker as the site sees it; other tests may have workers of their own."""
    return next((w for w in live_workers() if w.id == name), None)


def test_a_worker_with_a_lease_is_live_with_what_it_serves(worker: str) -> None:
    Lease(worker, lambda: LiveWorker(worker, SERVED)).renew()
    assert found(worker) == LiveWorker(worker, SERVED)
    assert is_alive(worker)


@pytest.mark.parametrize("ahead_s", [300, -300])
def test_times_of_a_worker_are_by_the_clock_of_who_reads_them(
    worker: str, ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests waited five minutes longer for the server of a model of a worker with this clock."""
    now = time.time()
    served = ModelReport("demo", 4, 0, since=now + ahead_s - 7, away_since=now + ahead_s - 3)
    never_away = ModelReport("other", 1, 0, since=now + ahead_s)
    described = LiveWorker(worker, (served, never_away), started_at=now + ahead_s - 60)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(time, "time", lambda: now + ahead_s)
        Lease(worker, lambda: described).renew()
    read = found(worker)
    assert read is not None
    times = [read.started_at, read.models[0].since, read.models[0].away_since]
    assert times == pytest.approx([now - 60, now - 7, now - 3], abs=1)
    assert read.models[1].away_since == 0


def test_a_lease_ends_by_itself(worker: str) -> None:
    Lease(worker, lambda: LiveWorker(worker, SERVED)).renew()
    assert 0 < int(site_client().ttl(f"worker:{worker}")) <= LEASE_S


def test_a_worker_hangs_if_it_does_not_try_to_renew_its_lease_and_not_if_redis_is_away(
    worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Lease(worker, lambda: LiveWorker(worker, SERVED))
    assert lease.is_hung
    with monkeypatch.context() as away:
        refused = Mock(side_effect=redis.exceptions.ConnectionError("refused"))
        away.setattr(leases, "site_client", lambda: SimpleNamespace(eval=refused))
        lease.renew()
        assert (refused.call_count, lease.is_hung) == (1, False)
    monkeypatch.setattr(leases, "_HUNG_S", 0.05)
    wait_until(lambda: lease.is_hung)
    lease.renew()
    assert not lease.is_hung


def test_a_worker_with_a_thousand_runs_has_more_time_to_renew_its_lease(worker: str) -> None:
    crowded = LiveWorker(worker, (ModelReport("demo", slots=1000, busy=1000),))
    Lease(worker, lambda: crowded).renew()
    assert int(site_client().ttl(f"worker:{worker}")) > 2 * LEASE_S


def test_what_had_sent_nothing_is_known_when_the_lease_has_ended(worker: str) -> None:
    said: dict[str, int] = {"chatcmpl-1": 7, "chatcmpl-2": 1}
    lease = Lease(worker, lambda: LiveWorker(worker, SERVED), lambda: said)
    lease.renew()
    assert unsent_tokens(worker, "chatcmpl-2") == 1
    said = {"chatcmpl-1": 9}  # The other has ended.
    lease.renew()
    site_client().delete(f"worker:{worker}")
    assert unsent_tokens(worker, "chatcmpl-1") == 9
    assert unsent_tokens(worker, "chatcmpl-2") == unsent_tokens("nobody", "chatcmpl-1") == 0
    assert int(site_client().ttl(f"worker:{worker}:unsent")) > LEASE_S


def test_a_worker_whose_lease_has_ended_is_not_live(worker: str) -> None:
    Lease(worker, lambda: LiveWorker(worker, SERVED)).renew()
    site_client().delete(f"worker:{worker}")
    assert found(worker) is None
    assert not is_alive(worker)


def test_a_started_lease_is_renewed_until_it_is_given_back(
    worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "PERIOD_S", 0.01)
    lease = Lease(worker, lambda: LiveWorker(worker, SERVED))
    lease.start()
    assert is_alive(worker)
    site_client().delete(f"worker:{worker}")  # As a Redis that was restarted without its data.
    wait_until(lambda: found(worker))
    lease.stop()
    assert found(worker) is None
    assert worker.encode() not in site_client().smembers("workers")


def test_a_lease_follows_what_the_worker_serves(worker: str) -> None:
    served = [ModelReport("demo", slots=4, busy=0)]
    lease = Lease(worker, lambda: LiveWorker(worker, tuple(served)))
    lease.renew()
    served[:] = [ModelReport("demo", slots=4, busy=4)]
    lease.renew()
    assert found(worker) == LiveWorker(worker, (ModelReport("demo", 4, 4),))


def test_a_redis_that_is_down_does_not_stop_the_renewals(
    worker: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def down() -> redis.Redis:
        raise redis.exceptions.ConnectionError("down")

    lease = Lease(worker, lambda: LiveWorker(worker, SERVED))
    with monkeypatch.context() as patch:
        patch.setattr(leases, "site_client", down)
        lease.renew()
    assert "could not renew" in caplog.text
    lease.renew()
    assert is_alive(worker)


def test_only_workers_without_a_lease_leave_the_index(worker: str) -> None:
    Lease(worker, lambda: LiveWorker(worker, SERVED)).renew()
    prune()
    assert found(worker) is not None
    site_client().delete(f"worker:{worker}")
    prune()
    assert not site_client().sismember("workers", worker)


class Clock:
    """A clock that stands still until it is moved, and a site whose workers change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.workers = [LiveWorker("one", (ModelReport("demo", 4, 0),))]
        self.reads = 0
        monkeypatch.setattr(cached_value, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(leases, "live_workers", self._read)

    def _read(self) -> list[LiveWorker]:
        self.reads += 1
        return list(self.workers)


def test_the_view_is_remembered_for_its_time_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, view = Clock(monkeypatch), LiveView(ttl_s=1.0)
    before = view.workers()
    clock.workers = []
    clock.now += 0.9
    assert view.workers() == before
    clock.now += 0.2
    assert view.workers() == []
    assert clock.reads == 2


def test_a_redis_that_takes_no_writes_is_an_error_and_no_lack_of_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The leases have expired, because no worker could renew its own."""
    monkeypatch.setattr(leases, "live_workers", list)
    view = LiveView()
    assert view.workers() == []
    site_client().config_set("min-replicas-to-write", 1)
    try:
        with pytest.raises(redis.exceptions.ResponseError):
            view.refresh()
    finally:
        site_client().config_set("min-replicas-to-write", 0)
    assert view.refresh() == []


def test_an_error_that_many_requests_get_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them raises the one that is cached."""
    monkeypatch.setattr(leases, "live_workers", Mock(side_effect=redis.exceptions.ConnectionError))
    view = LiveView(ttl_s=60)

    def frames() -> int:
        with pytest.raises(redis.exceptions.ConnectionError) as caught:
            view.workers()
        return len(caught.traceback)

    assert len({frames() for _ in range(5)}) == 1


def test_the_view_knows_who_serves_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, view = Clock(monkeypatch), LiveView()
    clock.workers.append(LiveWorker("two", (ModelReport("other", 1, 0), ModelReport("x", 1, 0))))
    clock.workers.append(LiveWorker("draining", ()))
    assert [worker.id for worker in view.serving("other")] == ["two"]
    assert view.serving("unknown") == []
