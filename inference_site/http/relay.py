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
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import redis.exceptions
from django.conf import settings
from django.db import DatabaseError
from django.http.response import HttpResponseBase

from inference_site.http.errors import ApiError, PayloadTooLargeError, UnavailableError
from inference_site.http.handler import ApiHandler
from inference_site.http.handoff import SCOPE_KEY, HandOff, Slot
from inference_site.http.hub import Follower, hub
from worker.assembly import Ending
from worker.event_log import Batch

logger = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_FIRST_PING_S = 0.9
"""When nothing has come by then, the headers and a comment go out: within the first second."""
_PING = b": ping\n\n"
_IDLE_S = 3600.0
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
        self._views = _Views(settings.WEB_THREADS)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        started = time.monotonic()
        hub.ensure_running()
        slot = Slot()
        try:
            body = await _read_body(receive)
            response = await self._views.run(
                self._handler.respond, {**scope, SCOPE_KEY: slot}, body
            )
        except ClientGone:
            return
        except ApiError as exc:
            await _send_response(self._handler.refuse(scope, exc, started), send)
            return
        if slot.handoff is None:
            await _send_response(response, send)
            return
        answer = _Answer(slot.handoff, _own_headers(response), started, send)
        await answer.relay(receive)


class _Views:
    """Runs views on pooled threads, and notices when they all hang (a database that is stopped,
    not closed, answers nothing): then requests are refused instead of piling up."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="view")
        self._progress_at = 0.0

    async def run(
        self,
        respond: Callable[[dict[str, Any], bytes], HttpResponseBase],
        scope: dict[str, Any],
        body: bytes,
    ) -> HttpResponseBase:
        """Return the view's response.

        Raise UnavailableError when no view has come back for ``WEB_STALL_S``.
        """
        future = asyncio.get_running_loop().run_in_executor(self._pool, respond, scope, body)
        submitted_at = time.monotonic()
        while True:
            waited_s = time.monotonic() - max(submitted_at, self._progress_at)
            if waited_s >= settings.WEB_STALL_S:
                future.add_done_callback(lambda _: _cancel_late(scope))
                raise UnavailableError("The server's storage does not respond.")
            done, _ = await asyncio.wait({future}, timeout=settings.WEB_STALL_S - waited_s)
            if done:
                self._progress_at = time.monotonic()
                return future.result()


class _Answer:
    """One answer on its way from a generation's frames to the client."""

    def __init__(self, handoff: HandOff, headers: Headers, started: float, send: Send) -> None:
        self._handoff, self._headers, self._send = handoff, headers, send
        self._started_at = started
        self._follower: Follower = hub.find(handoff.generation_id)
        self._begun = False
        self._gone = False

    async def relay(self, receive: Receive) -> None:
        """Send everything; when the client leaves first, have the generation stopped."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await (self._relay_stream() if self._handoff.stream else self._relay_json())
        except ClientGone:
            await self._cancel()
        except asyncio.CancelledError:
            await self._cancel()
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

    async def _cancel(self) -> None:
        try:
            await hub.cancel(self._handoff.generation_id)
        except (redis.exceptions.RedisError, DatabaseError) as exc:
            logger.warning("relay: cannot cancel %s: %s", self._handoff.generation_id, exc)

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
            frames = [frame for batch in batches for frame in batch.frames]
            # One write an event: some clients forget an event that arrives in two reads.
            for frame in frames or [_PING]:
                await self._write(frame, more=True)
            if ending is not None:
                await self._write(b"", more=False)
                return

    def _failed_early(self, ending: Ending, batches: list[Batch]) -> bool:
        """Whether the stream has nothing but a failure, so that it can still be a status."""
        return ending.is_early and not self._begun and batches[0].first == 0 and len(batches) == 1

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
        await self._write(ending.body, more=False)

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


def _cancel_late(scope: dict[str, Any]) -> None:
    """Stop what a view has enqueued after its client was refused."""
    handoff = scope[SCOPE_KEY].handoff
    if handoff is not None:
        asyncio.get_running_loop().create_task(hub.cancel(handoff.generation_id))
        hub.leave(hub.find(handoff.generation_id))


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
