"""Responses over a WebSocket: each message to the client is an event, as over SSE.

The client sends ``response.create``, with the fields of the endpoint, and ``response.cancel``. One
response runs at a time; further ones wait in order. Closing the socket cancels the running one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import orjson
from channels.generic.websocket import AsyncWebsocketConsumer
from django.conf import settings

from inference_site.accounts.keys import Caller
from inference_site.accounts.models import Scope
from inference_site.core.errors.api_errors import (
    ApiError,
    InternalError,
    InvalidRequestError,
    RateLimitError,
    UnavailableError,
)
from inference_site.core.errors.exceptions import api_error
from inference_site.core.storage.postgresql import in_database_thread
from inference_site.gateway.api.authentication import authenticate_headers, require_scope
from inference_site.gateway.api.json_bodies import decode_json
from inference_site.gateway.api.payload import parse
from inference_site.gateway.bodies import SOCKET_MEMORY_KEY, SocketMemory
from inference_site.gateway.delivery import Delivery, Sink
from inference_site.gateway.follower import Follower
from inference_site.gateway.handoff import CallResult, call_until_done
from inference_site.gateway.hub import hub
from inference_site.gateway.submission.submit import follow, submit
from inference_site.runs.streams.batches import Batch, Ending, frames_of
from responses_api.creation import Creation, create
from responses_api.events import DONE, decode, payload
from responses_api.items import IdentifiedItem, from_wire
from responses_api.storage import ConversationLocked
from responses_api.wire.requests import ResponseRequest

logger = logging.getLogger(__name__)

_MAX_WAITING = 16
_THREAD_BYTES = 64 * 1024
"""Larger messages are decoded on a thread."""
_LIFETIME_S = 3600.0
_NOT_IN_BODY = ("type", "stream", "stream_options", "stream_id")
"""Fields of a message that are not fields of the request."""
_TERMINAL_FRAMES = (
    b"event: response.completed\n",
    b"event: response.incomplete\n",
    b"event: response.failed\n",
)

Started = tuple[Creation, Follower]


class ResponsesConsumer(AsyncWebsocketConsumer):  # type: ignore[misc]  # Channels has no types.
    """``WS /v1/responses``. The key comes in the handshake's headers, never in the URL."""

    _credentials: tuple[str, str]
    # The consumer receives no messages of a channel layer. A channel would be a subscription in
    # Redis for each socket.
    channel_layer_alias = "none"
    _tasks: tuple[asyncio.Task[None], ...] = ()
    _is_refused = False

    async def connect(self) -> None:
        """Accept a client with a valid key; refuse the handshake of any other.

        If the project has too many sockets, the client gets an error, and the socket is closed.
        """
        hub.ensure_running()
        headers = {name: value.decode("latin-1") for name, value in self.scope["headers"]}
        self._credentials = headers.get(b"authorization", ""), headers.get(b"x-api-key", "")
        try:
            caller = await in_database_thread(self._authenticate)
        except ApiError as exc:
            logger.info("websocket refused: %s", exc)
            await self.close()
            return
        self._message_room: SocketMemory = self.scope.get(SOCKET_MEMORY_KEY) or SocketMemory()
        try:
            self._message_room.count_for(caller.project_id)
        except RateLimitError as exc:
            self._is_refused = True
            await self.accept()
            await self.send(text_data=_error_message(exc))
            await self.close()
            return
        self._waiting: asyncio.Queue[tuple[dict[str, Any], int]] = asyncio.Queue(_MAX_WAITING)
        self._waiting_bytes = 0
        self._unstored: dict[str, list[IdentifiedItem]] = {}
        self._running_id = ""
        self._is_busy = self._cancels_next = False
        await self.accept()
        self._tasks = asyncio.create_task(self._work()), asyncio.create_task(self._expire())

    async def disconnect(self, code: int) -> None:
        """Cancel the running response."""
        for task in self._tasks:
            task.cancel()

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """Receive a message, unless the socket is being refused."""
        if self._is_refused:
            return
        given = bytes_data if text_data is None else text_data.encode()
        given, is_waiting = given or b"", False
        try:
            is_large = len(given) > _THREAD_BYTES
            message = await asyncio.to_thread(_decode, given) if is_large else _decode(given)
            is_waiting = self._handle(message, len(given))
        except ApiError as exc:
            await self.send(text_data=_error_message(exc))
        finally:
            if not is_waiting:
                self._message_room.give_back(len(given))

    def _handle(self, message: dict[str, Any], size: int) -> bool:
        """Handle a message; return whether it waits in the queue."""
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
                if self._running_id:
                    hub.cancel(self._running_id)
                elif self._is_busy or not self._waiting.empty():
                    self._cancels_next = True
                return False
            case other:
                raise InvalidRequestError(
                    f"Invalid value: {str(other)[:100]!r}. Supported values are: "
                    "'response.create' and 'response.cancel'.",
                    param="type",
                    code="invalid_value",
                )

    async def _work(self) -> None:
        """Run the requests, one after the other."""
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
                self._unstored.pop(str(message.get("previous_response_id")), None)
                await self.send(text_data=_error_message(error, stream_id))
            finally:
                self._is_busy = self._cancels_next = False

    async def _respond(self, message: dict[str, Any], size: int, stream_id: object) -> None:
        try:
            body = await asyncio.to_thread(_to_request, message)
            # Tried again while another response runs on the conversation.
            started = await call_until_done(lambda: self._attempt(body), time.monotonic())
        finally:
            self._message_room.give_back(size)
        if isinstance(started, ConversationLocked):
            raise started
        creation, follower = started
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
            self._unstored = sink.history
        if sink.failed_silently:
            raise InternalError

    async def _attempt(self, body: ResponseRequest) -> CallResult[Started | ConversationLocked]:
        starting = asyncio.ensure_future(in_database_thread(lambda: self._submit(body)))
        try:
            creation, follower = await asyncio.shield(starting)
        except asyncio.CancelledError:  # The socket was closed; the thread goes on.
            starting.add_done_callback(_cancel_started)
            raise
        except ConversationLocked as locked:
            return CallResult(locked, locked.wait)
        return CallResult((creation, follower), None, follower.generation_id)

    def _authenticate(self) -> Caller:
        """Return the caller, for each request: the key may expire before the socket."""
        caller = authenticate_headers(*self._credentials)
        require_scope(caller, Scope.INFERENCE)
        return caller

    def _submit(self, body: ResponseRequest) -> Started:
        caller = self._authenticate()
        creation = create(caller, body, self._unstored)
        request_id = f"req_{secrets.token_hex(16)}"
        follower = follow(creation.submission)
        submit(creation.submission, request_id, follower)
        return creation, follower

    async def _expire(self) -> None:
        """Close the socket after ``_LIFETIME_S``."""
        await asyncio.sleep(_LIFETIME_S)
        with contextlib.suppress(Exception):
            error = UnavailableError(
                "The connection has been open for an hour.",
                code="websocket_connection_limit_reached",
            )
            await self.send(text_data=_error_message(error))
        await self.close()


class _SocketSink(Sink):
    """Sends the events of a response, and keeps the history of one that is not stored."""

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
                await self._send(text_data=_event_message(frame, self._stream_id))
                self._keep_history(frame)
        if ending is not None:
            self.failed_silently = bool(ending.error_code) and not batches[-1].frames

    def _keep_history(self, frame: bytes) -> None:
        """Keep the items of a response that ends and is not stored."""
        if self._creation.response["store"] or not frame.startswith(_TERMINAL_FRAMES):
            return
        final = decode(frame)["response"]
        output = [from_wire(item) for item in final["output"]]
        context = self._creation.context
        self.history = {final["id"]: [*context.before, *context.new, *output]}


def _cancel_started(starting: asyncio.Future[Started]) -> None:
    """Cancel a response that was submitted for a closed socket."""
    if not starting.cancelled() and starting.exception() is None:
        _, follower = starting.result()
        hub.cancel(follower.generation_id)
        hub.leave(follower)


def _decode(message: bytes) -> dict[str, Any]:
    """Return the JSON object of a message. Raise InvalidRequestError if it is none.

    The server refuses messages that are larger than ``MAX_BODY_BYTES``.
    """
    try:
        decoded = decode_json(message)
    except InvalidRequestError as exc:
        raise InvalidRequestError(exc.message, code="invalid_json") from exc
    if not isinstance(decoded, dict):
        raise InvalidRequestError("The message must be a JSON object.", code="invalid_json")
    return decoded


def _to_request(message: dict[str, Any]) -> ResponseRequest:
    """Return the request of ``response.create``; its response is always streamed."""
    fields = {name: value for name, value in message.items() if name not in _NOT_IN_BODY}
    if fields.pop("background", None):
        raise InvalidRequestError(
            "Invalid 'background': it cannot be used over a WebSocket.", param="background"
        )
    return parse(ResponseRequest, {**fields, "stream": True})


def _event_message(frame: bytes, stream_id: object) -> str:
    """Return the message of an event, with the ``stream_id`` of its request, if any."""
    event = payload(frame)
    if stream_id is not None:
        event = event[:-1] + b',"stream_id":' + orjson.dumps(stream_id) + b"}"
    return event.decode()


def _error_message(error: ApiError, stream_id: object = None) -> str:
    """Return the message of an error."""
    detail = {**error.envelope["error"], "code": error.code or error.type}
    event: dict[str, Any] = {"type": "error", "status": error.status, "error": detail}
    if stream_id is not None:
        event["stream_id"] = stream_id
    return orjson.dumps(event).decode()
