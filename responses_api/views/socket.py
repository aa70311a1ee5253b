"""Responses over a WebSocket: the same events as over SSE, one to a message.

Messages to the server: ``response.create`` with the fields of the endpoint, ``response.cancel``.
One response runs at a time; more are taken in order. Closing the socket stops what runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.conf import settings

from inference_site.accounts.keys import Caller
from inference_site.accounts.models import Scope
from inference_site.api.authentication import authenticated, require_scope
from inference_site.errors.api_errors import (
    ApiError,
    InternalError,
    InvalidRequestError,
    RateLimitError,
    UnavailableError,
)
from inference_site.errors.exceptions import api_error
from inference_site.gateway.bodies import ROOM_KEY, MessageRoom
from inference_site.gateway.delivery import Delivery, Sink
from inference_site.gateway.hub.follower import Follower
from inference_site.gateway.hub.hub import hub
from inference_site.gateway.waiting import Attempt, answer_of
from inference_site.storage.postgresql import release_connection_after
from inference_site.streams.batches import Batch, frames_of
from inference_site.streams.ending import Ending
from inference_site.submission.submit import follow, submit
from responses_api.output.events import DONE, decode
from responses_api.request.creation import Creation, create
from responses_api.state.items import IdentifiedItem, from_wire
from responses_api.state.storage import ConversationLocked
from responses_api.views.socket_messages import decoded, error_message, event_message, to_request
from responses_api.wire.request import ResponseRequest

logger = logging.getLogger(__name__)

_MOST_WAITING = 16
_LARGE = 64 * 1024
"""Bytes of a message that is decoded on a thread."""
_LIFETIME_S = 3600.0
_ENDS = ("response.completed", "response.incomplete", "response.failed")
_END_PREFIXES = tuple(f"event: {name}\n".encode() for name in _ENDS)

T = TypeVar("T")
Started = tuple[Creation, Follower]


class ResponsesConsumer(AsyncWebsocketConsumer):  # type: ignore[misc]  # Channels has no types.
    """``WS /v1/responses``. The key comes in the handshake's headers, never in the URL."""

    _given: tuple[str, str]
    # It needs no channel of its own, which would be a subscription in Redis for each socket.
    channel_layer_alias = "none"
    _tasks: tuple[asyncio.Task[None], ...] = ()
    _is_refused = False

    async def connect(self) -> None:
        """Accept a client with a valid key; refuse the handshake of any other.

        A project that has too many is told so over the socket, which is then closed.
        """
        hub.ensure_running()
        headers = {name: value.decode("latin-1") for name, value in self.scope["headers"]}
        given = headers.get(b"authorization", ""), headers.get(b"x-api-key", "")
        try:
            self._given = given
            caller = await _in_thread(self._authenticated)
        except ApiError as exc:
            logger.info("websocket refused: %s", exc)
            await self.close()
            return
        self._room: MessageRoom = self.scope.get(ROOM_KEY) or MessageRoom()
        try:
            self._room.count_for(caller.project_id)
        except RateLimitError as exc:
            self._is_refused = True
            await self.accept()
            await self.send(text_data=error_message(exc))
            await self.close()
            return
        self._waiting: asyncio.Queue[tuple[dict[str, Any], int]] = asyncio.Queue(_MOST_WAITING)
        self._waiting_bytes = 0
        self._memory: dict[str, list[IdentifiedItem]] = {}
        self._running_id = ""
        self._is_busy = self._cancels_next = False
        await self.accept()
        self._tasks = asyncio.create_task(self._work()), asyncio.create_task(self._expire())

    async def disconnect(self, code: int) -> None:
        """Stop what runs."""
        for task in self._tasks:
            task.cancel()

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """Take one message, unless the socket is being refused."""
        if self._is_refused:
            return
        given = bytes_data if text_data is None else text_data.encode()
        given, is_waiting = given or b"", False
        try:
            is_large = len(given) > _LARGE
            message = await asyncio.to_thread(decoded, given) if is_large else decoded(given)
            is_waiting = self._take(message, len(given))
        except ApiError as exc:
            await self.send(text_data=error_message(exc))
        finally:
            if not is_waiting:
                self._room.give_back(len(given))

    def _take(self, message: dict[str, Any], size: int) -> bool:
        """Do what a message says; return whether it waits for its turn."""
        match message.get("type"):
            case "response.create":
                waiting = self._waiting_bytes + size
                if self._waiting.full() or waiting > settings.MAX_BODY_BYTES:
                    raise UnavailableError(
                        "Too many responses wait on this socket.", code="queue_full"
                    )
                self._waiting.put_nowait((message, size))
                self._waiting_bytes = waiting
                return True
            case "response.cancel":
                self._cancel()
                return False
            case other:
                raise InvalidRequestError(
                    f"Invalid value: {str(other)[:100]!r}. Supported values are: "
                    "'response.create' and 'response.cancel'.",
                    param="type",
                    code="invalid_value",
                )

    def _cancel(self) -> None:
        """Stop what runs, or else what is about to."""
        if self._running_id:
            hub.cancel(self._running_id)
        elif self._is_busy or not self._waiting.empty():
            self._cancels_next = True

    async def _work(self) -> None:
        """Run what was asked for, one after the other."""
        while True:
            message, size = await self._waiting.get()
            self._waiting_bytes -= size
            stream_id = message.get("stream_id")
            self._is_busy = True
            try:
                await self._respond(message, size, stream_id)
            except Exception as exc:
                error = api_error(exc)
                if error.status >= 500 and not isinstance(exc, ApiError):
                    logger.exception("websocket: a response failed")
                self._memory.pop(str(message.get("previous_response_id")), None)
                await self.send(text_data=error_message(error, stream_id))
            finally:
                self._is_busy = self._cancels_next = False

    async def _respond(self, message: dict[str, Any], size: int, stream_id: object) -> None:
        try:
            creation, follower = await self._start(await asyncio.to_thread(to_request, message))
        finally:
            self._room.give_back(size)
        sink = _SocketSink(self.send, creation, stream_id)
        self._running_id = follower.generation_id
        try:
            if self._cancels_next:
                self._cancels_next = False
                hub.cancel(follower.generation_id)
            await Delivery(follower, sink, cancels=True).run()
        finally:
            self._running_id = ""
        if sink.history:
            self._memory = sink.history
        if sink.failed_silently:
            raise InternalError

    async def _start(self, body: ResponseRequest) -> Started:
        """Enqueue it; wait while its conversation is busy."""
        started = await answer_of(lambda: self._attempt(body), time.monotonic())
        if isinstance(started, ConversationLocked):
            raise started
        return started

    async def _attempt(self, body: ResponseRequest) -> Attempt[Started | ConversationLocked]:
        starting = asyncio.ensure_future(_in_thread(lambda: self._started(body)))
        try:
            creation, follower = await asyncio.shield(starting)
        except asyncio.CancelledError:  # The socket was closed; the thread goes on.
            starting.add_done_callback(_abandon)
            raise
        except ConversationLocked as locked:
            return Attempt(locked, locked.wait)
        return Attempt((creation, follower), None, follower.generation_id)

    def _authenticated(self) -> Caller:
        """Return the caller as its key is now: a socket lives longer than a key may."""
        caller = authenticated(*self._given)
        require_scope(caller, Scope.INFERENCE)
        return caller

    def _started(self, body: ResponseRequest) -> Started:
        caller = self._authenticated()
        creation = create(caller, body, self._memory)
        request_id = f"req_{secrets.token_hex(16)}"
        follower = follow(creation.submission)
        submit(creation.submission, request_id, follower)
        return creation, follower

    async def _expire(self) -> None:
        """Close a socket that has been open for too long."""
        await asyncio.sleep(_LIFETIME_S)
        with contextlib.suppress(Exception):
            error = UnavailableError(
                "The connection has been open for an hour.",
                code="websocket_connection_limit_reached",
            )
            await self.send(text_data=error_message(error))
        await self.close()


class _SocketSink(Sink):
    """Sends the events of a response, one to a message, and keeps what builds its history."""

    def __init__(
        self, send: Callable[..., Awaitable[None]], creation: Creation, id_: object
    ) -> None:
        self._send, self._creation, self._stream_id = send, creation, id_
        self._opening = creation.submission.frames
        self.history: dict[str, list[IdentifiedItem]] = {}
        self.failed_silently = False

    @property
    def quiet_s(self) -> float:
        return 0.0 if self._opening else super().quiet_s

    async def write(self, batches: Sequence[Batch], ending: Ending | None) -> None:
        opening, self._opening = self._opening, ()
        for frame in [*opening, *frames_of(batches)]:
            if frame != DONE:
                await self._send(text_data=event_message(frame, self._stream_id))
                self._remember(frame)
        if ending is not None:
            self.failed_silently = bool(ending.error_code) and not batches[-1].frames

    def _remember(self, frame: bytes) -> None:
        """Keep the history of the response if it is stored nowhere else."""
        if self._creation.response["store"] or not frame.startswith(_END_PREFIXES):
            return
        final = decode(frame)["response"]
        output = [from_wire(item) for item in final["output"]]
        context = self._creation.context
        self.history = {final["id"]: [*context.before, *context.new, *output]}


def _abandon(starting: asyncio.Future[Started]) -> None:
    """Stop what was started for a socket that is closed."""
    if not starting.cancelled() and starting.exception() is None:
        _, follower = starting.result()
        hub.cancel(follower.generation_id)
        hub.leave(follower)


async def _in_thread(call: Callable[[], T]) -> T:
    """Run what uses the database on a thread."""

    def run() -> T:
        with release_connection_after():
            return call()

    result: T = await sync_to_async(run, thread_sensitive=False)()
    return result
