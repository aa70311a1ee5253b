"""Runs the views of /v1 on a bounded pool of threads, without Django's ASGI handler.

Django's handler switches between the event loop and threads several times a request, starts a
thread for each, and runs middleware for sessions, cookies and pages. The API needs none of that:
here one call on a pooled thread goes from the resolved URL to the response.

No project runs more views than its share of the threads, so the requests of others wait behind a
few of its requests at most. Each wait has an end: a view waits for PostgreSQL and Redis no longer
than their timeouts, and a request waits for a thread no longer than ``QueueKey.longest_wait_s``.

Large bodies use one thread of their project: while they are decoded and checked, Python runs
nothing else for tens of milliseconds at a time. So that others get on, a project spends at most a
quarter of the time on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import IO, Any
from weakref import WeakValueDictionary

import orjson
from django.core import signals
from django.core.handlers.asgi import ASGIRequest
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import set_script_prefix, set_urlconf
from rest_framework.response import Response

from inference_site.accounts.keys import Caller
from inference_site.core.errors.api_errors import (
    ANTHROPIC_VERSION,
    ApiError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from inference_site.core.errors.exceptions import api_error, log_error
from inference_site.core.observability.logs import log_fields
from inference_site.core.observability.tracing import current_traceparent
from inference_site.gateway.access import SCOPE_KEY as access_key
from inference_site.gateway.access import Access, arrived_at, note_error
from inference_site.gateway.bodies import SpooledBody
from inference_site.gateway.head import SCOPE_KEY as head_key
from inference_site.gateway.head import Head

logger = logging.getLogger(__name__)

_MOST_WAITING = 1_000
"""Requests of one project that may wait for a thread. Another one is refused at once."""
_LONGEST_WAIT_S = 10.0
_LONGEST_LARGE_WAIT_S = 30.0
_REST = 3.0
"""After a large body its project rests for this many times the processor time that it took."""
_ALONE_S = 10.0
"""A project need not rest if no other project has sent a request for this long."""
_WELL_FORMED_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class QueueKey:
    """The queue that a request waits in: that of its project, for large bodies or for the others.

    Requests of unknown callers share the queues of ``project_id`` None.
    """

    project_id: int | None = None
    is_large: bool = False

    @property
    def longest_wait_s(self) -> float:
        """The longest time that its requests may wait for a thread."""
        return _LONGEST_LARGE_WAIT_S if self.is_large else _LONGEST_WAIT_S


ANONYMOUS = QueueKey()


class _ProjectQueue(asyncio.Semaphore):
    """Bounds the views of one ``QueueKey`` that run at once."""

    waiting = 0
    """Requests that wait: for their turn in the queue, or then for a thread."""


class ViewPool:
    """Runs views on a few threads. For the event loop's thread only.

    With ``is_shared`` a project has at most half of the threads.
    """

    def __init__(self, threads: int, *, is_shared: bool = True) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="view")
        self._threads = asyncio.Semaphore(threads)
        self._share = max(1, threads // 2) if is_shared else threads
        self._queues: WeakValueDictionary[QueueKey, _ProjectQueue] = WeakValueDictionary()
        self._latest_project: int | None = None
        self._changed_at = 0.0

    async def run(
        self,
        respond: Callable[[], HttpResponseBase],
        on_abandoned: Callable[[], object],
        key: QueueKey = ANONYMOUS,
    ) -> HttpResponseBase:
        """Return the view's response.

        Raise UnavailableError when too many requests of the queue wait, or when this one gets no
        thread in time. ``on_abandoned`` is called when a view returns whose client has left.
        """
        if key.project_id != self._latest_project:
            self._latest_project, self._changed_at = key.project_id, time.monotonic()
        self.require_room(key)
        queue = self._queues.setdefault(key, _ProjectQueue(1 if key.is_large else self._share))
        async with self._waiting(queue, key.longest_wait_s):
            await queue.acquire()
            try:
                await self._threads.acquire()
            except BaseException:
                queue.release()
                raise

        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        used_s = 0.0

        def timed() -> HttpResponseBase:
            nonlocal used_s
            before = time.thread_time()
            try:
                return respond()
            finally:
                used_s = time.thread_time() - before

        def end() -> None:
            self._threads.release()
            is_alone = time.monotonic() - self._changed_at > _ALONE_S
            if key.is_large and not is_alone:
                loop.call_later(used_s * _REST, queue.release)
            else:
                queue.release()
            if not ended.done():
                ended.set_result(None)

        def on_end(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # The loop has ended meanwhile.
                loop.call_soon_threadsafe(end)  # Once: it wakes the loop each time.

        job = self._executor.submit(timed)
        job.add_done_callback(on_end)
        try:
            await ended
        except asyncio.CancelledError:
            if not job.cancel():
                job.add_done_callback(lambda _: on_abandoned())
            raise
        return job.result()

    def require_room(self, key: QueueKey) -> None:
        """Raise UnavailableError if ``run`` would refuse a request of this queue at once."""
        queue = self._queues.get(key)
        if (0 if queue is None else queue.waiting) >= _MOST_WAITING:
            raise UnavailableError

    @asynccontextmanager
    async def _waiting(self, queue: _ProjectQueue, longest_s: float) -> AsyncIterator[None]:
        """Count a request that waits in the block; raise UnavailableError when that takes long."""
        queue.waiting += 1
        try:
            async with asyncio.timeout(longest_s):
                yield
        except TimeoutError:
            raise UnavailableError from None
        finally:
            queue.waiting -= 1


class ApiHandler:
    """Calls the view of a request. Every failure becomes the API's error envelope."""

    def respond(self, scope: dict[str, Any], body: bytes | SpooledBody) -> HttpResponseBase:
        """Answer one request. Never raises."""
        started = time.monotonic()
        signals.request_started.send(sender=type(self), scope=scope)
        # The body may have come in chunks, without a length. Routes have no trailing slash.
        headers = [(key, value) for key, value in scope["headers"] if key != b"content-length"]
        stream: IO[bytes]
        if isinstance(body, SpooledBody):
            size, stream = body.size, body.open()
        else:
            size, stream = len(body), io.BytesIO(body)
        headers.append((b"content-length", str(size).encode()))
        view_scope = {**scope, "path": scope["path"].rstrip("/"), "headers": headers}
        try:
            request = ASGIRequest(view_scope, stream)
        except UnicodeDecodeError:
            error = InvalidRequestError("The query of the URL is not UTF-8.")
            return self.refuse(scope, error, started)
        request_id = _request_id(request.META.get("HTTP_X_REQUEST_ID", ""))
        if isinstance(body, SpooledBody):
            request.body_sha256 = body.sha256  # type: ignore[attr-defined]  # As the next.
        request.request_id = request_id  # type: ignore[attr-defined]  # Read by views and logs.
        with _with_facts(scope, request, request_id):
            response = _with_common_headers(self._answer(request), request_id, started)
            if not response.streaming:  # Else the relay does, when it was sent.
                response.close()  # Sends request_finished, which gives the connection back.
        return response

    def refuse(self, scope: dict[str, Any], error: ApiError, started: float) -> HttpResponseBase:
        """Answer a request that reaches no view; ``started`` is a time of the monotonic clock."""
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = _request_id(given)
        if access := scope.get(access_key):
            access.facts |= {"request_id": request_id, "error_code": error.code or error.type}
            access.error = error
        return _with_common_headers(_refusal(error, scope), request_id, started)

    def check(self, scope: dict[str, Any], check: Callable[[], object]) -> HttpResponseBase:
        """Run a check; return an empty 204, or the error that it raised. Never raises."""
        started = time.monotonic()
        try:
            check()
        except Exception as exc:  # noqa: BLE001  # The boundary: it is logged and answered.
            error = api_error(exc)
            log_error("the check of a request's head failed", exc, error)
            return self.refuse(scope, error, started)
        return HttpResponse(status=204)

    @staticmethod
    def _answer(request: HttpRequest) -> HttpResponseBase:
        set_script_prefix("/")
        set_urlconf(None)
        try:
            head: Head = request.scope[head_key]  # type: ignore[attr-defined]  # Of an ASGIRequest.
            match = request.resolver_match = head.route
            if match is None:
                raise Http404
            response: HttpResponseBase = match.func(request, *match.args, **match.kwargs)
            if isinstance(response, Response):  # DRF leaves the rendering to its caller.
                response.render()
                # The context refers back to the response: see ``ApiView.dispatch``.
                response.renderer_context.clear()  # type: ignore[attr-defined]  # Not in the stubs.
            return response
        except Http404:
            unknown = NotFoundError(f"Invalid URL ({request.method} {request.path})")
            note_error(request, unknown)
            return _refusal(unknown, request.scope)  # type: ignore[attr-defined]  # As above.
        except Exception as exc:  # noqa: BLE001  # The boundary: it is logged and answered.
            error = api_error(exc)
            log_error(f"request {getattr(request, 'request_id', '-')}", exc, error)
            note_error(request, error)
            return _refusal(error, request.scope)  # type: ignore[attr-defined]  # As above.


@contextmanager
def _with_facts(scope: dict[str, Any], request: HttpRequest, request_id: str) -> Iterator[None]:
    """Set the facts of the log and the current trace while the view runs; then add its facts."""
    access: Access | None = scope.get(access_key)
    facts = {} if access is None else access.facts
    if access is not None:
        access.error = None
    facts.pop("error_code", None)  # Of an earlier call of the view, before it waited.
    facts["request_id"] = request_id
    token = current_traceparent.set("" if access is None else access.span.traceparent)
    arrival = arrived_at.set(None if access is None else access.arrived_at)
    try:
        with log_fields(facts):
            yield
    finally:
        current_traceparent.reset(token)
        arrived_at.reset(arrival)
    if request.resolver_match is not None:
        facts["route"] = request.resolver_match.route
    caller = getattr(request, "user", None)
    if isinstance(caller, Caller):
        facts |= {"project": caller.project_id, "api_key": caller.api_key_id}
        scope[head_key].note_user(caller)


def _refusal(error: ApiError, scope: dict[str, Any]) -> HttpResponse:
    """Return the response for an error, in the form that clients of this path expect."""
    has_version = ANTHROPIC_VERSION.encode() in dict(scope["headers"])
    body = orjson.dumps(error.shown_at(scope["path"], has_version=has_version))
    return HttpResponse(
        body, status=error.status, content_type="application/json", headers=error.headers
    )


def _with_common_headers(
    response: HttpResponseBase, request_id: str, started: float
) -> HttpResponseBase:
    response["x-request-id"] = response["request-id"] = request_id  # The second is Anthropic's.
    response["openai-processing-ms"] = str(round((time.monotonic() - started) * 1000))
    response["openai-version"] = "2020-10-01"
    return response


def _request_id(given: str) -> str:
    """Return the client's id if it is well formed, else a new one."""
    return given if _WELL_FORMED_ID.fullmatch(given) else f"req_{secrets.token_hex(16)}"
