"""The relay: the ASGI application of /v1, between the server and Django.

It decides on the head, reads the body, has Django answer on a pooled thread, and sends that answer;
or, when the view has left a hand-off, follows the generation's frames and sends them as SSE or as
one JSON body.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any

from django.conf import settings
from django.http.response import HttpResponseBase

from inference_site.errors.api_errors import ApiError, UnavailableError
from inference_site.gateway.bodies import body_room, read_body
from inference_site.gateway.delivery import ClientGone, Delivery, Sink
from inference_site.gateway.full_queues import refuse_if_full
from inference_site.gateway.handler import ApiHandler
from inference_site.gateway.handoff import SCOPE_KEY, HandOff, Outcome
from inference_site.gateway.head import LookAt, length_of_body
from inference_site.gateway.http_answers import (
    EVENTS,
    JsonSink,
    LinesSink,
    Receive,
    Send,
    SseSink,
    own_headers,
    send_response,
)
from inference_site.gateway.hub.follower import Follower
from inference_site.gateway.hub.hub import hub
from inference_site.gateway.project_connections import OpenRequest
from inference_site.gateway.thread_shares import Share
from inference_site.gateway.view_pool import ViewPool
from inference_site.gateway.waiting import Attempt, answer_of
from inference_site.storage.postgresql import release_connection_after
from inference_site.streams.batches import Batch, Remake
from inference_site.streams.ending import Ending

logger = logging.getLogger(__name__)

Answer = tuple[HttpResponseBase, Outcome]

_LARGE = 256 * 1024
"""Bytes of a body that is decoded and checked on the one thread for large ones of its project."""
_HEALTH_THREADS = 2
_HEALTH_PATHS = ("/health", "/health/ready", "/metrics")
_FEED_PAUSE_S = 0.1
_FEED_END = Ending((), 200, b"")
_FEED_FAILED = Ending((), 500, b"", error_code="server_error", is_early=True)


class Relay:
    """ASGI application for http scopes."""

    def __init__(self, look_at: LookAt) -> None:
        self._look_at = look_at
        self._handler = ApiHandler()
        self._views = ViewPool(settings.WEB_THREADS)
        # Apart from the others, and from each other: they must answer when all of those hang.
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
        with OpenRequest() as opened, contextlib.ExitStack() as room:
            try:
                answer = await self._answer(scope, receive, started_at, opened)
                self._count_stream(scope, answer[1], opened)
                if (handoff := answer[1].handoff) and handoff.remake:
                    answer, own_room = await self._made_anew(scope, handoff, handoff.remake, answer)
                    room.enter_context(own_room)
            except ClientGone:
                return
            except ApiError as exc:
                await send_response(self._handler.refuse(scope, exc, started_at), send)
                return
            sending = _sending(answer, started_at, receive, send, takes_events=takes_events)
            del answer  # The view's response takes memory, and its stream may run for an hour.
            await sending

    def _count_stream(self, scope: dict[str, Any], outcome: Outcome, opened: OpenRequest) -> None:
        """Count a stream of a caller that was not known before the view. Raise RateLimitError."""
        if opened.is_counted or (outcome.handoff is None and outcome.feed is None):
            return
        try:
            opened.count_for(self._look_at(scope).project_id)
        except ApiError:
            _abandon(outcome)
            raise

    async def _made_anew(
        self, scope: dict[str, Any], handoff: HandOff, remake: Remake, answer: Answer
    ) -> tuple[Answer, contextlib.ExitStack]:
        """Return the view's answer with its stream, and the room that this takes until it is sent.

        One that cannot be made is answered with its refusal.
        """
        project_id, made = self._look_at(scope).project_id, list[Batch]()

        def make() -> None:
            with release_connection_after():
                made.extend(remake.make())

        share = Share(project_id, is_large=remake.size_bytes > _LARGE)
        with _room_for(remake, project_id, answer[1]) as room:
            try:
                checked = await self._run(scope, partial(self._handler.check, scope, make), share)
            except BaseException:
                hub.leave(handoff.follower)
                raise
            if checked.status_code != HTTPStatus.NO_CONTENT:
                hub.leave(handoff.follower)
                return (checked, Outcome()), room.pop_all()
            made_anew = Outcome(replace(handoff, known=made, remake=None))
            return (answer[0], made_anew), room.pop_all()

    async def _answer(
        self, scope: dict[str, Any], receive: Receive, started_at: float, opened: OpenRequest
    ) -> Answer:
        """Return the view's answer, or the refusal of a body that is not taken."""
        head = self._look_at(scope)
        opened.count_for(head.project_id)
        if head.check is not None:
            check = partial(self._handler.check, scope, head.check)
            checked = await self._run(scope, check, Share(head.project_id))
            if checked.status_code != HTTPStatus.NO_CONTENT:
                return checked, Outcome()
            head = self._look_at(scope)  # Now it is known whose request it is.
            opened.count_for(head.project_id)
        if not head.takes_body:
            return await self._call(scope, b"", Share(head.project_id), started_at)
        size = length_of_body(scope)
        share = Share(head.project_id, is_large=size > _LARGE)
        self._views.require_room(share)  # A body that would be refused is not taken.
        async with body_room.held(head.project_id, size):
            body = await read_body(receive)
            if head.is_queued:
                refuse_if_full(scope, body, head.project_id)
            return await self._call(scope, body, share, started_at, is_queued=head.is_queued)

    async def _call(
        self,
        scope: dict[str, Any],
        body: bytes,
        share: Share,
        started_at: float,
        *,
        is_queued: bool = False,
    ) -> Answer:
        call = partial(self._call_view, scope, body, share, is_queued=is_queued)
        return await answer_of(call, started_at)

    async def _call_view(
        self, scope: dict[str, Any], body: bytes, share: Share, *, is_queued: bool
    ) -> Attempt[Answer]:
        loop, outcome = asyncio.get_running_loop(), Outcome()
        try:
            response = await self._run(
                scope,
                partial(self._respond, scope, body, outcome, share, is_queued=is_queued),
                share,
                on_abandoned=lambda: loop.call_soon_threadsafe(_abandon, outcome),
            )
        except (asyncio.CancelledError, UnavailableError):
            outcome.is_given_up = True
            raise
        started_id = outcome.handoff.generation_id if outcome.handoff else ""
        return Attempt((response, outcome), outcome.wait, started_id)

    def _respond(
        self,
        scope: dict[str, Any],
        body: bytes,
        outcome: Outcome,
        share: Share,
        *,
        is_queued: bool,
    ) -> HttpResponseBase:
        """Have the view answer, unless its queue got full while it waited for this thread."""
        try:
            if is_queued:
                refuse_if_full(scope, body, share.project_id)
        except ApiError as exc:
            return self._handler.refuse(scope, exc, time.monotonic())
        return self._handler.respond({**scope, SCOPE_KEY: outcome}, body)

    async def _run(
        self,
        scope: dict[str, Any],
        respond: Callable[[], HttpResponseBase],
        share: Share,
        on_abandoned: Callable[[], object] = bool,
    ) -> HttpResponseBase:
        pool = self._health_views.get(scope["path"].rstrip("/"), self._views)
        return await pool.run(respond, on_abandoned, share)


def _room_for(remake: Remake, project_id: int | None, outcome: Outcome) -> contextlib.ExitStack:
    """Hold room for a long stream that is made anew. Raise UnavailableError if there is none.

    Its reader may take its time, and no log has what is not held.
    """
    room, size = contextlib.ExitStack(), remake.size_bytes
    if size > _LARGE:
        if not body_room.takes(project_id, size):
            _abandon(outcome)
            raise UnavailableError("Too many long streams are being read.")
        room.callback(body_room.give_back, project_id, size)
    return room


def _sending(
    answer: Answer, started_at: float, receive: Receive, send: Send, *, takes_events: bool
) -> Coroutine[Any, Any, None]:
    """Return what sends an answer; of a stream it does not hold the view's response."""
    response, outcome = answer
    http = (send, own_headers(response), started_at)
    if outcome.feed is not None:
        return _send_feed(outcome.feed, SseSink(*http), receive)
    if (handoff := outcome.handoff) is None:
        return send_response(response, send)
    if not handoff.stream:
        return _send_generation(handoff, JsonSink(*http), receive)
    form = LinesSink if handoff.lines else SseSink
    sink = form(
        *http,
        handoff.opening,
        may_be_status=handoff.cancels,
        takes_events=takes_events,
        comment=handoff.comment,
        closing=handoff.closing,
    )
    return _send_generation(handoff, sink, receive)


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
            await _room_in(follower)
            follower.offer(Batch(follower.next_number, [frame]))
    except Exception:
        logger.exception("relay: a feed failed")
        ending = _FEED_FAILED
    await _room_in(follower)
    follower.offer(Batch(follower.next_number, (), ending))


async def _room_in(follower: Follower) -> None:
    """Return when the client has read: no log has what a feed's follower does not take."""
    while follower.is_full:
        await asyncio.sleep(_FEED_PAUSE_S)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _abandon(outcome: Outcome) -> None:
    """Stop what a view has enqueued for a client that was refused, or has left."""
    if outcome.started_id:
        hub.cancel(outcome.started_id)
    if outcome.handoff is not None:
        hub.leave(outcome.handoff.follower)
