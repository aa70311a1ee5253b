"""The relay: the ASGI application of /v1, between the server and Django.

It reads the body, has Django answer on a pooled thread, and sends that answer; or, when the view
has left a hand-off, follows the generation's frames and sends them as SSE or as one JSON body.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from django.conf import settings
from django.http.response import HttpResponseBase

from inference_site.errors.api_errors import ApiError, PayloadTooLargeError
from inference_site.gateway.delivery import ClientGone, Delivery, Sink
from inference_site.gateway.handler import ApiHandler
from inference_site.gateway.handoff import SCOPE_KEY, HandOff, Outcome
from inference_site.gateway.http_answers import (
    JsonSink,
    Receive,
    Send,
    SseSink,
    own_headers,
    send_response,
)
from inference_site.gateway.hub.follower import Follower
from inference_site.gateway.hub.hub import hub
from inference_site.gateway.view_pool import ViewPool
from inference_site.gateway.waiting import Attempt, answer_of
from inference_site.streams.ending import Ending
from inference_site.streams.event_log import Batch

logger = logging.getLogger(__name__)

Answer = tuple[HttpResponseBase, Outcome]

_HEALTH_THREADS = 2
_HEALTH_PATHS = ("/health", "/health/ready", "/metrics")
_FEED_END = Ending((), 200, b"")
_FEED_FAILED = Ending((), 500, b"", error_code="server_error", is_early=True)


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
        started_at = time.monotonic()
        hub.ensure_running()
        try:
            body = await _read_body(receive)
            answer = await answer_of(lambda: self._call_view(scope, body), started_at)
        except ClientGone:
            return
        except ApiError as exc:
            await send_response(self._handler.refuse(scope, exc, started_at), send)
            return
        await _send_answer(answer, started_at, receive, send)

    async def _call_view(self, scope: dict[str, Any], body: bytes) -> Attempt[Answer]:
        pool = self._health_views.get(scope["path"].rstrip("/"), self._views)
        loop, outcome = asyncio.get_running_loop(), Outcome()
        response = await pool.run(
            lambda: self._handler.respond({**scope, SCOPE_KEY: outcome}, body),
            on_abandoned=lambda: loop.call_soon_threadsafe(_abandon, outcome),
        )
        started_id = outcome.handoff.generation_id if outcome.handoff else ""
        return Attempt((response, outcome), outcome.wait, started_id)


async def _send_answer(answer: Answer, started_at: float, receive: Receive, send: Send) -> None:
    response, outcome = answer
    http = (send, own_headers(response), started_at)
    if outcome.feed is not None:
        await _send_feed(outcome.feed, SseSink(*http), receive)
    elif (handoff := outcome.handoff) is None:
        await send_response(response, send)
    elif handoff.stream:
        sink = SseSink(*http, handoff.opening, may_be_status=handoff.cancels)
        await _send_generation(handoff, sink, receive)
    else:
        await _send_generation(handoff, JsonSink(*http), receive)


async def _send_generation(handoff: HandOff, sink: Sink, receive: Receive) -> None:
    follower = handoff.follower
    for batch in handoff.known:
        follower.offer(batch)
    # With a grace it goes on for a while, and maintenance stops it if no reader comes.
    delivery = Delivery(follower, sink, cancels=handoff.cancels and not follower.grace_s)
    await delivery.run(partial(_disconnect, receive))


async def _send_feed(feed: AsyncIterator[bytes], sink: Sink, receive: Receive) -> None:
    follower = Follower("")
    reader = asyncio.create_task(_read_feed(feed, follower))
    try:
        await Delivery(follower, sink, cancels=False).run(partial(_disconnect, receive))
    finally:
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reader


async def _read_feed(feed: AsyncIterator[bytes], follower: Follower) -> None:
    ending = _FEED_END
    try:
        async for frame in feed:
            follower.offer(Batch(follower.next_number, [frame]))
    except Exception:
        logger.exception("relay: a feed failed")
        ending = _FEED_FAILED
    follower.offer(Batch(follower.next_number, (), ending))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _abandon(outcome: Outcome) -> None:
    """Stop what a view has enqueued for a client that was refused, or has left."""
    if outcome.started_id:
        hub.cancel(outcome.started_id)
    if outcome.handoff is not None:
        hub.leave(outcome.handoff.follower)


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
