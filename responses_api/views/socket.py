"""Responses over a WebSocket: each message to the client is an event, as over SSE.

The client sends ``response.create``, with the fields of the endpoint, and ``response.cancel``. A
message names its lane in ``stream_id``; without one it belongs to the default lane. The responses
of one lane run one after the other, those of different lanes at once. The limits are those of
OpenAI's API. Closing the socket cancels what runs. What HTTP names in the header
``x-unsupported-params`` is in the field ``unsupported_params`` of a response's first event.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import orjson
from channels.generic.websocket import AsyncWebsocketConsumer
from django.conf import settings

from inference_site.accounts.keys import Caller
from inference_site.accounts.models import Scope
from inference_site.accounts.rate_limits import count_request
from inference_site.core.domain.deltas import Usage
from inference_site.core.errors.api_errors import (
    ApiError,
    AuthenticationError,
    ForbiddenError,
    InternalError,
    InvalidRequestError,
    UnavailableError,
)
from inference_site.core.errors.exceptions import api_error, log_error
from inference_site.core.storage.postgresql import in_database_thread
from inference_site.gateway.api.authentication import authenticate_headers, require_scope
from inference_site.gateway.api.json_bodies import decode_json
from inference_site.gateway.api.payload import parse, shown_name, unknown_parameter
from inference_site.gateway.bodies import SOCKET_MEMORY_KEY, SocketMemory
from inference_site.gateway.delivery import Delivery, Sink
from inference_site.gateway.follower import Follower
from inference_site.gateway.handoff import CallResult, call_until_done
from inference_site.gateway.hub import hub
from inference_site.gateway.submission.submit import follow, submit
from inference_site.runs.streams.batches import Batch, Ending, frames_of
from responses_api.assembler import response_usage
from responses_api.context import UnstoredHistories
from responses_api.creation import Creation, create
from responses_api.events import DONE, decode, encode, opening_events, payload, terminal_event
from responses_api.items import IdentifiedItem, from_wire
from responses_api.storage import ConversationLocked
from responses_api.wire.objects import ResponseObject, changed
from responses_api.wire.requests import ResponseRequest

logger = logging.getLogger(__name__)

MAX_NAMED_LANES = 32
"""The most lanes with a name that a socket may use until it is closed."""
MAX_RUNNING = 16
"""The most responses of a socket that run at once."""
_MAX_WAITING = 16
"""The most responses that wait in one lane."""
_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_THREAD_BYTES = 64 * 1024
"""Larger messages are decoded on a thread."""
_LIFETIME_S = 3600.0
_NOT_IN_BODY = ("type", "stream", "stream_id", "background", "generate")
"""Fields of a message that are not fields of the request."""
_OF_CANCEL = ("type", "stream_id")
"""The fields of ``response.cancel``."""
_TERMINAL_FRAMES = (
    b"event: response.completed\n",
    b"event: response.incomplete\n",
    b"event: response.failed\n",
)

Started = tuple[Creation, Follower]


@dataclass(slots=True)
class Lane:
    """One lane: its waiting messages with their sizes in bytes, and the response that runs.

    ``is_busy`` from when a message has left the queue until its response has ended. It has a
    ``running_id`` as soon as its generation is submitted.
    """

    stream_id: str | None
    waiting: asyncio.Queue[tuple[dict[str, Any], int]] = field(
        default_factory=lambda: asyncio.Queue(_MAX_WAITING)
    )
    running_id: str = ""
    is_busy: bool = False
    cancels_next: bool = False

    def cancel(self) -> None:
        """Cancel the response that runs, or else the next one of those that were asked for."""
        if self.running_id:
            hub.cancel(self.running_id)
        elif self.is_busy or not self.waiting.empty():
            self.cancels_next = True

    def started(self, generation_id: str) -> None:
        """Note which generation runs; cancel it if that was asked for before it had an id."""
        self.running_id = generation_id
        if self.cancels_next:
            self.cancels_next = False
            hub.cancel(generation_id)

    def ended(self) -> None:
        """Note that nothing runs."""
        self.running_id = ""
        self.is_busy = self.cancels_next = False


Respond = Callable[[Lane, dict[str, Any], int], Coroutine[Any, Any, None]]
"""Answers one message of this size in a lane, and raises nothing."""


class Lanes:
    """The lanes of one socket. For the event loop's thread only."""

    def __init__(self, respond: Respond) -> None:
        self._respond = respond
        self._lanes: dict[str | None, Lane] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._turns = asyncio.Semaphore(MAX_RUNNING)
        self._waiting_bytes = 0

    def add(self, message: dict[str, Any], size: int) -> None:
        """Put a message into its lane.

        Raise InvalidRequestError for a lane that the socket may not have, and UnavailableError if
        too many messages wait.
        """
        lane = self._lane(message)
        waiting = self._waiting_bytes + size
        if lane.waiting.full() or waiting > settings.MAX_BODY_BYTES:
            raise UnavailableError("Too many responses wait on this socket.", code="queue_full")
        lane.waiting.put_nowait((message, size))
        self._waiting_bytes = waiting

    def cancel(self, message: dict[str, Any]) -> None:
        """Cancel what runs in the lane that the message names; without a name, in all lanes."""
        stream_id = stream_id_of(message)
        for lane in self._lanes.values():
            if stream_id in (None, lane.stream_id):
                lane.cancel()

    def stop(self) -> None:
        """Cancel what runs in all lanes; nothing that waits will run."""
        for task in self._tasks:
            task.cancel()

    def _lane(self, message: dict[str, Any]) -> Lane:
        stream_id = stream_id_of(message)
        lane = self._lanes.get(stream_id)
        if lane is None:
            if stream_id is not None and len(self._lanes.keys() - {None}) >= MAX_NAMED_LANES:
                raise InvalidRequestError(
                    f"This connection has used {MAX_NAMED_LANES} values of 'stream_id', which is "
                    "the most it may. Use one of them again, or open another connection.",
                    param="stream_id",
                    code="websocket_stream_limit_reached",
                )
            lane = self._lanes[stream_id] = Lane(stream_id)
            self._tasks.append(asyncio.create_task(self._work(lane)))
        return lane

    async def _work(self, lane: Lane) -> None:
        """Answer the messages of a lane, one after the other."""
        while True:
            message, size = await lane.waiting.get()
            lane.is_busy = True
            try:
                async with self._turns:
                    self._waiting_bytes -= size
                    await self._respond(lane, message, size)
            finally:
                lane.ended()


def stream_id_of(message: Mapping[str, Any]) -> str | None:
    """Return the lane that a message names. Raise InvalidRequestError for what is no name."""
    given = message.get("stream_id")
    if given is None or (isinstance(given, str) and _STREAM_ID.fullmatch(given)):
        return given
    raise InvalidRequestError(
        "Invalid 'stream_id': expected 1 to 256 letters, digits, '_', '-' or '.'.",
        param="stream_id",
        code="invalid_stream_id",
    )


class KeptHistories:
    """The histories of responses that are not stored: that of the latest response of each lane.

    Together they have at most ``MAX_BODY_BYTES``: the oldest ones are dropped. The latest is kept
    whatever its size.
    """

    def __init__(self) -> None:
        self._kept: dict[str | None, tuple[str, list[IdentifiedItem], int]] = {}

    def by_id(self) -> UnstoredHistories:
        """Return the histories by response id, for a thread: later changes do not show in it."""
        return {response_id: items for response_id, items, _ in self._kept.values()}

    async def keep(self, lane: Lane, response_id: str, items: list[IdentifiedItem]) -> None:
        """Keep the history of a lane's latest response instead of the one before."""
        size = await asyncio.to_thread(lambda: sum(len(orjson.dumps(item.data)) for item in items))
        self._kept.pop(lane.stream_id, None)
        self._kept[lane.stream_id] = response_id, items, size
        total = sum(size for _, _, size in self._kept.values())
        for oldest in list(self._kept)[:-1]:
            if total <= settings.MAX_BODY_BYTES:
                break
            total -= self._kept.pop(oldest)[2]

    def forget(self, lane: Lane, response_id: object) -> None:
        """Forget a response that could not be continued, if it is the latest of this lane."""
        if self._kept.get(lane.stream_id, ("", [], 0))[0] == response_id:
            del self._kept[lane.stream_id]


class ResponsesConsumer(AsyncWebsocketConsumer):  # type: ignore[misc]  # Channels has no types.
    """``WS /v1/responses``. The key comes in the handshake's headers, never in the URL."""

    _credentials: tuple[str, str]
    # The consumer receives no messages of a channel layer. A channel would be a subscription in
    # Redis for each socket.
    channel_layer_alias = "none"
    _expiry: asyncio.Task[None] | None = None
    _lanes: Lanes
    _is_refused = False

    async def connect(self) -> None:
        """Accept a client with a valid key; refuse the handshake of any other.

        If its project has too many sockets, or its key cannot be checked now, the client gets an
        error, and the socket is closed.
        """
        hub.ensure_running()
        headers = {name: value.decode("latin-1") for name, value in self.scope["headers"]}
        self._credentials = headers.get(b"authorization", ""), headers.get(b"x-api-key", "")
        self._message_room: SocketMemory = self.scope.get(SOCKET_MEMORY_KEY) or SocketMemory()
        try:
            caller = await in_database_thread(self._authenticate)
            self._message_room.count_for(caller.project_id)
        except (AuthenticationError, ForbiddenError) as exc:
            logger.info("websocket refused: %s", exc)
            await self.close(exc.status)
            return
        except Exception as exc:  # noqa: BLE001  # The boundary: it is logged and sent.
            error = api_error(exc)
            log_error("websocket", exc, error)
            self._is_refused = True
            await self.accept()
            await self.send(text_data=_error_message(error))
            await self.close()
            return
        self._histories = KeptHistories()
        self._lanes = Lanes(self._answer)
        await self.accept()
        self._expiry = asyncio.create_task(self._expire())

    async def disconnect(self, code: int) -> None:
        """Cancel what runs."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._lanes.stop()

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """Receive a message, unless the socket is being refused."""
        if self._is_refused:
            return
        given = bytes_data if text_data is None else text_data.encode()
        given, is_waiting = given or b"", False
        message: dict[str, Any] = {}
        try:
            is_large = len(given) > _THREAD_BYTES
            message = await asyncio.to_thread(_decode, given) if is_large else _decode(given)
            match message.get("type"):
                case "response.create":
                    self._lanes.add(message, len(given))
                    is_waiting = True
                case "response.cancel":
                    if unknown := [name for name in message if name not in _OF_CANCEL]:
                        raise unknown_parameter(shown_name(unknown[0]))
                    self._lanes.cancel(message)
                case other:
                    stream_id_of(message)  # The error names the lane, so it must be one.
                    raise InvalidRequestError(
                        f"Invalid value: {str(other)[:100]!r}. Supported values are: "
                        "'response.create' and 'response.cancel'.",
                        param="type",
                        code="invalid_value",
                    )
        except ApiError as exc:
            of_lane = None if exc.code == "invalid_stream_id" else message.get("stream_id")
            await self.send(text_data=_error_message(exc, of_lane))
        finally:
            if not is_waiting:
                self._message_room.give_back(len(given))

    async def _answer(self, lane: Lane, message: dict[str, Any], size: int) -> None:
        """Run a request to its end; an error that none of its events has is sent as an event."""
        try:
            try:
                body = await asyncio.to_thread(_to_request, message)
            finally:
                self._message_room.give_back(size)
            if message.get("generate") is False:
                await self._prepare(lane, body)
            else:
                await self._respond(lane, body)
        except Exception as exc:  # noqa: BLE001  # The boundary: it is logged and sent.
            error = api_error(exc)
            log_error("websocket", exc, error)
            self._histories.forget(lane, message.get("previous_response_id"))
            await self.send(text_data=_error_message(error, lane.stream_id))

    async def _respond(self, lane: Lane, body: ResponseRequest) -> None:
        # Tried again while another response runs on the conversation.
        started = await call_until_done(lambda: self._attempt(body), time.monotonic())
        if isinstance(started, ConversationLocked):
            raise started
        creation, follower = started
        sink = _SocketSink(self.send, creation, lane, self._histories)
        lane.started(follower.generation_id)
        await Delivery(follower, sink, cancels=True).run()
        if sink.failed_silently:
            raise InternalError

    async def _prepare(self, lane: Lane, body: ResponseRequest) -> None:
        """Answer a request without output: a later one builds on its items."""
        if body.store is not False:
            raise InvalidRequestError(
                "Invalid 'generate': a response without output is not stored, so it needs "
                "'store': false.",
                param="generate",
            )
        histories = self._histories.by_id()
        creation = await in_database_thread(lambda: self._create(body, histories))
        begun = ResponseObject.model_validate(creation.response)
        usage = response_usage(Usage())
        ended = changed(begun, status="completed", completed_at=int(time.time()), usage=usage)
        context, numbers = creation.context, count()
        await self._histories.keep(lane, begun.id, [*context.before, *context.new])
        ignored = creation.submission.ignored_params
        for event in [*opening_events(begun, numbers), terminal_event(ended, numbers)]:
            await self.send(text_data=_event_message(encode(event), lane.stream_id, ignored))
            ignored = []

    async def _attempt(self, body: ResponseRequest) -> CallResult[Started | ConversationLocked]:
        histories = self._histories.by_id()
        submitting = in_database_thread(lambda: self._submit(body, histories))
        starting = asyncio.ensure_future(submitting)
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

    def _create(self, body: ResponseRequest, histories: UnstoredHistories) -> Creation:
        caller = self._authenticate()
        count_request(caller)
        return create(caller, body, histories)

    def _submit(self, body: ResponseRequest, histories: UnstoredHistories) -> Started:
        creation = create(self._authenticate(), body, histories)
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
        self,
        send: Callable[..., Awaitable[None]],
        creation: Creation,
        lane: Lane,
        histories: KeptHistories,
    ) -> None:
        self._send, self._creation, self._lane = send, creation, lane
        self._histories = histories
        self._opening = creation.submission.frames
        self._ignored = creation.submission.ignored_params
        self.failed_silently = False

    @property
    def quiet_s(self) -> float:
        return 0.0 if self._opening else super().quiet_s

    async def write(self, batches: Sequence[Batch], ending: Ending | None) -> None:
        opening, self._opening = self._opening, ()
        for frame in [*opening, *frames_of(batches)]:
            if frame == DONE:
                continue
            if not self._creation.response["store"] and frame.startswith(_TERMINAL_FRAMES):
                final, context = decode(frame)["response"], self._creation.context
                output = [from_wire(item) for item in final["output"]]
                items = [*context.before, *context.new, *output]
                await self._histories.keep(self._lane, final["id"], items)
            ignored, self._ignored = self._ignored, []  # The first event has them.
            await self._send(text_data=_event_message(frame, self._lane.stream_id, ignored))
        if ending is not None:
            self.failed_silently = bool(ending.error_code) and not batches[-1].frames


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
    if message.get("background"):
        raise InvalidRequestError(
            "Invalid 'background': it cannot be used over a WebSocket.", param="background"
        )
    if message.get("stream") is not None and message["stream"] is not True:
        raise InvalidRequestError(
            "Invalid 'stream': a response over a WebSocket is always streamed.", param="stream"
        )
    if not isinstance(message.get("generate"), bool | None):
        raise InvalidRequestError("Invalid 'generate': expected a boolean.", param="generate")
    fields = {name: value for name, value in message.items() if name not in _NOT_IN_BODY}
    return parse(ResponseRequest, {**fields, "stream": True})


def _event_message(frame: bytes, stream_id: object, ignored: Sequence[str] = ()) -> str:
    """Return the message of an event, with the ``stream_id`` of its request, if any.

    ``ignored`` are the names of the request's fields that are ignored.
    """
    event = payload(frame)
    if stream_id is not None:
        event = event[:-1] + b',"stream_id":' + orjson.dumps(stream_id) + b"}"
    if ignored:
        event = event[:-1] + b',"unsupported_params":' + orjson.dumps(ignored) + b"}"
    return event.decode()


def _error_message(error: ApiError, stream_id: object = None) -> str:
    """Return the message of an error."""
    detail = {**error.envelope["error"], "code": error.code or error.type}
    event: dict[str, Any] = {"type": "error", "status": error.status, "error": detail}
    if stream_id is not None:
        event["stream_id"] = stream_id
    return orjson.dumps(event).decode()
