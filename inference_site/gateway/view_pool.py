"""The threads on which views run: a semaphore for each project, and a bounded wait for a thread.

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
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

from django.http.response import HttpResponseBase

from inference_site.core.errors.api_errors import UnavailableError

_MOST_WAITING = 1_000
"""Requests of one project that may wait for a thread. Another one is refused at once."""
_LONGEST_WAIT_S = 10.0
_LONGEST_LARGE_WAIT_S = 30.0
_REST = 3.0
"""After a large body its project rests for this many times the processor time that it took."""
_ALONE_S = 10.0
"""A project need not rest if no other project has sent a request for this long."""


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
