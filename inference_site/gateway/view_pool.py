"""Views on pooled threads, and the refusal of requests that would only pile up.

A database that is frozen, not closed, answers nothing: the views that asked it hang. One that is
down costs each view its time-out. Either way more requests come in than go out, so they are refused
at once, and what was refused is not run later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from django.conf import settings
from django.http.response import HttpResponseBase

from inference_site.errors.api_errors import UnavailableError

_MOST_WAITING = 2_000
_FAILED_SLOWLY_S = 1.0
_REFUSE_S = 1.0
"""For how long requests are refused after a view failed slowly."""
_LOOK_S = 0.5


class ViewPool:
    """Runs ``respond`` on one of a few threads."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="view")
        self._waiting = 0
        self._progress_at = 0.0
        self._refuse_until = 0.0

    async def run(
        self, respond: Callable[[], HttpResponseBase], on_abandoned: Callable[[], object]
    ) -> HttpResponseBase:
        """Return the view's response.

        Raise UnavailableError when too many wait, when a view has just failed slowly, or when none
        has come back for ``WEB_STALL_S``. ``on_abandoned`` runs when a view that was given up, or
        whose client left, ends after all.
        """
        now = time.monotonic()
        if self._waiting >= _MOST_WAITING or now < self._refuse_until:
            raise UnavailableError
        self._waiting += 1
        job = self._pool.submit(self._timed, respond)
        try:
            return await self._wait(job, now)
        except (asyncio.CancelledError, UnavailableError):
            if not job.cancel():
                job.add_done_callback(lambda _: on_abandoned())
            raise
        finally:
            self._waiting -= 1

    async def _wait(self, job: Future[HttpResponseBase], submitted_at: float) -> HttpResponseBase:
        future = asyncio.wrap_future(job)
        while True:
            done, _ = await asyncio.wait({future}, timeout=_LOOK_S)
            if done:
                return future.result()
            now = time.monotonic()
            stalled = now - max(submitted_at, self._progress_at) >= settings.WEB_STALL_S
            if stalled or (now < self._refuse_until and not job.running()):
                raise UnavailableError("The server's storage does not respond.")

    def _timed(self, respond: Callable[[], HttpResponseBase]) -> HttpResponseBase:
        started = time.monotonic()
        response = respond()
        now = time.monotonic()
        if response.status_code == 503 and now - started > _FAILED_SLOWLY_S:
            self._refuse_until = now + _REFUSE_S
        else:
            self._progress_at = now
        return response
