"""Whether views that take long compute, or hang: seen by the processor time of their threads.

Who gets the next thread for a view: no project more than its share, and each in its turn.

Nobody waits long for a thread: who would is refused at once, by how fast threads were given lately,
and who does all the same is refused then. A client that is told so soon can come back.

Views on pooled threads: shared out among projects, and refused when they would only pile up.

A database that is frozen, not closed, answers nothing: the views that asked it hang. One that is
down costs each view its time-out. Either way more requests come in than go out, so they are refused
at once, and what was refused is not run later. A view that computes for long is no such failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import orjson
from django.conf import settings
from django.http.response import HttpResponseBase

from inference_site.errors.api_errors import UnavailableError
from inference_site.errors.exceptions import STORAGE_CODES

_SAMPLE_S = 0.2
_IDLE = 0.1
"""A thread that uses less than this part of a processor waits for something."""
_clock_of = getattr(time, "pthread_getcpuclockid", None)  # macOS has none: all views hang there.


@dataclass(slots=True)
class _View:
    """A view on its thread: how much processor time that has used, and since when it is idle."""

    thread: int
    looked_at: float
    used_s: float
    idle_since: float


class ViewActivity:
    """The views that run. ``noted`` is for their threads."""

    def __init__(self) -> None:
        self._views: dict[int, _View] = {}
        self._looked_at = 0.0

    @contextmanager
    def noted(self) -> Iterator[float]:
        """Note that a view runs on this thread; yield the time of its start."""
        thread, started = threading.get_ident(), time.monotonic()
        self._views[thread] = _View(thread, started, _used_s(thread), started)
        try:
            yield started
        finally:
            del self._views[thread]

    def hangs(self, now: float, idle_s: float) -> bool:
        """Return whether a view has run for so long and used no processor all the while."""
        return self.hanging(now, idle_s) > 0

    def hanging(self, now: float, idle_s: float) -> int:
        """Return how many views have run for this long without using the processor."""
        views = list(self._views.values())
        if now - self._looked_at > _SAMPLE_S:
            self._looked_at = now
            for view in views:
                _look(view, now)
        return sum(now - view.idle_since >= idle_s for view in views)


def _look(view: _View, now: float) -> None:
    used_s = _used_s(view.thread)
    if used_s - view.used_s > _IDLE * (now - view.looked_at):
        view.idle_since = now
    view.looked_at, view.used_s = now, used_s


def _used_s(thread: int) -> float:
    return 0.0 if _clock_of is None else time.clock_gettime(_clock_of(thread))


_MOST_WAITING = 2_000
_LONGEST_S = 10.0
_LONGEST_LARGE_S = 30.0
_LATEST = 0.05
"""The part that the latest time between two threads has in their mean, which is known after as
many times as this is a part of."""
_AT_FIRST = 500
"""How many of one project may wait until it is known."""
_REST = 3.0
"""After a large body its project rests so many times the processor time that it took."""
_ALONE_S = 10.0
"""A project after which no other has come for so long need not rest."""


@dataclass(frozen=True, slots=True)
class Share:
    """Whose view it is: a project's, or of nobody who is known.

    Large bodies are for one thread of their project: while they are decoded and checked, Python
    runs nothing else for tens of milliseconds at a time. So that others get on, a project spends
    at most a quarter of the time on them.
    """

    project_id: int | None = None
    is_large: bool = False

    @property
    def longest_s(self) -> float:
        """How long it may wait for a thread."""
        return _LONGEST_LARGE_S if self.is_large else _LONGEST_S


NOBODY = Share()


@dataclass(frozen=True, slots=True)
class _Turn:
    """A request that waits; ``given`` is done when it has a thread, or is refused."""

    given: asyncio.Future[None]
    since: float


@dataclass(slots=True)
class _Pace:
    """How fast threads are given while requests wait: the mean time between two, of the latest."""

    mean_s: float = 0.0
    times: int = 0
    gave_at: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.times >= 1 / _LATEST

    def note(self, now: float) -> None:
        """Note that one is given."""
        if self.gave_at:
            self.times += 1
            latest = max(_LATEST, 1 / self.times)  # Of the first few it is their plain mean.
            self.mean_s += latest * (now - self.gave_at - self.mean_s)
        self.gave_at = now


class ThreadShares:
    """The threads that are free, and who waits for one. For the event loop's thread only."""

    def __init__(self, threads: int, most: int) -> None:
        self._free, self._threads, self._most = threads, threads, most
        self._added = 0
        self._taken: Counter[Share] = Counter()
        self._lines: dict[Share, deque[_Turn]] = {}
        self._waiting = 0
        self._paces = {is_large: _Pace() for is_large in (False, True)}
        self._latest_project: int | None = None
        self._changed_at = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no view runs, and none waits."""
        return self._free == self._threads + self._added and not self._waiting

    def add(self, threads: int) -> None:
        """Set the number of extra threads, beyond those of the start."""
        self._free += threads - self._added
        self._added = threads
        self._give()

    def take(self, share: Share) -> asyncio.Future[None] | None:
        """Take a thread, or return what is done when one is given. Raise UnavailableError."""
        if share.project_id != self._latest_project:
            self._latest_project, self._changed_at = share.project_id, time.monotonic()
        if share not in self._lines and self._may_take(share):
            self._note(share, 1)
            return None
        self.require_room(share)
        turn = _Turn(asyncio.get_running_loop().create_future(), time.monotonic())
        self._lines.setdefault(share, deque()).append(turn)
        self._waiting += 1
        return turn.given

    def require_room(self, share: Share) -> None:
        """Raise UnavailableError if the line of this share is as long as it may be."""
        length, pace = len(self._lines.get(share, ())), self._paces[share.is_large]
        lines = sum(other.is_large == share.is_large for other in self._lines)
        # Who has no more than a fair part of the line is let in even when it is full.
        is_full = self._waiting >= _MOST_WAITING and length * len(self._lines) >= self._waiting
        late_s = length * lines * pace.mean_s
        if is_full or (late_s > share.longest_s if pace.is_known else length >= _AT_FIRST):
            raise UnavailableError

    def give_back(self, share: Share, used_s: float = 0.0) -> None:
        """Give a thread back, which goes to who has the fewest.

        ``used_s`` is the processor time that its view has used. A share that rests after it counts
        as if it still had the thread.
        """
        is_alone = time.monotonic() - self._changed_at > _ALONE_S
        if share.is_large and used_s and not is_alone:
            self._free += 1
            asyncio.get_running_loop().call_later(used_s * _REST, self._end_rest, share)
        else:
            self._note(share, -1)
        self._give()

    def _end_rest(self, share: Share) -> None:
        self._free -= 1
        self._note(share, -1)
        self._give()

    def forgo(self, share: Share, given: asyncio.Future[None]) -> None:
        """Leave the line; give back what was given meanwhile."""
        if given.cancelled() or not given.done():
            found = next((turn for turn in self._lines.get(share, ()) if turn.given is given), None)
            if found is not None:
                self._leave(share, found)
        elif given.exception() is None:
            self.give_back(share)

    def refuse_late(self, now: float) -> None:
        """Refuse who has waited as long as anybody may."""
        for share in list(self._lines):
            self._refuse(share, now - share.longest_s, UnavailableError())

    def refuse_since(self, before: float, error: UnavailableError) -> None:
        """Refuse who has come before this time."""
        for share in list(self._lines):
            self._refuse(share, before, error)

    def _refuse(self, share: Share, before: float, error: UnavailableError) -> None:
        while (line := self._lines.get(share)) and line[0].since <= before:
            turn = line[0]
            self._leave(share, turn)
            if not turn.given.done():
                turn.given.set_exception(error)

    def _give(self) -> None:
        while waiting := [share for share in self._lines if self._may_take(share)]:
            share = min(waiting, key=self._taken.__getitem__)
            turn = self._lines[share][0]
            self._leave(share, turn)
            if self._lines.get(share):  # Behind the others that have as few.
                self._lines[share] = self._lines.pop(share)
            if not turn.given.done():
                self._note(share, 1)
                self._note_pace(share)
                turn.given.set_result(None)

    def _note_pace(self, share: Share) -> None:
        self._paces[share.is_large].note(time.monotonic())
        if not any(other.is_large == share.is_large for other in self._lines):
            # How it goes under the next load is not known.
            self._paces[share.is_large] = _Pace()

    def _may_take(self, share: Share) -> bool:
        return self._free > 0 and self._taken[share] < (1 if share.is_large else self._most)

    def _note(self, share: Share, threads: int) -> None:
        self._free -= threads
        self._taken[share] += threads
        if not self._taken[share]:
            del self._taken[share]

    def _leave(self, share: Share, turn: _Turn) -> None:
        self._lines[share].remove(turn)
        self._waiting -= 1
        if not self._lines[share]:
            del self._lines[share]


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
