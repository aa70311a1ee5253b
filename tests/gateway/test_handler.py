"""Django's request path for /v1: routing, callers, bodies, and what goes wrong."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
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
from inference_site.catalogue.fleet import leases
from inference_site.catalogue.fleet.leases import Lease, LiveView, LiveWorker, ModelReport, prune
from inference_site.core.domain.errors import QueueFull
from inference_site.core.storage.redis import broker_client, site_client
from inference_site.gateway.api import views as http_views
from inference_site.gateway.handler import ApiHandler
from inference_site.gateway.handoff import SCOPE_KEY, HandOff, Outcome
from inference_site.gateway.hub import hub
from inference_site.gateway.submission import model_access
from inference_site.gateway.submission import submit as submit_module
from inference_site.runs.models import Generation
from inference_site.runs.queue import new_id
from inference_site.runs.streams.request_documents import load_document
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


@pytest.mark.parametrize("path", ["/v1/foo", "/v1", "/v1/", "/v1/chat", "/v1/chat/completions/x/y"])
def test_an_unknown_route_is_told_before_the_key_is_looked_at(api: Api, path: str) -> None:
    response = api("POST", path, authorization=None)
    assert response.status_code == 404
    assert error_of(response)["message"] == f"Invalid URL (POST {path.rstrip('/')})"


def test_a_trailing_slash_is_no_other_route_and_no_redirect(api: Api) -> None:
    assert api("GET", "/v1/models/").status_code == 200


def test_a_wrong_method_is_told_with_those_allowed(api: Api) -> None:
    response = api("PUT", "/v1/chat/completions", CHAT)
    assert response.status_code == 405
    assert "POST" in response["Allow"].split(", ")
    assert error_of(response)["code"] == "method_not_supported"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"authorization": None}, None),
        ({"authorization": "Bearer "}, None),
        ({"authorization": "Basic dXNlcjpwYXNz"}, None),
        ({"authorization": "Bearer sk-wrong-key-that-is-long-enough"}, "invalid_api_key"),
        ({"authorization": None, "x_api_key": "wrong"}, "invalid_api_key"),
        ({"authorization": None, "cookie": "sessionid=admin"}, None),
    ],
)
def test_without_a_good_key_nothing_is_served(
    api: Api, headers: dict[str, str | None], code: str | None
) -> None:
    response = api("GET", "/v1/models", **headers)
    assert response.status_code == 401
    assert response["WWW-Authenticate"] == "Bearer"
    assert (error_of(response)["type"], error_of(response)["code"]) == (
        "invalid_request_error",
        code,
    )


def test_a_refused_key_is_not_repeated_whole(api: Api) -> None:
    message = error_of(api("GET", "/v1/models", authorization="Bearer sk-abcdefghijklmnopq"))
    assert "sk-ab***pq" in message["message"]
    short = error_of(api("GET", "/v1/models", authorization="Bearer password"))["message"]
    assert "password" not in short


def test_a_key_may_come_in_either_header(api: Api, api_key: Key) -> None:
    assert api("GET", "/v1/models", authorization=f"bearer  {api_key[1]} ").status_code == 200
    assert api("GET", "/v1/models", authorization=None, x_api_key=api_key[1]).status_code == 200


@pytest.mark.parametrize("given", ["req-1", "a.B_c:9", "x" * 128])
def test_a_well_formed_request_id_is_kept(api: Api, given: str) -> None:
    assert api("GET", "/health", x_request_id=given)["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "two words", "x" * 129, "a\nb", "é", "a,b"])
def test_another_request_id_is_replaced(api: Api, given: str | None) -> None:
    made = api("GET", "/health", x_request_id=given)["x-request-id"]
    assert made.startswith("req_")
    assert made != api("GET", "/health", x_request_id=given)["x-request-id"]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/foo", "/v1/models/unknown"])
def test_every_answer_has_the_common_headers(api: Api, path: str) -> None:
    response = api("GET", path)
    assert response["x-request-id"].startswith("req_")
    assert int(response["openai-processing-ms"]) >= 0
    assert response["openai-version"] == "2020-10-01"
    assert response["Content-Type"] == "application/json"


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


def test_a_url_that_is_no_text_is_the_clients_fault(handler: ApiHandler) -> None:
    asked = with_head(scope("GET", "/v1/models", query=b"a=\xff\xfe"))
    response = handler.respond(asked, b"")
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"{", b"nonsense", b'{"model": NaN}', b"\xff", b"[1,]"])
def test_a_body_that_is_no_json_is_told_so(api: Api, body: bytes) -> None:
    response = api("POST", "/v1/chat/completions", body)
    assert response.status_code == 400
    told = error_of(response)
    assert "could not parse the JSON body" in told["message"]
    assert (told["param"], told["code"]) == (None, None)


def test_an_empty_body_is_the_clients_fault(api: Api) -> None:
    assert api("POST", "/v1/chat/completions", b"").status_code == 400


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None])
def test_another_content_type_is_refused(api: Api, content_type: str | None) -> None:
    response = api("POST", "/v1/chat/completions", CHAT, content_type=content_type)
    assert response.status_code == 415
    assert error_of(response)["code"] == "unsupported_content_type"


@pytest.mark.parametrize("accept", ["text/event-stream", "text/html", "application/xml", "*/*"])
def test_nothing_is_negotiated(api: Api, accept: str) -> None:
    response = api("GET", "/v1/models", accept=accept)
    assert (response.status_code, response["Content-Type"]) == (200, "application/json")


@pytest.mark.parametrize("name", ["unknown", "org/model:tag", "a%20b"])
def test_an_unknown_model_is_named(api: Api, name: str) -> None:
    shown = error_of(api("GET", f"/v1/models/{name}"))
    assert (shown["code"], shown["param"]) == ("model_not_found", "model")
    assert shown["message"] == f"The model '{name}' does not exist"
    response = api("POST", "/v1/chat/completions", {**CHAT, "model": name})
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
    assert f"`{name}`" in error_of(response)["message"]


@pytest.mark.usefixtures("live_demo")
@pytest.mark.parametrize("stream", [True, False])
def test_a_good_request_is_enqueued_and_handed_off(api: Api, api_key: Key, stream: bool) -> None:
    body = {**CHAT, "model": " Demo", "stream": stream, "zeta": {}, "alpha": 1}
    response = api("POST", "/v1/chat/completions", body, x_request_id="req-1")
    row = Generation.objects.get()
    [follower] = hub.readers(row.public_id)
    handoff = api.outcome.handoff
    assert handoff is not None
    assert replace(handoff, comment=None) == HandOff(follower, stream)
    assert (handoff.comment is not None) == stream
    assert response["x-unsupported-params"] == "zeta,alpha"
    assert (row.model, row.streamed, row.request_id) == ("demo", stream, "req-1")
    assert (row.project_id, row.api_key_id) == (api_key[0].project_id, api_key[0].pk)
    document = load_document(row.public_id).document
    assert document is not None
    assert document.request.messages[0].text == "hi"
    hub.leave(follower)


@pytest.mark.usefixtures("live_demo")
def test_a_chunked_body_without_a_length_is_read(api: Api) -> None:
    api("POST", "/v1/chat/completions", CHAT)  # These scopes never carry a content-length.
    hub.leave(hub.readers(Generation.objects.get().public_id)[0])


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


def test_a_model_without_a_live_worker_is_unavailable(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = LiveView(ttl_s=0)
    monkeypatch.setattr(leases, "live_workers", list)
    monkeypatch.setattr(model_access, "live_view", view)
    response = api("POST", "/v1/chat/completions", CHAT)
    assert (response.status_code, error_of(response)["code"]) == (503, "no_worker")
    assert not Generation.objects.exists()


def test_the_models_are_listed_with_what_is_known_of_them(api: Api) -> None:
    listed = orjson.loads(api("GET", "/v1/models").content)  # type: ignore[attr-defined]  # Set on HttpResponse.
    demo, embedding, memory = listed["data"]
    assert memory["id"] == "demo-memory"
    assert embedding["id"] == "demo-embedding"
    assert embedding["capabilities"] == ["embeddings", "tokens"]
    assert listed["object"] == "list"
    assert (demo["id"], demo["object"], demo["context_length"]) == ("demo", "model", 2048)
    assert demo["created"] > 0
    shown = api("GET", "/v1/models/DEMO").content  # type: ignore[attr-defined]  # As above.
    assert orjson.loads(shown)["id"] == "demo"
