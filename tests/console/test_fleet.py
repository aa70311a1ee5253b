"""The page of models and workers: what they are, and orders to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from inference_site.catalogue.fleet.leases import Lease, LiveWorker, ModelReport, ModelState
from inference_site.catalogue.model_store.models import WorkerOrder
from inference_site.core.host import Device
from inference_site.core.storage.redis import site_client

FLEET = "/admin/fleet/"
WORKER = "host:1:abcdef"


@pytest.fixture
def worker() -> Iterator[str]:
    """A worker that holds a lease, and reads no orders."""
    ready = ModelReport("demo", slots=4, busy=1)
    failed = ModelReport("demo-embedding", 4, 0, ModelState.FAILED, reason="no such file")
    memory = Device("memory", 8 * 2**30, 6 * 2**30)
    described = LiveWorker(
        WORKER, (ready, failed), host="gpu-1", devices=(memory,), loadable=("demo-embedding",)
    )
    lease = Lease(WORKER, lambda: described)
    lease.renew()
    yield WORKER
    site_client().delete(f"worker:{WORKER}")
    site_client().srem("workers", WORKER)


def ordered() -> list[str]:
    """Return the orders to the worker."""
    return list(WorkerOrder.objects.filter(worker=WORKER).values_list("state", flat=True))


def request_action(browser: Client, action: str, target: str) -> str:
    fields = {"action": action, "target": target}
    response = browser.post(f"{FLEET}action/", fields, follow=True)
    return response.content.decode()


def test_models_and_workers_are_shown(admin: Client, worker: str) -> None:
    text = admin.get(FLEET).content.decode()
    for part in (worker, "gpu-1", "memory: 6.0 of 8.0 GiB", "1 / 4", "no such file"):
        assert part in text


@pytest.mark.parametrize(
    ("action", "target", "state", "shown"),
    [
        ("drain", WORKER, "drained", f"Draining {WORKER}…"),
        ("resume", WORKER, "active", f"Resuming {WORKER}…"),
        ("unload", "demo", "unloaded", "Unloading demo…"),
    ],
)
def test_an_action_is_sent_to_the_worker_and_written_to_the_audit_log(
    admin: Client, worker: str, action: str, target: str, state: str, shown: str
) -> None:
    text = request_action(admin, action, target)
    assert shown in text
    assert ordered() == [state]
    entry = LogEntry.objects.get()
    assert (entry.object_repr, entry.change_message) == (
        target,
        f"{action.capitalize()} requested.",
    )


def test_an_impossible_action_shows_its_error(admin: Client, worker: str) -> None:
    assert "There is no live worker" in request_action(admin, "drain", "nobody")
    assert "There is no model" in request_action(admin, "load", "nothing")
    assert "There is no such action." in request_action(admin, "explode", WORKER)
    assert ordered() == []
    assert not LogEntry.objects.exists()


def test_a_user_with_view_permission_only_cannot_send_actions(
    staff: Callable[..., Client], worker: str
) -> None:
    looker = staff("generations.view_generation")
    text = looker.get(FLEET).content.decode()
    assert worker in text
    assert 'value="drain"' not in text
    assert looker.post(f"{FLEET}action/", {"action": "drain", "target": worker}).status_code == 403
    assert ordered() == []
    assert staff().get(FLEET).status_code == 403
