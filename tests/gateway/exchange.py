"""One request on its way through the relay, with a hub and a handler that only pretend."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from django.http import HttpResponse

from inference_site.accounts.keys import Caller
from inference_site.gateway import delivery, handoff, relay
from inference_site.gateway.bodies import SpooledBody
from inference_site.gateway.follower import Follower
from inference_site.gateway.handler import ApiHandler
from inference_site.gateway.handoff import SCOPE_KEY, Feed, HandOff
from inference_site.gateway.head import Head
from inference_site.gateway.hub import Hub
from inference_site.gateway.relay import Relay
from tests.gateway.asgi import FakeClient, scope


class QuietHub(Hub):
    """A hub that neither listens nor reaches Redis; it remembers who was cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled: list[str] = []

    def ensure_running(self) -> None:
        """Do nothing."""

    def cancel(self, generation_id: str) -> asyncio.Future[None]:
        self.cancelled.append(generation_id)
        stored = asyncio.get_running_loop().create_future()
        stored.set_result(None)
        return stored


class FakeHandler(ApiHandler):
    """Answers as a view that has enqueued the generation ``g``, whether it follows that or not."""

    def __init__(self, hub: QuietHub, stream: bool | None) -> None:
        super().__init__()
        self._hub, self._stream = hub, stream
        self.bodies: list[bytes] = []
        self.feed: Feed | None = None
        self.ping = b""
        self.comment: Callable[[], bytes] | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()

    def respond(self, scope: dict[str, Any], body: bytes | SpooledBody) -> HttpResponse:
        assert isinstance(body, bytes)
        self.bodies.append(body)
        self.may_answer.wait(60)
        if self.feed is not None:
            scope[SCOPE_KEY].feed = self.feed
            return HttpResponse()
        scope[SCOPE_KEY].started_id = "g"
        if self._stream is None:
            return HttpResponse(b'{"plain":1}', status=201, content_type="application/json")
        scope[SCOPE_KEY].handoff = HandOff(
            self._hub.follow("g"), self._stream, ping=self.ping, comment=self.comment
        )
        return HttpResponse(headers={"x-request-id": "req_1", "openai-processing-ms": "1"})


class Exchange:
    """One request on its way through the relay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stream: bool | None) -> None:
        self.hub = QuietHub()
        self.handler = FakeHandler(self.hub, stream)
        self.relay = Relay(lambda _: Head(1, takes_body=True, user=Caller(1, 1)))
        self.relay._handler = self.handler
        self.client = FakeClient(b"{}")
        for module in (delivery, relay, handoff):
            monkeypatch.setattr(module, "hub", self.hub)

    def start(self) -> asyncio.Task[None]:
        coroutine: Coroutine[Any, Any, None] = self.relay(
            scope("POST", "/v1/x", {"x-request-id": "mine"}), self.client.receive, self.client.send
        )
        return asyncio.create_task(coroutine)

    async def followed(self) -> Follower:
        """Return the follower once the view has answered."""
        async with asyncio.timeout(60):
            while not (followers := self.hub.readers("g")):
                await asyncio.sleep(0.002)
        return followers[0]
