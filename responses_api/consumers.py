"""Responses over a WebSocket: the same events as over SSE, one to a message.

Messages to the server: ``response.create`` with the fields of the endpoint, ``response.cancel``.
One response runs at a time; more are taken in order. Closing the socket stops what runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import orjson
from asgiref.sync import sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.conf import settings

from inference_site.accounts.keys import Caller
from inference_site.accounts.models import Scope
from inference_site.api.authentication import authenticated, require_scope
from inference_site.api.parsers import is_too_deep
from inference_site.api.payload import parse
from inference_site.errors.api_errors import (
    ApiError,
    InternalError,
    InvalidRequestError,
    UnavailableError,
)
from inference_site.errors.exceptions import api_error
from inference_site.gateway.follower import Follower
from inference_site.gateway.hub import hub
from inference_site.storage.connections import lent_connection
from inference_site.submission.submit import follow, submit
from responses_api.creation import Creation, create
from responses_api.events import DONE, decode, payload
from responses_api.items import IdentifiedItem, from_wire
from responses_api.storage import ConversationLocked
from responses_api.wire.request import ResponseRequest

logger = logging.getLogger(__name__)

_MOST_WAITING = 16
_LIFETIME_S = 3600.0
_IDLE_S = 3600.0
_RETRY_S = 0.1
_ENDS = ("response.completed", "response.incomplete", "response.failed")

T = TypeVar("T")


class ResponsesConsumer(AsyncWebsocketConsumer):  # type: ignore[misc]  # Channels has no types.
    """``WS /v1/responses``. The key comes in the handshake's headers, never in the URL."""

    _given: tuple[str, str]
    _tasks: tuple[asyncio.Task[None], ...] = ()

    async def connect(self) -> None:
        """Accept who has a key; refuse the handshake of who has none."""
        hub.ensure_running()
        headers = {name: value.decode("latin-1") for name, value in self.scope["headers"]}
        given = headers.get(b"authorization", ""), headers.get(b"x-api-key", "")
        try:
            self._given = given
            await _in_thread(self._authenticated)
        except ApiError as exc:
            logger.info("websocket refused: %s", exc)
            await self.close()
            return
        self._waiting: asyncio.Queue[dict[str, Any]] = asyncio.Queue(_MOST_WAITING)
        self._memory: dict[str, list[IdentifiedItem]] = {}
        self._running: Follower | None = None
        self._is_busy = self._cancels_next = False
        await self.accept()
        self._tasks = asyncio.create_task(self._work()), asyncio.create_task(self._expire())

    async def disconnect(self, code: int) -> None:
        """Stop what runs."""
        for task in self._tasks:
            task.cancel()
        if self._tasks and self._running is not None:
            hub.cancel(self._running.generation_id)

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """Take one message."""
        try:
            self._take(_decoded(text_data if text_data is not None else bytes_data or b""))
        except ApiError as exc:
            await self._tell(exc)

    def _take(self, message: dict[str, Any]) -> None:
        match message.get("type"):
            case "response.create":
                try:
                    self._waiting.put_nowait(message)
                except asyncio.QueueFull:
                    raise UnavailableError(
                        "Too many responses wait on this socket.", code="queue_full"
                    ) from None
            case "response.cancel":
                self._cancel()
            case other:
                raise InvalidRequestError(
                    f"Invalid value: {str(other)[:100]!r}. Supported values are: "
                    "'response.create' and 'response.cancel'.",
                    param="type",
                    code="invalid_value",
                )

    def _cancel(self) -> None:
        """Stop what runs, or else what is about to."""
        if self._running is not None:
            hub.cancel(self._running.generation_id)
        elif self._is_busy or not self._waiting.empty():
            self._cancels_next = True

    async def _work(self) -> None:
        """Run what was asked for, one after the other."""
        while True:
            message = await self._waiting.get()
            stream_id = message.get("stream_id")
            self._is_busy = True
            try:
                await self._respond(message, stream_id)
            except Exception as exc:
                error = api_error(exc)
                if error.status >= 500 and not isinstance(exc, ApiError):
                    logger.exception("websocket: a response failed")
                self._memory.pop(str(message.get("previous_response_id")), None)
                await self._tell(error, stream_id)
            finally:
                self._is_busy = self._cancels_next = False

    async def _respond(self, message: dict[str, Any], stream_id: object) -> None:
        creation, follower = await self._start(_request(message))
        self._running = follower
        if self._cancels_next:
            self._cancels_next = False
            hub.cancel(follower.generation_id)
        try:
            for frame in creation.submission.frames:
                await self._send(frame, stream_id)
            await self._relay(follower, creation, stream_id)
        finally:
            self._running = None
            hub.leave(follower)

    async def _start(self, body: ResponseRequest) -> tuple[Creation, Follower]:
        """Enqueue it; wait while its conversation is busy."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + settings.CONVERSATION_LOCK_WAIT_S
        while True:
            starting = asyncio.ensure_future(_in_thread(lambda: self._started(body)))
            try:
                return await asyncio.shield(starting)
            except asyncio.CancelledError:  # The socket was closed; the thread goes on.
                starting.add_done_callback(_abandon)
                raise
            except ConversationLocked:
                if loop.time() >= deadline:
                    raise
            await asyncio.sleep(_RETRY_S)

    def _authenticated(self) -> Caller:
        """Return the caller as its key is now: a socket lives longer than a key may."""
        caller = authenticated(*self._given)
        require_scope(caller, Scope.INFERENCE)
        return caller

    def _started(self, body: ResponseRequest) -> tuple[Creation, Follower]:
        caller = self._authenticated()
        creation = create(caller, body, self._memory)
        request_id = f"req_{secrets.token_hex(16)}"
        follower = follow(creation.submission)
        submit(creation.submission, request_id, follower)
        return creation, follower

    async def _relay(self, follower: Follower, creation: Creation, stream_id: object) -> None:
        while True:
            await follower.wait(_IDLE_S)
            for batch in follower.take():
                for frame in batch.frames:
                    await self._send(frame, stream_id)
                    self._remember(frame, creation)
                if batch.ending is not None:
                    if batch.ending.error_code and not batch.frames:
                        raise InternalError  # A failure that found no words of its own.
                    return

    async def _send(self, frame: bytes, stream_id: object) -> None:
        if frame == DONE:
            return
        event = payload(frame)
        if stream_id is not None:
            event = event[:-1] + b',"stream_id":' + orjson.dumps(stream_id) + b"}"
        await self.send(text_data=event.decode())

    def _remember(self, frame: bytes, creation: Creation) -> None:
        """Keep the history of the last response if it is stored nowhere else."""
        if creation.response["store"] or not frame.startswith(_END_PREFIXES):
            return
        final = decode(frame)["response"]
        output = [from_wire(item) for item in final["output"]]
        context = creation.context
        self._memory = {final["id"]: [*context.before, *context.new, *output]}

    async def _tell(self, error: ApiError, stream_id: object = None) -> None:
        detail = {**error.envelope["error"], "code": error.code or error.type}
        event: dict[str, Any] = {"type": "error", "status": error.status, "error": detail}
        if stream_id is not None:
            event["stream_id"] = stream_id
        await self.send(text_data=orjson.dumps(event).decode())

    async def _expire(self) -> None:
        """Close a socket that has been open for too long."""
        await asyncio.sleep(_LIFETIME_S)
        with contextlib.suppress(Exception):
            await self._tell(
                UnavailableError(
                    "The connection has been open for an hour.",
                    code="websocket_connection_limit_reached",
                )
            )
        await self.close()


_END_PREFIXES = tuple(f"event: {name}\n".encode() for name in _ENDS)


def _abandon(starting: asyncio.Future[tuple[Creation, Follower]]) -> None:
    """Stop what was started for a socket that is closed."""
    if not starting.cancelled() and starting.exception() is None:
        _, follower = starting.result()
        hub.cancel(follower.generation_id)
        hub.leave(follower)


def _decoded(message: str | bytes) -> dict[str, Any]:
    """Return a message. Raise InvalidRequestError for what is no JSON object."""
    if len(message) > settings.MAX_BODY_BYTES:
        raise InvalidRequestError("The message is too large.")
    try:
        decoded = orjson.loads(message)
    except orjson.JSONDecodeError as exc:
        raise InvalidRequestError(f"The message is not JSON: {exc}.", code="invalid_json") from exc
    if not isinstance(decoded, dict) or is_too_deep(decoded):
        raise InvalidRequestError("The message must be a JSON object.", code="invalid_json")
    return decoded


def _request(message: dict[str, Any]) -> ResponseRequest:
    """Return the request of a message; it is always streamed."""
    fields = {name: value for name, value in message.items() if name not in _ENVELOPE}
    if fields.pop("background", None):
        raise InvalidRequestError(
            "Invalid 'background': it cannot be used over a WebSocket.", param="background"
        )
    return parse(ResponseRequest, {**fields, "stream": True})


_ENVELOPE = ("type", "stream", "stream_options", "stream_id")


async def _in_thread(call: Callable[[], T]) -> T:
    """Run what uses the database on a thread."""

    def run() -> T:
        with lent_connection():
            return call()

    result: T = await sync_to_async(run, thread_sensitive=False)()
    return result
