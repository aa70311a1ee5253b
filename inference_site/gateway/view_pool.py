"""Views on pooled threads: shared out among projects, and refused when they would only pile up.

A database that is frozen, not closed, answers nothing: the views that asked it hang. One that is
down costs each view its time-out. Either way more requests come in than go out, so they are refused
at once, and what was refused is not run later. A view that computes for long is no such failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import orjson
from django.conf import settings
from django.http.response import HttpResponseBase

from inference_site.errors.api_errors import UnavailableError
from inference_site.errors.exceptions import STORAGE_CODES
from inference_site.gateway.thread_shares import NOBODY, Share, ThreadShares
from inference_site.gateway.view_activity import ViewActivity

_FAILED_SLOWLY_S = 1.0
_REFUSE_S = 1.0
"""For how long requests are refused after a view failed slowly, for want of storage."""
_LOOK_S = 0.5
_HANGS_S = 1.0
"""Seconds after which the thread of a waiting view, for example at a lock, is replaced."""


class ViewPool:
    """Runs ``respond`` on one of a few threads; a project has at most half of them.

    Threads of views that hang are replaced, up to as many: two projects whose views wait for what
    is locked would else have all of them.
    """

    def __init__(self, threads: int, *, is_shared: bool = True) -> None:
        self._spares = threads if is_shared else 0
        self._pool = ThreadPoolExecutor(threads + self._spares, thread_name_prefix="view")
        self._shares = ThreadShares(threads, max(1, threads // 2) if is_shared else threads)
        self._activity = ViewActivity()
        self._progress_at = 0.0
        self._refuse_until = 0.0
        self._watch: asyncio.TimerHandle | None = None

    async def run(
        self,
        respond: Callable[[], HttpResponseBase],
        on_abandoned: Callable[[], object],
        share: Share = NOBODY,
    ) -> HttpResponseBase:
        """Return the view's response.

        Raise UnavailableError when too many wait, or for too long (see ``thread_shares``), when a
        view has just failed slowly for want of storage and none has come back meanwhile, or when
        none has for ``WEB_STALL_S`` and some hang. ``on_abandoned`` runs when a view that was given
        up, or whose client left, ends after all.
        """
        now = time.monotonic()
        if now < self._refuse_until:
            raise UnavailableError
        if self._watch is None:
            self._look_later()
        await self._thread_for(share)
        job, ended = self._start(respond, share)
        try:
            await self._wait(ended, now)
            return job.result()
        except (asyncio.CancelledError, UnavailableError):
            if not job.cancel():
                job.add_done_callback(lambda _: on_abandoned())
            raise

    def require_room(self, share: Share) -> None:
        """Raise UnavailableError if ``run`` would refuse one of this share at once."""
        self._shares.require_room(share)

    async def _thread_for(self, share: Share) -> None:
        turn = self._shares.take(share)
        if turn is None:
            return
        try:
            await turn
        except BaseException:
            self._shares.forgo(share, turn)
            raise

    def _start(
        self, respond: Callable[[], HttpResponseBase], share: Share
    ) -> tuple[Future[HttpResponseBase], asyncio.Future[None]]:
        """Return the view's job, and a future of the loop that is done when that has ended."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        used_s = 0.0

        def timed() -> HttpResponseBase:
            nonlocal used_s
            before = time.thread_time()
            try:
                return self._timed(respond)
            finally:
                used_s = time.thread_time() - before

        def end() -> None:
            self._shares.give_back(share, used_s)
            if not ended.done():
                ended.set_result(None)

        def on_end(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # The loop has ended meanwhile.
                loop.call_soon_threadsafe(end)  # Once: it wakes the loop each time.

        job = self._pool.submit(timed)
        job.add_done_callback(on_end)
        return job, ended

    async def _wait(self, future: asyncio.Future[None], began_at: float) -> None:
        while True:
            done, _ = await asyncio.wait({future}, timeout=_LOOK_S)
            if done:
                return
            if began_at <= self._stalled_since(time.monotonic()):
                raise _no_storage()

    def _stalled_since(self, now: float) -> float:
        """Return the time such that who has come before it waits in vain; 0 while all is well."""
        before: float = now - settings.WEB_STALL_S
        hangs = self._activity.hangs(now, settings.WEB_STALL_S - _LOOK_S / 2)
        return before if hangs and self._progress_at <= before else 0.0

    def _look_later(self) -> None:
        self._watch = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        """Look after those that wait for a thread: one look for all, they may be thousands."""
        now = time.monotonic()
        self._shares.add(min(self._spares, self._activity.hanging(now, _HANGS_S)))
        if now < self._refuse_until:
            self._shares.refuse_since(now, _no_storage())
        elif before := self._stalled_since(now):
            self._shares.refuse_since(before, _no_storage())
        self._shares.refuse_late(now)
        self._watch = None
        if not self._shares.is_idle:
            self._look_later()

    def _timed(self, respond: Callable[[], HttpResponseBase]) -> HttpResponseBase:
        with self._activity.noted() as started:
            response = respond()
        now = time.monotonic()
        if now - started > _FAILED_SLOWLY_S and _is_storage_failure(response):
            # Where others got on meanwhile, only what this view wanted is locked or out of reach.
            if self._progress_at <= started:
                self._refuse_until = now + _REFUSE_S
        else:
            self._progress_at = now
        return response


def _no_storage() -> UnavailableError:
    return UnavailableError("The server's storage does not respond.")


def _is_storage_failure(response: HttpResponseBase) -> bool:
    if response.status_code != 503 or response.streaming:
        return False
    try:
        error = orjson.loads(response.content)["error"]  # type: ignore[attr-defined]  # Set on HttpResponse.
    except (ValueError, LookupError, TypeError):
        return False
    return isinstance(error, dict) and error.get("code") in STORAGE_CODES
