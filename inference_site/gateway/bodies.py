"""The bodies of requests: how they are received, and how much of memory they may take together."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from django.conf import settings
from django.http import HttpResponse

from inference_site.errors.api_errors import (
    ApiError,
    InvalidRequestError,
    RequestTimeoutError,
    UnavailableError,
)
from inference_site.gateway.access import Application
from inference_site.gateway.connections import close_websocket, open_websocket
from inference_site.gateway.delivery import ClientGone, Receive, Send, send_response
from inference_site.gateway.head import length_of_body, require_no_nul, too_large

ROOM_KEY = "inference_site.message_room"
"""In the scope of a WebSocket: its ``MessageRoom``."""
_LARGEST_FORM = 1024 * 1024
_MOST_WAITING = 1000
"""Bodies of one project that may wait for room. A client that has left waits, too, for a time."""


class BodyRoom:
    """The room for bodies in this process; a project has at most a quarter of it, or one body.

    For the event loop's thread only.
    """

    def __init__(self) -> None:
        self._held: Counter[int | None] = Counter()
        self._lines: dict[int | None, deque[tuple[asyncio.Future[None], int]]] = {}

    @asynccontextmanager
    async def held(self, project_id: int | None, size: int) -> AsyncIterator[None]:
        """Hold room for a body. Raise UnavailableError when there is none in time, or too many of
        the project wait."""
        await self._take(project_id, size)
        try:
            yield
        finally:
            self.give_back(project_id, size)

    def takes(self, project_id: int | None, size: int) -> bool:
        """Hold room at once, if there is; return whether there was."""
        fits = self._fits(project_id, size)
        if fits:
            self._held[project_id] += size
        return fits

    def give_back(self, project_id: int | None, size: int) -> None:
        """Hold so much less."""
        self._held[project_id] -= size
        if not self._held[project_id]:
            del self._held[project_id]
        for waiting_id in list(self._lines):
            self._let_in(waiting_id)
        if project_id in self._lines:  # Behind the others.
            self._lines[project_id] = self._lines.pop(project_id)

    async def _take(self, project_id: int | None, size: int) -> None:
        if self.takes(project_id, size):
            return
        line = self._lines.setdefault(project_id, deque())
        if len(line) >= _MOST_WAITING:
            raise UnavailableError("Too many requests of this project wait with large bodies.")
        turn = asyncio.get_running_loop().create_future()
        line.append((turn, size))
        try:
            async with asyncio.timeout(settings.BODY_TIMEOUT_S):
                await turn
        except BaseException as exc:
            if turn.done() and not turn.cancelled():
                self.give_back(project_id, size)
            else:
                self._leave(project_id, (turn, size))
            if isinstance(exc, TimeoutError):
                raise UnavailableError("Too many large requests are being received.") from None
            raise

    def _let_in(self, project_id: int | None) -> None:
        """Have those of a project go on, in their order, who have room now."""
        line = self._lines[project_id]
        while line and (line[0][0].done() or self.takes(project_id, line[0][1])):
            turn, _ = line.popleft()
            if not turn.done():
                turn.set_result(None)
        if not line:
            del self._lines[project_id]

    def _leave(self, project_id: int | None, waiting: tuple[asyncio.Future[None], int]) -> None:
        line = self._lines.get(project_id, deque())
        if waiting in line:
            line.remove(waiting)
            self._let_in(project_id)  # The next may want less.

    def _fits(self, project_id: int | None, size: int) -> bool:
        most, own = settings.MAX_BODIES_BYTES, self._held[project_id]
        return (own == 0 or own + size <= most // 4) and (
            self._held.total() == 0 or self._held.total() + size <= most
        )


body_room = BodyRoom()
"""That of this process."""


class MessageRoom:
    """What one WebSocket holds of the room: a message from its first byte until it is a request.

    It also counts the socket for its project. For the event loop's thread only.
    """

    def __init__(self) -> None:
        self.project_id: int | None = None
        self._held = 0
        self._has_ended = False

    def count_for(self, project_id: int) -> None:
        """Count the socket for this project, once, until its end.

        Raise RateLimitError if the project has too many.
        """
        if self.project_id is None and not self._has_ended:
            open_websocket(project_id)
            self.project_id = project_id

    def takes(self, size: int) -> bool:
        """Hold room for a part of a message; return whether there is."""
        fits = body_room.takes(self.project_id, size)
        self._held += size if fits else 0
        return fits

    def give_back(self, size: int) -> None:
        """Hold so much less; nothing more after the end."""
        size = min(size, self._held)
        self._held -= size
        if size:
            body_room.give_back(self.project_id, size)

    def end(self) -> None:
        """Hold nothing: the socket is closed."""
        self.give_back(self._held)
        if not self._has_ended and self.project_id is not None:
            close_websocket(self.project_id)
        self._has_ended = True


def bounded_forms(application: Application) -> Application:
    """Return the application of pages, which takes in no more of a body than a form needs.

    Django would take any body of anyone in before it looks at who sends it, and fail at a NUL,
    which PostgreSQL does not take, wherever a page uses it in a query.
    """

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        try:
            require_no_nul(scope)
            length_of_body(scope, _LARGEST_FORM)
            body = await read_body(receive, _LARGEST_FORM)
            _require_no_nul_in_form(scope, body)
        except ClientGone:
            return
        except ApiError as exc:
            await send_response(
                HttpResponse(exc.message, content_type="text/plain", status=exc.status), send
            )
            return
        messages = iter([{"type": "http.request", "body": body}])

        async def again() -> dict[str, Any]:
            return next(messages, None) or await receive()

        await application(scope, again, send)

    return app


def _require_no_nul_in_form(scope: dict[str, Any], body: bytes) -> None:
    content_type = dict(scope["headers"]).get(b"content-type", b"")
    if content_type.startswith(b"application/x-www-form-urlencoded") and (
        b"%00" in body or b"\0" in body
    ):
        raise InvalidRequestError("The form must not hold a NUL character.")


async def read_body(receive: Receive, most: int | None = None) -> bytes:
    """Return a request's body.

    Raise ClientGone, PayloadTooLargeError past the limit, which is ``MAX_BODY_BYTES`` unless given,
    and RequestTimeoutError when the body does not come within ``BODY_TIMEOUT_S``.
    """
    most = settings.MAX_BODY_BYTES if most is None else most
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                if size > most:
                    raise too_large(most)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise RequestTimeoutError from None
