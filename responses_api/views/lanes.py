"""The lanes of a WebSocket: a lane runs its responses one after the other, and lanes run at once.

A message names its lane in ``stream_id``; without one it belongs to the default lane. The limits
are those of OpenAI's API.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from django.conf import settings

from inference_site.core.errors.api_errors import InvalidRequestError, UnavailableError
from inference_site.gateway.hub import hub
from responses_api.context import UnstoredHistories
from responses_api.items import IdentifiedItem

MAX_NAMED_LANES = 32
"""The most lanes with a name that a socket may use until it is closed."""
MAX_RUNNING = 16
"""The most responses of a socket that run at once."""
_MAX_WAITING = 16
"""The most responses that wait in one lane."""
_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")


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

    Together they have at most ``MAX_BODY_BYTES``, without those that were kept first; the latest is
    kept whatever its size.
    """

    def __init__(self) -> None:
        self._kept: dict[str | None, tuple[str, list[IdentifiedItem], int]] = {}

    def by_id(self) -> UnstoredHistories:
        """Return the histories by response id, for a thread: later changes do not show in it."""
        return {response_id: items for response_id, items, _ in self._kept.values()}

    async def keep(self, lane: Lane, response_id: str, items: list[IdentifiedItem]) -> None:
        """Keep the history of a lane's latest response instead of the one before."""
        size = await asyncio.to_thread(_size_of, items)
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


def _size_of(items: list[IdentifiedItem]) -> int:
    return sum(len(orjson.dumps(item.data)) for item in items)
