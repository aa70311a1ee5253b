"""The relay: the ASGI application of /v1, between the server and Django.

It decides by the head, reads the body, runs the view on a pooled thread and sends its answer. If
the view has left a hand-off, the relay follows the generation and sends its frames, as SSE or as
one JSON body.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from django.conf import settings
from django.http.response import HttpResponseBase

from inference_site.core.errors.api_errors import ApiError, UnavailableError
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.gateway.bodies import (
    SpooledBody,
    body_memory,
    boundary_of,
    read_body,
    spool_body,
    spool_room,
)
from inference_site.gateway.connections import OpenRequest
from inference_site.gateway.delivery import (
    EVENTS,
    BytesSink,
    ClientGone,
    Delivery,
    JsonSink,
    LinesSink,
    Receive,
    Send,
    Sink,
    SseSink,
    own_headers,
    send_response,
)
from inference_site.gateway.follower import Follower
from inference_site.gateway.handler import ApiHandler, QueueKey, ViewPool
from inference_site.gateway.handoff import (
    SCOPE_KEY,
    CallResult,
    Feed,
    HandOff,
    Outcome,
    call_until_done,
)
from inference_site.gateway.head import SCOPE_KEY as head_key
from inference_site.gateway.head import Head, length_of_body
from inference_site.gateway.hub import hub
from inference_site.runs.streams.batches import Batch, Ending

logger = logging.getLogger(__name__)

Answer = tuple[HttpResponseBase, Outcome]

_LARGE = 128 * 1024
"""Bytes from which on a body is decoded on its project's one thread for large bodies."""
_HEALTH_THREADS = 2
_HEALTH_PATHS = ("/health", "/health/ready", "/metrics")
_FEED_PAUSE_S = 0.1
_FEED_END = Ending((), 200, b"")
_FEED_FAILED = Ending((), 500, b"", error_code="server_error", is_early=True)


class Relay:
    """ASGI application for http scopes."""

    def __init__(self, read_head: Callable[[dict[str, Any]], Head]) -> None:
        """``read_head`` does not block, and raises ApiError to refuse a request."""
        self._read_head = read_head
        self._handler = ApiHandler()
        self._views = ViewPool(settings.WEB_THREADS)
        # Threads for each, so that one answers while the others and all views hang.
        self._health_views = {
            path: ViewPool(_HEALTH_THREADS, is_shared=False) for path in _HEALTH_PATHS
        }

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
        takes_events = EVENTS in scope.get("extensions", ())
        with OpenRequest() as opened, contextlib.ExitStack() as memory:
            try:
                answer = await self._answer(scope, receive, started_at, opened)
                _, outcome = answer
                handoff = outcome.handoff
                if not opened.is_counted and (handoff or outcome.feed is not None):
                    try:  # The caller was not known before the view ran.
                        opened.count_for(scope[head_key].project_id)
                    except ApiError:
                        _abandon(outcome)
                        raise
                if handoff is not None and handoff.follower.stored is not None:
                    checked = await self._rebuild(scope, handoff.follower, memory)
                    if checked.status_code != HTTPStatus.NO_CONTENT:
                        answer = checked, Outcome()
            except ClientGone:
                return
            except ApiError as exc:
                await send_response(self._handler.refuse(scope, exc, started_at), send)
                return
            path = scope["path"].rstrip("/")
            sending = _sending(answer, started_at, path, receive, send, takes_events=takes_events)
            del answer  # The view's response takes memory, and its stream may run for an hour.
            await sending

    async def _rebuild(
        self, scope: dict[str, Any], follower: Follower, memory: contextlib.ExitStack
    ) -> HttpResponseBase:
        """Give a follower its stored stream; return a response as ``ApiHandler.check`` does.

        ``memory`` holds the memory of a long stream until it is sent: its client may read slowly,
        and no event log has the frames. Raise UnavailableError if there is none.
        """
        stored = follower.stored
        assert stored is not None
        project_id, size = scope[head_key].project_id, stored.size_bytes
        if size > _LARGE:
            if not body_memory.try_reserve(project_id, size):
                raise UnavailableError("Too many long streams are being read.")
            memory.callback(body_memory.give_back, project_id, size)

        def rebuild() -> None:
            with release_connection_after():
                follower.offer(stored.make())
            follower.stored = None  # It may hold a long text.

        key = QueueKey(project_id, is_large=size > _LARGE)
        return await self._run(scope, partial(self._handler.check, scope, rebuild), key)

    async def _answer(
        self, scope: dict[str, Any], receive: Receive, started_at: float, opened: OpenRequest
    ) -> Answer:
        """Return the view's answer, or the refusal of the head or of the body."""
        head = scope[head_key] = self._read_head(scope)
        opened.count_for(head.project_id)
        if not head.takes_body:
            call = partial(self._call_view, scope, b"", QueueKey(head.project_id))
            return await call_until_done(call, started_at)
        if head.user is None:
            check = partial(self._handler.check, scope, partial(head.authenticate, scope))
            checked = await self._run(scope, check, QueueKey(head.project_id))
            if checked.status_code != HTTPStatus.NO_CONTENT:
                return checked, Outcome()
            opened.count_for(head.project_id)
        size = length_of_body(scope, head.largest_body)
        key = QueueKey(head.project_id, is_large=size > _LARGE)
        self._views.require_room(key)  # Do not read a body that would be refused.
        if head.spools_body:
            async with spool_room.reserved(head.project_id, size):
                content_type = dict(scope["headers"]).get(b"content-type", b"").decode("latin-1")
                boundary = boundary_of(content_type)
                spooled = await spool_body(receive, head.largest_body, boundary)
                with spooled.file:
                    call = partial(self._call_view, scope, spooled, key)
                    return await call_until_done(call, started_at)
        async with body_memory.reserved(head.project_id, size):
            body = await read_body(receive)
            call = partial(self._call_view, scope, body, key)
            return await call_until_done(call, started_at)

    async def _call_view(
        self, scope: dict[str, Any], body: bytes | SpooledBody, key: QueueKey
    ) -> CallResult[Answer]:
        loop, outcome = asyncio.get_running_loop(), Outcome()

        def respond() -> HttpResponseBase:
            return self._handler.respond({**scope, SCOPE_KEY: outcome}, body)

        def on_abandoned() -> None:
            loop.call_soon_threadsafe(_abandon, outcome)

        try:
            response = await self._run(scope, respond, key, on_abandoned)
        except asyncio.CancelledError:
            outcome.is_given_up = True
            raise
        started_id = outcome.handoff.follower.generation_id if outcome.handoff else ""
        return CallResult((response, outcome), outcome.wait, started_id)

    async def _run(
        self,
        scope: dict[str, Any],
        respond: Callable[[], HttpResponseBase],
        key: QueueKey,
        on_abandoned: Callable[[], object] = bool,
    ) -> HttpResponseBase:
        pool = self._health_views.get(scope["path"].rstrip("/"), self._views)
        return await pool.run(respond, on_abandoned, key)


def _sending(
    answer: Answer,
    started_at: float,
    path: str,
    receive: Receive,
    send: Send,
    *,
    takes_events: bool,
) -> Coroutine[Any, Any, None]:
    """Return the coroutine that sends an answer. For a stream it does not hold the response."""
    response, outcome = answer
    http = (send, own_headers(response), started_at, path)
    if (feed := outcome.feed) is not None:
        form = (LinesSink if feed.lines else SseSink) if feed.stream else JsonSink
        return _send_feed(feed, form(*http), receive)
    if (handoff := outcome.handoff) is None:
        return send_response(response, send, path)
    if not handoff.stream:
        return _send_generation(handoff, JsonSink(*http), receive)
    if handoff.form == "bytes":
        return _send_generation(handoff, BytesSink(*http), receive)
    streamed = LinesSink if handoff.form == "lines" else SseSink
    sink = streamed(
        *http,
        handoff.opening,
        may_be_status=handoff.cancels,
        takes_events=takes_events,
        ping=handoff.ping,
        comment=handoff.comment,
        closing=handoff.closing,
    )
    return _send_generation(handoff, sink, receive)


async def _send_generation(handoff: HandOff, sink: Sink, receive: Receive) -> None:
    follower = handoff.follower
    # With a grace the generation goes on, and maintenance stops it if no reader comes back.
    delivery = Delivery(follower, sink, cancels=handoff.cancels and not follower.grace_s)
    await delivery.run(partial(_disconnect, receive))


async def _send_feed(feed: Feed, sink: Sink, receive: Receive) -> None:
    follower = Follower("")
    reader = asyncio.create_task(_read_feed(feed, follower))
    try:
        await Delivery(follower, sink, cancels=False).run(partial(_disconnect, receive))
    finally:
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reader


async def _read_feed(feed: Feed, follower: Follower) -> None:
    """Offer the frames of a feed one by one, at the pace of the client: no log keeps them."""

    async def offer(frames: Sequence[bytes], ending: Ending | None = None) -> None:
        while follower.is_full:
            await asyncio.sleep(_FEED_PAUSE_S)
        follower.offer(Batch(follower.next_number, frames, ending))

    ending = _FEED_END
    try:
        async for frame in feed.frames:
            if isinstance(frame, Ending):
                ending = frame
            else:
                await offer([frame])
    except Exception:
        logger.exception("relay: a feed failed")
        ending = _FEED_FAILED
    await offer(ending.frames, ending)


async def _disconnect(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _abandon(outcome: Outcome) -> None:
    """Cancel what a view has started for a client that was refused or has left."""
    if outcome.started_id:
        hub.cancel(outcome.started_id)
    if outcome.handoff is not None:
        hub.leave(outcome.handoff.follower)
