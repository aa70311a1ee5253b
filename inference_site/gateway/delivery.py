"""Delivery: writes the frames of a follower to its client: events, lines, bytes or one body."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, cast

import orjson
import redis.exceptions
from django import db
from django.conf import settings
from django.http.response import HttpResponse, HttpResponseBase, StreamingHttpResponse

from inference_site.core.errors.api_errors import ApiError, InternalError, speaks_anthropic
from inference_site.gateway.follower import Follower
from inference_site.gateway.hub import hub
from inference_site.runs.streams.batches import Batch, Ending, frames_of

logger = logging.getLogger(__name__)

EVENTS = "inference_site.events"
"""An ASGI extension, and the type of its message: the server writes each of ``events`` as if it
came in a message of its own. For a server without the extension each does."""

ABORT = "inference_site.abort"
"""An ASGI extension, and the type of its message: the server closes the connection at once, so that
the client does not take what it has for the whole answer."""

SAFE_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
"""Headers of every answer that does not set them itself."""

Headers = list[tuple[bytes, bytes]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_IDLE_S = 3600.0
_CANCEL_S = 3.0
_FIRST_PING_S = 0.9
"""A stream without a frame by then gets its headers and a ping: within the first second."""
_COMMENT_S = 0.5
"""How long the comment of a hand-off may take to make."""
_comment_threads = ThreadPoolExecutor(2, thread_name_prefix="comments")
"""Threads of their own: what a comment asks for may hang."""
_PING_COMMENT, _DONE = b": ping\n\n", b"data: [DONE]\n\n"
_SSE_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_JSON_HEADERS: Headers = [(b"content-type", b"application/json")]


class ClientGone(Exception):
    """The client has closed the connection."""


class Sink(ABC):
    """Writes to one client."""

    @property
    def quiet_s(self) -> float:
        """The longest time without a ``write``."""
        return _IDLE_S

    @abstractmethod
    async def write(self, batches: Sequence[Batch], ending: Ending | None) -> None:
        """Send new batches, none after ``quiet_s``; ``ending`` is that of the last batch."""


class Delivery:
    """Writes a follower's batches to a sink until the ending.

    With ``cancels`` the generation is cancelled when its client leaves before that.
    """

    def __init__(self, follower: Follower, sink: Sink, *, cancels: bool) -> None:
        self._follower, self._sink, self._cancels = follower, sink, cancels
        self._is_gone = False

    async def run(self, leaving: Callable[[], Awaitable[object]] | None = None) -> None:
        """Deliver everything. ``leaving`` returns when the client leaves, which stops it."""
        watcher = None if leaving is None else asyncio.create_task(self._watch(leaving))
        try:
            ending = None
            while ending is None:
                if self._follower.is_behind and not self._is_gone:
                    await hub.read_on(self._follower)
                if not self._is_gone:  # The client may leave during a write, when nothing waits.
                    await self._follower.wait(self._sink.quiet_s)
                if self._is_gone:
                    raise ClientGone
                batches = self._follower.take()
                if not batches and self._follower.is_behind:
                    continue
                ending = batches[-1].ending if batches else None
                await self._sink.write(batches, ending)
        except ClientGone:
            if self._cancels:
                hub.cancel(self._follower.generation_id)
        except BaseException:
            # The server stops, or a write failed: wait until the cancel flag is stored.
            if self._cancels:
                stored = hub.cancel(self._follower.generation_id)
                await asyncio.wait({stored}, timeout=_CANCEL_S)
            raise
        finally:
            if watcher is not None:
                watcher.cancel()
            hub.leave(self._follower)

    async def _watch(self, leaving: Callable[[], Awaitable[object]]) -> None:
        await leaving()
        self._is_gone = True
        self._follower.wake()


class JsonSink(Sink):
    """One body, of JSON unless the ending says otherwise, with the status of the ending.

    ``headers`` are those of the view's response; ``started_at`` is a time of the monotonic clock.
    ``path`` is that of the request: it decides the form of an error that has no body.
    """

    def __init__(self, send: Send, headers: Headers, started_at: float, path: str = "") -> None:
        self._send, self._headers, self._started_at = send, headers, started_at
        self._path = path

    async def write(self, batches: Sequence[Batch], ending: Ending | None) -> None:
        if ending is None:
            return
        headers = list(_JSON_HEADERS)
        if ending.media_type:
            headers = [(b"content-type", ending.media_type.encode())]
        if ending.retry_after_s is not None:
            headers.append((b"retry-after", str(ending.retry_after_s).encode()))
        await self._begin(ending.status, headers)
        # A failure without a message of its own has an empty body.
        is_bare = ending.error_code and not ending.body
        body = self._unknown_error() if is_bare else ending.body
        await self._write(body, more=False)

    def _unknown_error(self) -> bytes:
        return orjson.dumps(InternalError().shown_at(self._path))

    async def _begin(self, status: int, headers: Headers) -> None:
        elapsed_ms = round((time.monotonic() - self._started_at) * 1000)
        timing = (b"openai-processing-ms", str(elapsed_ms).encode())
        headers, self._headers = [*self._headers, *headers, timing], []  # They are sent once.
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


class SseSink(JsonSink):
    """Server-sent events, with comments, or events, while nothing comes.

    ``opening``, ``ping``, ``comment`` and ``closing`` are those of ``HandOff``. With
    ``may_be_status`` a stream that consists of a failure is answered as JSON, with the status of
    the failure. With ``takes_events`` the server has the extension ``EVENTS``.
    """

    _form: Headers = _SSE_HEADERS
    _silence = _PING_COMMENT

    def __init__(
        self,
        send: Send,
        headers: Headers,
        started_at: float,
        path: str = "",
        opening: Sequence[bytes] = (),
        *,
        may_be_status: bool = True,
        takes_events: bool = False,
        ping: bytes = b"",
        comment: Callable[[], bytes] | None = None,
        closing: Sequence[bytes] = (),
    ) -> None:
        super().__init__(send, headers, started_at, path)
        self._ping, self._comment, self._closing = ping, comment, closing
        self._opening, self._may_be_status = opening, may_be_status
        self._takes_events = takes_events
        self._has_begun = False

    @property
    def quiet_s(self) -> float:
        interval_s: float = settings.KEEP_ALIVE_INTERVAL / 1000
        return interval_s if self._has_begun else min(_FIRST_PING_S, interval_s)

    async def write(self, batches: Sequence[Batch], ending: Ending | None) -> None:
        frames = frames_of(batches)
        if not self._has_begun:
            is_first = len(batches) == 1 and batches[0].first == len(self._opening)
            if ending is not None and ending.is_early and is_first and self._may_be_status:
                await super().write(batches, ending)
                return
            self._has_begun = True
            await self._begin(200, self._form)
            frames = [*self._opening, *frames]
        if ending is not None and ending.error_code and not ending.body:
            frames += self._unknown_failure()
        if batches:
            self._comment = None
        if frames:
            self._closing = ()
        elif ending is not None:
            frames += self._closing
        events = frames or await self._keep_alive()
        if self._takes_events and len(events) > 1:
            await self._send({"type": EVENTS, "events": events, "more_body": True})
        else:
            for event in events:  # One by one: some clients lose an event that arrives in two.
                await self._write(event, more=True)
        if ending is not None:
            await self._write(b"", more=False)

    async def _keep_alive(self) -> Sequence[bytes]:
        """Return what to send while nothing comes: the comment, or it and the API's own event."""
        comment = b""
        if self._silence and self._comment is not None:
            try:
                async with asyncio.timeout(_COMMENT_S):
                    loop = asyncio.get_running_loop()
                    comment = await loop.run_in_executor(_comment_threads, self._comment)
            except (TimeoutError, redis.exceptions.RedisError, db.Error):
                pass
            except Exception:  # A comment must not end a stream.
                logger.warning("a comment could not be made", exc_info=True)
        if self._ping:
            return [comment, self._ping] if comment else [self._ping]
        return [comment or self._silence]

    def _unknown_failure(self) -> list[bytes]:
        body = self._unknown_error()
        if speaks_anthropic(self._path, has_version=False):
            return [b"event: error\ndata: " + body + b"\n\n"]
        return [b"data: " + body + b"\n\n", _DONE]


class LinesSink(SseSink):
    """JSON lines, as Ollama streams them. Without comments: only the headers are sent early."""

    _form = [(b"content-type", b"application/x-ndjson"), *_SSE_HEADERS[1:]]
    _silence = b""

    def _unknown_failure(self) -> list[bytes]:
        return [self._unknown_error() + b"\n"]


class BytesSink(JsonSink):
    """The frames as they are, after the first one, which is their media type.

    A failure before the first byte is answered as JSON, with its status. One after it closes the
    connection: bytes of sound have no place for an error.
    """

    _has_begun = False

    async def write(self, batches: Sequence[Batch], ending: Ending | None) -> None:
        frames = frames_of(batches)
        has_failed = ending is not None and ending.status != HTTPStatus.OK
        if has_failed and not self._has_begun:
            await super().write(batches, ending)
            return
        if frames and not self._has_begun:
            self._has_begun = True
            media_type, *frames = frames
            await self._begin(HTTPStatus.OK, [(b"content-type", media_type)])
        if frames:
            await self._write(b"".join(frames), more=True)
        if has_failed:
            await self._send({"type": ABORT, "more_body": True})
        elif ending is not None:
            await self._write(b"", more=False)


async def send_response(response: HttpResponseBase, send: Send, path: str = "") -> None:
    """Send a Django response. A streaming one has its length in a header.

    ``path`` is that of the request: it decides the form of an error of a streaming one.
    """
    if isinstance(response, StreamingHttpResponse):
        await _send_stream(response, send, path)
        return
    body = response.content  # type: ignore[attr-defined]  # It is an HttpResponse.
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


async def _send_stream(response: StreamingHttpResponse, send: Send, path: str) -> None:
    """Send a response whose chunks are read from a file, each on a thread.

    The headers follow the first chunk, so that an error that comes before it has its status. After
    a later one the connection is closed.
    """
    chunks, has_begun = cast(Iterator[bytes], response.streaming_content), False
    head = {
        "type": "http.response.start",
        "status": response.status_code,
        "headers": _encoded(response.items()),
    }
    try:
        while chunk := await asyncio.to_thread(next, chunks, b""):
            if not has_begun:
                has_begun = True
                await send(head)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        if not has_begun:
            await send(head)
        await send({"type": "http.response.body", "body": b""})
    except ApiError as exc:
        if has_begun:
            await send({"type": ABORT, "more_body": True})
            return
        body = orjson.dumps(exc.shown_at(path))
        failed = HttpResponse(body, "application/json", exc.status, headers=exc.headers)
        failed["x-request-id"] = failed["request-id"] = response["x-request-id"]
        await send_response(failed, send)
    finally:
        await asyncio.to_thread(response.close)


def own_headers(response: HttpResponseBase) -> Headers:
    """Return the headers of a view's response without those that the relayed answer sets itself."""
    replaced = {"content-type", "content-length", "openai-processing-ms"}
    return [(k, v) for k, v in _encoded(response.items()) if k.decode() not in replaced]


def _encoded(headers: Iterable[tuple[str, str]]) -> Headers:
    return [(key.lower().encode("ascii"), value.encode("latin-1")) for key, value in headers]
