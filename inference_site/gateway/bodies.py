"""Request bodies: how they are read, and how much memory they may take together."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import IO, Any

from django.conf import settings
from django.http import HttpResponse
from django.utils.http import parse_header_parameters

from inference_site.core.errors.api_errors import (
    ApiError,
    InvalidRequestError,
    RequestTimeoutError,
    UnavailableError,
)
from inference_site.core.storage.temporary_files import (
    new_temporary_file,
    temporary_file_errors,
)
from inference_site.gateway.access import Application
from inference_site.gateway.connections import close_websocket, open_websocket
from inference_site.gateway.delivery import ClientGone, Receive, Send, send_response
from inference_site.gateway.head import length_of_body, media_type, require_no_nul, too_large

SOCKET_MEMORY_KEY = "inference_site.message_room"
"""The key of a WebSocket's ``SocketMemory`` in its scope."""
_LARGEST_FORM = 1024 * 1024
_SPOOLED_AT_ONCE = 1024 * 1024
_MOST_WAITING = 1000
"""Bodies of one project that may wait for memory. Those of clients that left count for a while."""


class BodyMemory:
    """The room for bodies in this process: as many bytes as the setting named ``setting`` has.

    A project may use a quarter of it, or one body if that is larger. For the event loop's thread.
    """

    def __init__(self, setting: str) -> None:
        self._setting = setting
        self._used: Counter[int | None] = Counter()
        self._queues: dict[int | None, deque[tuple[asyncio.Future[None], int]]] = {}

    @asynccontextmanager
    async def reserved(self, project_id: int | None, size: int) -> AsyncIterator[None]:
        """Reserve memory for a body; wait for it up to ``BODY_TIMEOUT_S``, after the project's
        earlier bodies.

        Raise UnavailableError when there is none in time, or too many bodies of the project wait.
        """
        if not self.try_reserve(project_id, size):
            await self._wait(project_id, size)
        try:
            yield
        finally:
            self.give_back(project_id, size)

    def try_reserve(self, project_id: int | None, size: int) -> bool:
        """Reserve memory if there is some now; return whether there was."""
        most: int = getattr(settings, self._setting)
        own, total = self._used[project_id], self._used.total()
        fits = (own == 0 or own + size <= most // 4) and (total == 0 or total + size <= most)
        if fits:
            self._used[project_id] += size
        return fits

    def give_back(self, project_id: int | None, size: int) -> None:
        """Give reserved bytes back, to the bodies that wait."""
        self._used[project_id] -= size
        if not self._used[project_id]:
            del self._used[project_id]
        for waiting_id in list(self._queues):
            self._admit(waiting_id)
        if project_id in self._queues:  # The next time the other projects are served first.
            self._queues[project_id] = self._queues.pop(project_id)

    async def _wait(self, project_id: int | None, size: int) -> None:
        queue = self._queues.setdefault(project_id, deque())
        if len(queue) >= _MOST_WAITING:
            raise UnavailableError("Too many requests of this project wait with large bodies.")
        admitted = asyncio.get_running_loop().create_future()
        entry = (admitted, size)
        queue.append(entry)
        try:
            async with asyncio.timeout(settings.BODY_TIMEOUT_S):
                await admitted
        except BaseException as exc:
            if admitted.done() and not admitted.cancelled():
                self.give_back(project_id, size)
            elif entry in self._queues.get(project_id, ()):
                self._queues[project_id].remove(entry)
                self._admit(project_id)  # The next may need less.
            if isinstance(exc, TimeoutError):
                raise UnavailableError("Too many large requests are being received.") from None
            raise

    def _admit(self, project_id: int | None) -> None:
        """Admit the waiting bodies of a project, in order, as long as they fit."""
        queue = self._queues[project_id]
        while queue and (queue[0][0].done() or self.try_reserve(project_id, queue[0][1])):
            admitted, _ = queue.popleft()
            if not admitted.done():
                admitted.set_result(None)
        if not queue:
            del self._queues[project_id]


body_memory = BodyMemory("MAX_BODIES_BYTES")
"""The memory of this process for bodies."""
spool_room = BodyMemory("MAX_SPOOLED_BYTES")
"""The room for bodies that this process keeps in temporary files."""


class SocketMemory:
    """The memory of one WebSocket: each message, from its first byte until it is a request.

    It also counts the socket for its project. For the event loop's thread only.
    """

    def __init__(self) -> None:
        self.project_id: int | None = None
        self._used = 0
        self._has_ended = False

    def count_for(self, project_id: int) -> None:
        """Count the socket for this project until its end, once.

        Raise RateLimitError if the project has too many.
        """
        if self.project_id is None and not self._has_ended:
            open_websocket(project_id)
            self.project_id = project_id

    def try_reserve(self, size: int) -> bool:
        """Reserve memory for a part of a message; return whether there was some."""
        fits = body_memory.try_reserve(self.project_id, size)
        self._used += size if fits else 0
        return fits

    def give_back(self, size: int) -> None:
        """Give bytes back; no more than are reserved."""
        size = min(size, self._used)
        self._used -= size
        if size:
            body_memory.give_back(self.project_id, size)

    def end(self) -> None:
        """Give everything back: the socket is closed."""
        self.give_back(self._used)
        if not self._has_ended and self.project_id is not None:
            close_websocket(self.project_id)
        self._has_ended = True


def bounded_forms(application: Application) -> Application:
    """Return the application of pages, with requests bounded to what a form needs.

    Django would read a body of any size before it looks at who sends it. It would also fail where
    a page uses a NUL in a query, which PostgreSQL does not accept, and with other charsets.
    """

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        try:
            require_no_nul(scope)
            header = dict(scope["headers"]).get(b"content-type", b"").decode("latin-1")
            kind, parameters = media_type(header)
            length_of_body(scope, _LARGEST_FORM)
            body = await read_body(receive, _LARGEST_FORM)
            if body and parameters.get("charset", "utf-8").lower() != "utf-8":
                raise InvalidRequestError("The form must be in UTF-8.")
            is_form = kind.startswith("application/x-www-form-urlencoded")
            if is_form and (b"%00" in body or b"\0" in body):
                raise InvalidRequestError("The form must not hold a NUL character.")
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


async def read_body(receive: Receive, most: int | None = None) -> bytes:
    """Return a request's body of at most ``most`` bytes, ``MAX_BODY_BYTES`` unless given.

    Raise ClientGone, PayloadTooLargeError for a longer body, and RequestTimeoutError when it does
    not come within ``BODY_TIMEOUT_S``.
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


@dataclass(frozen=True, slots=True)
class SpooledBody:
    """A body in a temporary file, which is deleted when it is closed."""

    file: IO[bytes]
    size: int
    sha256: str

    def open(self) -> IO[bytes]:
        """Return the file, to be read from its beginning."""
        self.file.seek(0)
        return self.file


class FormDigest:
    """The SHA-256 of a form, whatever its boundary is: clients draw a new one for each try.

    It is the digest of the digests of the parts between the boundaries.
    """

    def __init__(self, boundary: str) -> None:
        self._delimiter = f"\r\n--{boundary}".encode()
        self._parts, self._part = hashlib.sha256(), hashlib.sha256()
        self._held = b"\r\n"  # The first delimiter is at the beginning of a line, too.

    def update(self, data: bytes) -> None:
        """Go on with the next bytes of the form."""
        *ended, held = (self._held + data).split(self._delimiter)
        for end in ended:
            self._part.update(end)
            self._parts.update(self._part.digest())
            self._part = hashlib.sha256()
        at = max(0, len(held) - len(self._delimiter) + 1)  # A delimiter may have begun.
        self._part.update(held[:at])
        self._held = held[at:]

    def hexdigest(self) -> str:
        """Return the digest of the form, which is at its end."""
        self._part.update(self._held)
        self._parts.update(self._part.digest())
        return self._parts.hexdigest()


def boundary_of(content_type: str) -> str:
    """Return the boundary of a form; empty for a body of another type."""
    return parse_header_parameters(content_type)[1].get("boundary", "")


async def spool_body(receive: Receive, most: int, boundary: str) -> SpooledBody:
    """Write a form of at most ``most`` bytes to a temporary file.

    Raise ClientGone, PayloadTooLargeError for a longer body, RequestTimeoutError when a MiB of it
    does not come within ``BODY_TIMEOUT_S``, and FileStorageError when it cannot be written.
    """
    digest, size, more = FormDigest(boundary), 0, True
    with temporary_file_errors():
        file = new_temporary_file()  # The caller closes it.
        try:
            while more:
                part, more = await _next_part(receive)
                size += len(part)
                if size > most:
                    raise too_large(most)
                await asyncio.to_thread(_write, file, part, digest)
        except BaseException:
            file.close()
            raise
    return SpooledBody(file, size, digest.hexdigest())


async def _next_part(receive: Receive) -> tuple[bytes, bool]:
    """Return about a MiB of a body, and whether more follows."""
    part = bytearray()
    try:
        async with asyncio.timeout(settings.BODY_TIMEOUT_S):
            while len(part) < _SPOOLED_AT_ONCE:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part += message.get("body", b"")
                if not message.get("more_body", False):
                    return bytes(part), False
    except TimeoutError:
        raise RequestTimeoutError from None
    return bytes(part), True


def _write(file: IO[bytes], part: bytes, digest: FormDigest) -> None:
    file.write(part)
    digest.update(part)
