"""The relay: the ASGI application of /v1, between the server and Django.

It reads the body, has Django answer on a pooled thread, and sends that answer; or, when the view
has left a hand-off, follows the generation's frames and sends them as SSE or as one JSON body.
Waiting, keep-alive comments and the client's disconnect are handled here, once, for every endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from django.conf import settings
from django.http.response import HttpResponseBase

from inference_site.errors.api_errors import ApiError, InternalError, PayloadTooLargeError
from inference_site.gateway.feed import relay_feed
from inference_site.gateway.handler import ApiHandler
from inference_site.gateway.handoff import SCOPE_KEY, HandOff, Place
from inference_site.gateway.hub import hub
from inference_site.gateway.view_pool import ViewPool
from inference_site.streams.ending import Ending
from inference_site.streams.event_log import Batch

logger = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_FIRST_PING_S = 0.9
"""When nothing has come by then, the headers and a comment go out: within the first second."""
_PING = b": ping\n\n"
_IDLE_S = 3600.0
_RETRY_S = 0.05
_HEALTH_THREADS = 2
_HEALTH_PATHS = ("/health", "/health/ready", "/metrics")
_SHUTDOWN_S = 3.0
_SSE_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_JSON_HEADERS: Headers = [(b"content-type", b"application/json")]


class ClientGone(Exception):
    """The client has closed the connection."""


class Relay:
    """ASGI application for http scopes."""

    def __init__(self) -> None:
        self._handler = ApiHandler()
        self._views = ViewPool(settings.WEB_THREADS)
        # Apart from the others, and from each other: they must answer when all of those hang.
        self._health_views = {path: ViewPool(_HEALTH_THREADS) for path in _HEALTH_PATHS}

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request. Ends without an exception when the server shuts down."""
        try:
            await self._serve(scope, receive, send)
        except asyncio.CancelledError:
            # Daphne stops waiting for the others at the first application that is cancelled.
            logger.info("relay: a request was cut off by the server")

    async def _serve(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        started = time.monotonic()
        hub.ensure_running()
        try:
            body = await _read_body(receive)
            place, response = await self._respond(scope, body)
            while place.retry_for_s > time.monotonic() - started:
                await asyncio.sleep(_RETRY_S)
                place, response = await self._respond(scope, body)
        except ClientGone:
            return
        except ApiError as exc:
            await _send_response(self._handler.refuse(scope, exc, started), send)
            return
        if place.feed is not None:
            headers = [*_own_headers(response), *_SSE_HEADERS]
            await relay_feed(place.feed, headers, receive, send)
            return
        if place.handoff is None:
            await _send_response(response, send)
            return
        answer = _Answer(place.handoff, _own_headers(response), started, send)
        await answer.relay(receive)

    async def _respond(self, scope: dict[str, Any], body: bytes) -> tuple[Place, HttpResponseBase]:
        pool = self._health_views.get(scope["path"].rstrip("/"), self._views)
        loop, place = asyncio.get_running_loop(), Place()
        response = await pool.run(
            lambda: self._handler.respond({**scope, SCOPE_KEY: place}, body),
            on_abandoned=lambda: loop.call_soon_threadsafe(_abandon, place),
        )
        return place, response


class _Answer:
    """One answer on its way from a generation's frames to the client."""

    def __init__(self, handoff: HandOff, headers: Headers, started: float, send: Send) -> None:
        self._handoff, self._headers, self._send = handoff, headers, send
        self._started_at = started
        self._follower = handoff.follower
        for batch in handoff.known:
            self._follower.offer(batch)
        # With a grace it goes on for a while, and upkeep stops it if no reader comes.
        self._stops = handoff.cancels and not self._follower.grace_s
        self._opening = list(handoff.opening)
        self._begun = False
        self._gone = False

    async def relay(self, receive: Receive) -> None:
        """Send everything; when its client leaves first, have the generation stopped."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await (self._relay_stream() if self._handoff.stream else self._relay_json())
        except ClientGone:
            if self._stops:
                hub.cancel(self._handoff.generation_id)
        except BaseException:
            # The server stops, or sending failed: wait until the worker's side of it is stored.
            if self._stops:
                stored = hub.cancel(self._handoff.generation_id)
                await asyncio.wait({stored}, timeout=_SHUTDOWN_S)
            raise
        finally:
            watcher.cancel()
            hub.leave(self._follower)

    async def _watch(self, receive: Receive) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while (await receive())["type"] != "http.disconnect":
                pass
            self._gone = True
            self._follower.wake()

    async def _relay_stream(self) -> None:
        interval_s = settings.KEEP_ALIVE_INTERVAL / 1000
        timeout_s = min(_FIRST_PING_S, interval_s)
        while True:
            await self._wait(timeout_s)
            timeout_s = interval_s
            batches = self._follower.take()
            ending = batches[-1].ending if batches else None
            if ending is not None and self._failed_early(ending, batches):
                await self._send_whole(ending)
                return
            await self._begin(200, _SSE_HEADERS)
            frames = [*self._opening, *(frame for batch in batches for frame in batch.frames)]
            self._opening = []
            if ending is not None and ending.error_code and not ending.body:
                frames += [b"data: " + InternalError().body + b"\n\n"]
            # One write an event: some clients forget an event that arrives in two reads.
            for frame in frames or [_PING]:
                await self._write(frame, more=True)
            if ending is not None:
                await self._write(b"", more=False)
                return

    def _failed_early(self, ending: Ending, batches: list[Batch]) -> bool:
        """Whether the stream has nothing but a failure, so that it can still be a status."""
        is_first = len(batches) == 1 and batches[0].first == len(self._opening)
        return ending.is_early and not self._begun and is_first and self._handoff.cancels

    async def _relay_json(self) -> None:
        while True:
            await self._wait(_IDLE_S)
            batches = self._follower.take()
            if batches and (ending := batches[-1].ending):
                await self._send_whole(ending)
                return

    async def _wait(self, timeout_s: float) -> None:
        if not self._gone:  # It may have left during a write, when nothing waited to be woken.
            await self._follower.wait(timeout_s)
        if self._gone:
            raise ClientGone

    async def _send_whole(self, ending: Ending) -> None:
        headers = list(_JSON_HEADERS)
        if ending.retry_after_s is not None:
            headers.append((b"retry-after", str(ending.retry_after_s).encode()))
        await self._begin(ending.status, headers)
        # A failure that found no words of its own has an empty body.
        body = InternalError().body if ending.error_code and not ending.body else ending.body
        await self._write(body, more=False)

    async def _begin(self, status: int, headers: Headers) -> None:
        if self._begun:
            return
        self._begun = True
        elapsed_ms = round((time.monotonic() - self._started_at) * 1000)
        timing = (b"openai-processing-ms", str(elapsed_ms).encode())
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*self._headers, *headers, timing],
            }
        )

    async def _write(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def _own_headers(response: HttpResponseBase) -> Headers:
    """Return the headers of the view's response that also belong to the relayed one."""
    replaced = {"content-type", "content-length", "openai-processing-ms"}
    return [(k, v) for k, v in _encoded(response.items()) if k.decode() not in replaced]


def _encoded(headers: Iterable[tuple[str, str]]) -> Headers:
    return [(key.lower().encode("ascii"), value.encode("latin-1")) for key, value in headers]


def _abandon(place: Place) -> None:
    """Stop what a view has enqueued for a client that was refused, or has left."""
    if place.handoff is not None:
        if place.handoff.cancels:
            hub.cancel(place.handoff.generation_id)
        hub.leave(place.handoff.follower)


async def _read_body(receive: Receive) -> bytes:
    """Return the request's body. Raise ClientGone, or PayloadTooLargeError past the limit."""
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > settings.MAX_BODY_BYTES:
            raise PayloadTooLargeError(
                f"The request body is larger than {settings.MAX_BODY_BYTES} bytes."
            )
        if not message.get("more_body", False):
            return b"".join(chunks)


async def _send_response(response: HttpResponseBase, send: Send) -> None:
    body = b"" if response.streaming else response.content  # type: ignore[attr-defined]  # Set on HttpResponse only.
    await send(
        {
            "type": "http.response.start",
            "status": response.status_code,
            "headers": [
                *_encoded((k, v) for k, v in response.items() if k.lower() != "content-length"),
                (b"content-length", str(len(body)).encode()),
            ],
        }
    )
    await send({"type": "http.response.body", "body": body})
