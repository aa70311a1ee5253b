"""The threads on which views run: shared fairly among projects, and never with a long queue.

A database that is frozen answers nothing, so the views that ask it hang; one that is down costs
each view its timeout. Either way requests come faster than they are answered. So requests that
would wait for long are refused at once, and what was refused does not run later: a client that
gets its 503 early can come back. A view that computes for a long time counts as no such failure.

No project gets more than its part of the threads. Large bodies use one thread of their project:
while they are decoded and checked, Python runs nothing else for tens of milliseconds at a time. So
that others get on, a project spends at most a quarter of the time on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import orjson
from django.conf import settings
from django.http.response import HttpResponseBase

from inference_site.core.errors.api_errors import UnavailableError
from inference_site.core.errors.exceptions import STORAGE_CODES

_MOST_WAITING = 2_000
_LONGEST_WAIT_S = 10.0
_LONGEST_LARGE_WAIT_S = 30.0
_NEWEST_WEIGHT = 0.05
"""Weight of the newest sample in the moving average of the time between two grants of a thread.
The average counts as known after 1/weight samples."""
_MOST_AT_FIRST = 500
"""How many requests of one project may wait while the average is not known."""
_REST = 3.0
"""After a large body its project rests for this many times the processor time that it took."""
_ALONE_S = 10.0
"""A project need not rest if no other project has sent a request for this long."""

_SAMPLE_S = 0.2
_IDLE_LOAD = 0.1
"""A thread that uses less than this part of a processor waits for something."""
_clock_of = getattr(time, "pthread_getcpuclockid", None)
"""macOS has none: there every view that runs counts as hanging."""

_CHECK_S = 0.5
_REPLACE_S = 1.0
"""A thread is replaced while its view waits for longer than this, for example for a lock."""
_FAILED_SLOWLY_S = 1.0
_REFUSE_S = 1.0
"""How long requests are refused after a view failed slowly for want of storage."""


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


@dataclass(frozen=True, slots=True)
class _Waiter:
    """A request that waits; ``granted`` is done when it has a thread or is refused."""

    granted: asyncio.Future[None]
    since: float


@dataclass(slots=True)
class _GrantInterval:
    """Moving average of the time between two grants of a thread, while requests wait."""

    mean_s: float = 0.0
    samples: int = 0
    granted_at: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.samples >= 1 / _NEWEST_WEIGHT

    def note(self, now: float) -> None:
        """Add the time since the last grant."""
        if self.granted_at:
            self.samples += 1
            weight = max(_NEWEST_WEIGHT, 1 / self.samples)  # The first few have equal weights.
            self.mean_s += weight * (now - self.granted_at - self.mean_s)
        self.granted_at = now


class ThreadQueues:
    """The free threads, and the queues for them. For the event loop's thread only.

    ``most`` is the number of threads that one project may have at a time.
    """

    def __init__(self, threads: int, most: int) -> None:
        self._free, self._threads, self._most = threads, threads, most
        self._added = 0
        self._taken: Counter[QueueKey] = Counter()
        self._queues: dict[QueueKey, deque[_Waiter]] = {}
        self._waiting = 0
        self._intervals = {is_large: _GrantInterval() for is_large in (False, True)}
        self._latest_project: int | None = None
        self._changed_at = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no view runs and no request waits."""
        return self._free == self._threads + self._added and not self._waiting

    def set_added(self, threads: int) -> None:
        """Set the number of threads beyond those of the start."""
        self._free += threads - self._added
        self._added = threads
        self._grant()

    def take(self, key: QueueKey) -> asyncio.Future[None] | None:
        """Take a thread, or return a future that is done when one is granted.

        Raise UnavailableError if the queue is full; so does the future.
        """
        if key.project_id != self._latest_project:
            self._latest_project, self._changed_at = key.project_id, time.monotonic()
        if key not in self._queues and self._may_take(key):
            self._use(key, 1)
            return None
        self.require_room(key)
        waiter = _Waiter(asyncio.get_running_loop().create_future(), time.monotonic())
        self._queues.setdefault(key, deque()).append(waiter)
        self._waiting += 1
        return waiter.granted

    def require_room(self, key: QueueKey) -> None:
        """Raise UnavailableError if one more request of this queue would wait for too long."""
        length, interval = len(self._queues.get(key, ())), self._intervals[key.is_large]
        queues = sum(other.is_large == key.is_large for other in self._queues)
        # A queue with no more than its fair part of all waiters is never refused for their number.
        is_full = self._waiting >= _MOST_WAITING and length * len(self._queues) >= self._waiting
        wait_s = length * queues * interval.mean_s
        if is_full or (
            wait_s > key.longest_wait_s if interval.is_known else length >= _MOST_AT_FIRST
        ):
            raise UnavailableError

    def give_back(self, key: QueueKey, used_s: float = 0.0) -> None:
        """Give a thread back; it is granted to the queue that has the fewest.

        ``used_s`` is the processor time that the view has used. While a queue rests after it, it
        counts as if it still had the thread.
        """
        is_alone = time.monotonic() - self._changed_at > _ALONE_S
        if key.is_large and used_s and not is_alone:
            self._free += 1
            asyncio.get_running_loop().call_later(used_s * _REST, self._end_rest, key)
        else:
            self._use(key, -1)
        self._grant()

    def _end_rest(self, key: QueueKey) -> None:
        self._free -= 1
        self._use(key, -1)
        self._grant()

    def withdraw(self, key: QueueKey, granted: asyncio.Future[None]) -> None:
        """Leave the queue; give the thread back if it was granted meanwhile."""
        if granted.cancelled() or not granted.done():
            found = next((w for w in self._queues.get(key, ()) if w.granted is granted), None)
            if found is not None:
                self._leave(key, found)
        elif granted.exception() is None:
            self.give_back(key)

    def refuse_late(self, now: float) -> None:
        """Refuse the requests that have waited for as long as they may."""
        for key in list(self._queues):
            self._refuse(key, now - key.longest_wait_s, UnavailableError())

    def refuse_since(self, before: float, error: UnavailableError) -> None:
        """Refuse the requests that came before this time."""
        for key in list(self._queues):
            self._refuse(key, before, error)

    def _refuse(self, key: QueueKey, before: float, error: UnavailableError) -> None:
        while (queue := self._queues.get(key)) and queue[0].since <= before:
            waiter = queue[0]
            self._leave(key, waiter)
            if not waiter.granted.done():
                waiter.granted.set_exception(error)

    def _grant(self) -> None:
        """Grant the free threads, each to the queue that has the fewest."""
        while waiting := [key for key in self._queues if self._may_take(key)]:
            key = min(waiting, key=self._taken.__getitem__)
            waiter = self._queues[key][0]
            self._leave(key, waiter)
            if key in self._queues:  # Behind the others that have as few.
                self._queues[key] = self._queues.pop(key)
            if waiter.granted.done():
                continue
            self._use(key, 1)
            self._intervals[key.is_large].note(time.monotonic())
            if not any(other.is_large == key.is_large for other in self._queues):
                # The speed under the next load is not known.
                self._intervals[key.is_large] = _GrantInterval()
            waiter.granted.set_result(None)

    def _may_take(self, key: QueueKey) -> bool:
        return self._free > 0 and self._taken[key] < (1 if key.is_large else self._most)

    def _use(self, key: QueueKey, threads: int) -> None:
        self._free -= threads
        self._taken[key] += threads
        if not self._taken[key]:
            del self._taken[key]

    def _leave(self, key: QueueKey, waiter: _Waiter) -> None:
        self._queues[key].remove(waiter)
        self._waiting -= 1
        if not self._queues[key]:
            del self._queues[key]


@dataclass(slots=True)
class _RunningView:
    """A view on its thread: the processor time it has used, and since when it uses none."""

    thread: int
    sampled_at: float
    used_s: float
    idle_since: float


class _RunningViews:
    """Tells views that compute from views that hang, by the processor time of their threads."""

    def __init__(self) -> None:
        self._views: dict[int, _RunningView] = {}
        self._sampled_at = 0.0

    @contextlib.contextmanager
    def tracked(self) -> Iterator[float]:
        """Track the view that runs on this thread; yield its start (monotonic clock)."""
        thread, started = threading.get_ident(), time.monotonic()
        self._views[thread] = _RunningView(thread, started, _used_s(thread), started)
        try:
            yield started
        finally:
            del self._views[thread]

    def hanging(self, now: float, idle_s: float) -> int:
        """Return how many views have used no processor for this long."""
        views = list(self._views.values())
        if now - self._sampled_at > _SAMPLE_S:
            self._sampled_at = now
            for view in views:
                used_s = _used_s(view.thread)
                if used_s - view.used_s > _IDLE_LOAD * (now - view.sampled_at):
                    view.idle_since = now
                view.sampled_at, view.used_s = now, used_s
        return sum(now - view.idle_since >= idle_s for view in views)


def _used_s(thread: int) -> float:
    return 0.0 if _clock_of is None else time.clock_gettime(_clock_of(thread))


class ViewPool:
    """Runs views on a few threads; with ``is_shared`` a project has at most half of them.

    A shared pool replaces the threads of views that hang, up to doubling them: else two projects
    whose views wait for a lock would have all threads.
    """

    def __init__(self, threads: int, *, is_shared: bool = True) -> None:
        self._spares = threads if is_shared else 0
        self._pool = ThreadPoolExecutor(threads + self._spares, thread_name_prefix="view")
        self._queues = ThreadQueues(threads, max(1, threads // 2) if is_shared else threads)
        self._running = _RunningViews()
        self._progress_at = 0.0
        self._refuse_until = 0.0
        self._next_check: asyncio.TimerHandle | None = None

    async def run(
        self,
        respond: Callable[[], HttpResponseBase],
        on_abandoned: Callable[[], object],
        key: QueueKey = ANONYMOUS,
    ) -> HttpResponseBase:
        """Return the view's response.

        Raise UnavailableError when the queue is too long (see ``ThreadQueues``); when a view has
        just failed slowly for want of storage and none has returned meanwhile; or when none has
        returned for ``WEB_STALL_S`` and some hang. ``on_abandoned`` is called when a view returns
        that was given up, or whose client has left.
        """
        now = time.monotonic()
        if now < self._refuse_until:
            raise UnavailableError
        if self._next_check is None:
            self._schedule_check()
        granted = self._queues.take(key)
        if granted is not None:
            try:
                await granted
            except BaseException:
                self._queues.withdraw(key, granted)
                raise

        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        used_s = 0.0

        def timed() -> HttpResponseBase:
            nonlocal used_s
            before = time.thread_time()
            try:
                return self._observed(respond)
            finally:
                used_s = time.thread_time() - before

        def end() -> None:
            self._queues.give_back(key, used_s)
            if not ended.done():
                ended.set_result(None)

        def on_end(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # The loop has ended meanwhile.
                loop.call_soon_threadsafe(end)  # Once: it wakes the loop each time.

        job = self._pool.submit(timed)
        job.add_done_callback(on_end)
        try:
            while not (await asyncio.wait({ended}, timeout=_CHECK_S))[0]:
                if now <= self._stalled_since(time.monotonic()):
                    raise _storage_stalled()
            return job.result()
        except (asyncio.CancelledError, UnavailableError):
            if not job.cancel():
                job.add_done_callback(lambda _: on_abandoned())
            raise

    def require_room(self, key: QueueKey) -> None:
        """Raise UnavailableError if ``run`` would refuse a request of this queue at once."""
        self._queues.require_room(key)

    def _observed(self, respond: Callable[[], HttpResponseBase]) -> HttpResponseBase:
        """Run a view; note whether it made progress or failed slowly for want of storage."""
        with self._running.tracked() as started:
            response = respond()
        now = time.monotonic()
        if now - started > _FAILED_SLOWLY_S and _is_storage_failure(response):
            # If other views returned meanwhile, only what this one wanted is locked or away.
            if self._progress_at <= started:
                self._refuse_until = now + _REFUSE_S
        else:
            self._progress_at = now
        return response

    def _stalled_since(self, now: float) -> float:
        """Return the time before which requests came that wait in vain; 0 if none do."""
        before: float = now - settings.WEB_STALL_S
        hanging = self._running.hanging(now, settings.WEB_STALL_S - _CHECK_S / 2)
        return before if hanging and self._progress_at <= before else 0.0

    def _schedule_check(self) -> None:
        self._next_check = asyncio.get_running_loop().call_later(_CHECK_S, self._check)

    def _check(self) -> None:
        """Refuse requests that wait in vain. One timer for all: there may be thousands."""
        now = time.monotonic()
        self._queues.set_added(min(self._spares, self._running.hanging(now, _REPLACE_S)))
        if now < self._refuse_until:
            self._queues.refuse_since(now, _storage_stalled())
        elif before := self._stalled_since(now):
            self._queues.refuse_since(before, _storage_stalled())
        self._queues.refuse_late(now)
        self._next_check = None
        if not self._queues.is_idle:
            self._schedule_check()


def _storage_stalled() -> UnavailableError:
    return UnavailableError("The server's storage does not respond.")


def _is_storage_failure(response: HttpResponseBase) -> bool:
    if response.status_code != 503 or response.streaming:
        return False
    try:
        error = orjson.loads(response.content)["error"]  # type: ignore[attr-defined]  # Set on HttpResponse.
    except (ValueError, LookupError, TypeError):
        return False
    return isinstance(error, dict) and error.get("code") in STORAGE_CODES
