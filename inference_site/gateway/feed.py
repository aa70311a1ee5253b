"""A feed: an SSE stream that a web process makes itself, and that follows no generation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse

from inference_site.gateway.handoff import place_of

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_PING = b": ping\n\n"


def hand_feed(request: HttpRequest, feed: AsyncIterator[bytes]) -> HttpResponse:
    """Leave a feed to the relay, and return the response whose headers the relay will send.

    Raise RuntimeError when the request did not come through the relay.
    """
    place_of(request).feed = feed
    return HttpResponse(status=200)


async def relay_feed(
    feed: AsyncIterator[bytes], headers: list[tuple[bytes, bytes]], receive: Receive, send: Send
) -> None:
    """Send a feed until it ends or its client leaves, with comments while it says nothing."""
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    gone = asyncio.ensure_future(_disconnect(receive))
    frames = feed.__aiter__()
    coming = asyncio.ensure_future(anext(frames, None))
    try:
        while not gone.done():
            timeout_s = settings.KEEP_ALIVE_INTERVAL / 1000
            await asyncio.wait({coming, gone}, timeout=timeout_s, return_when="FIRST_COMPLETED")
            if not coming.done():
                frame: bytes | None = _PING
            elif (frame := coming.result()) is not None:
                coming = asyncio.ensure_future(anext(frames, None))
            if gone.done():
                return
            last = frame is None
            await send({"type": "http.response.body", "body": frame or b"", "more_body": not last})
            if last:
                return
    finally:
        for task in (gone, coming):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
