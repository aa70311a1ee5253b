"""Django's request path for /v1: what a request holds, and faults of the site."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from django.core import signals
from django.db import close_old_connections
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from rest_framework.parsers import BaseParser
from rest_framework.request import Request
from rest_framework.views import APIView

from completions.views import models
from inference_site.accounts.models import ApiKey
from inference_site.catalogue.fleet.leases import Lease, LiveView, LiveWorker, ModelReport, prune
from inference_site.core.domain.errors import QueueFull
from inference_site.core.storage.redis import broker_client, site_client
from inference_site.gateway.api import views as http_views
from inference_site.gateway.handler import ApiHandler
from inference_site.gateway.handoff import SCOPE_KEY, Outcome
from inference_site.gateway.hub import hub
from inference_site.gateway.submission import model_access
from inference_site.gateway.submission import submit as submit_module
from inference_site.runs.models import Generation
from inference_site.runs.queue import new_id
from inference_site.runs.wake_ups import queue_name
from tests.gateway.asgi import error_of, scope, with_head

Key = tuple[ApiKey, str]
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def handler() -> Iterator[ApiHandler]:
    """The handler; a request leaves the connection alone, which is the test's transaction."""
    both = (signals.request_started, signals.request_finished)
    for signal in both:
        signal.disconnect(close_old_connections)
    yield ApiHandler()
    for signal in both:
        signal.connect(close_old_connections)


class Api:
    """Sends requests with a valid key, unless the headers say otherwise."""

    def __init__(self, handler: ApiHandler, secret: str) -> None:
        self._handler, self._secret = handler, secret
        self.outcome = Outcome()

    def __call__(
        self, method: str, path: str, body: Any = None, **headers: str | None
    ) -> HttpResponseBase:
        given = {
            "authorization": f"Bearer {self._secret}",
            "content-type": "application/json",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        sent = {name: value for name, value in given.items() if value is not None}
        content = body if isinstance(body, bytes) else b"" if body is None else orjson.dumps(body)
        return self._handler.respond(
            with_head({**scope(method, path, sent), SCOPE_KEY: self.outcome}), content
        )


@pytest.fixture
def api(handler: ApiHandler, api_key: Key) -> Api:
    return Api(handler, api_key[1])


@pytest.fixture
def live_demo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker that serves the demo model, as far as its lease says."""
    name = new_id("host:")
    Lease(name, lambda: LiveWorker(name, (ModelReport("demo", slots=1, busy=0),))).renew()
    monkeypatch.setattr(model_access, "live_view", LiveView(ttl_s=0))
    yield
    site_client().delete(f"worker:{name}")
    prune()
    broker_client().delete(queue_name("demo"))


@pytest.mark.usefixtures("live_demo")
@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/models", None, 200),
        ("POST", "/v1/chat/completions", CHAT, 200),
        ("POST", "/v1/chat/completions", {**CHAT, "n": 0}, 400),
        ("POST", "/v1/responses", {"model": "demo", "input": "hi"}, 200),
        ("POST", "/v1/conversations", {}, 200),
    ],
)
def test_what_a_request_holds_is_freed_when_it_is_answered(
    api: Api, method: str, path: str, body: Any, status: int
) -> None:
    """Nothing is left to the garbage collector: a body may have 20 MB."""

    def ask() -> int:
        return api(method, path, body, idempotency_key=new_id("key-")).status_code

    assert ask() == status  # What is imported and cached at first is not looked at.
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        assert ask() == status
        gc.collect()
        left = {type(found) for found in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    of_requests = (APIView, HttpRequest, HttpResponseBase, Request, BaseParser)
    assert [kind for kind in left if issubclass(kind, of_requests)] == []


def test_an_internal_fault_is_an_envelope_without_its_details(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(models, "catalogue", broken)
    response = api("GET", "/v1/models", x_request_id="req-broken")
    assert response.status_code == 500
    assert error_of(response)["type"] == "server_error"
    assert "secret" not in error_of(response)["message"]
    assert "secret detail" in caplog.text
    assert "req-broken" in caplog.text


def test_a_fault_outside_the_view_is_an_envelope_as_well(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(http_views.ApiView, "dispatch", broken)
    response = api("GET", "/v1/models")
    assert (response.status_code, error_of(response)["type"]) == (500, "server_error")


@pytest.mark.usefixtures("live_demo")
def test_nobody_follows_what_was_not_accepted(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []

    def full(row: Generation, *_: Any, **__: Any) -> None:
        refused.append(row.public_id)
        assert hub.readers(row.public_id)  # It follows before anything can be sent.
        raise QueueFull

    monkeypatch.setattr(submit_module, "enqueue", full)
    response = api("POST", "/v1/chat/completions", CHAT)
    assert (response.status_code, response["Retry-After"]) == (503, "5")
    assert error_of(response)["code"] == "queue_full"
    assert hub.readers(refused[0]) == []
