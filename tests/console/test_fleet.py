"""The page of models and workers: what they are, and what they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import orjson
import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from inference_site.fleet.leases import Device, Lease, LiveWorker, ModelReport, ModelState
from inference_site.storage.redis_clients import site_client

FLEET = "/admin/fleet/"
WORKER = "host:1:abcdef"


@pytest.fixture
def worker() -> Iterator[str]:
    """A worker that holds a lease, and hears nothing."""
    ready = ModelReport("demo", slots=4, busy=1)
    failed = ModelReport("demo-embedding", 4, 0, ModelState.FAILED, reason="no such file")
    memory = Device("memory", 8 * 2**30, 6 * 2**30)
    described = LiveWorker(
        WORKER, (ready, failed), host="gpu-1", devices=(memory,), loadable=("demo-embedding",)
    )
    lease = Lease(WORKER, lambda: described)
    lease.renew()
    yield WORKER
    site_client().delete(f"worker:{WORKER}", f"worker:{WORKER}:commands", "load:demo-embedding")
    site_client().srem("workers", WORKER)


def told() -> list[str]:
    """What the worker was told, newest first."""
    found = site_client().lrange(f"worker:{WORKER}:commands", 0, -1)
    return [orjson.loads(command)["do"] for command in found]


def tell(browser: Client, act: str, what: str) -> str:
    response = browser.post(f"{FLEET}tell/", {"act": act, "what": what}, follow=True)
    return response.content.decode()


def test_models_and_workers_are_shown(admin: Client, worker: str) -> None:
    text = admin.get(FLEET).content.decode()
    for part in (worker, "gpu-1", "memory: 6.0 of 8.0 GiB", "1 / 4", "no such file"):
        assert part in text


@pytest.mark.parametrize(
    ("act", "what"), [("drain", WORKER), ("resume", WORKER), ("unload", "demo")]
)
def test_a_worker_is_told_and_the_audit_log_knows(
    admin: Client, worker: str, act: str, what: str
) -> None:
    assert f"Told: {act} {what}." in tell(admin, act, what)
    assert told() == [act]
    entry = LogEntry.objects.get()
    assert (entry.object_repr, entry.change_message) == (what, f"{act.capitalize()}.")


def test_what_cannot_be_done_is_said(admin: Client, worker: str) -> None:
    assert "There is no live worker" in tell(admin, "drain", "nobody")
    assert "There is no model" in tell(admin, "load", "nothing")
    assert "There is no such action." in tell(admin, "explode", WORKER)
    assert told() == []
    assert not LogEntry.objects.exists()


def test_who_may_only_look_tells_nothing(staff: Callable[..., Client], worker: str) -> None:
    looker = staff("generations.view_generation")
    text = looker.get(FLEET).content.decode()
    assert worker in text
    assert 'value="drain"' not in text
    assert looker.post(f"{FLEET}tell/", {"act": "drain", "what": worker}).status_code == 403
    assert told() == []
    assert staff().get(FLEET).status_code == 403
