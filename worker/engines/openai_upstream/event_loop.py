"""The event loop on which this process reads the answers of all its upstream models.

One thread runs it. It reads in ticks: at each tick it parses what has arrived for all streams,
without a switch of tasks for each token. While it has nothing but streams to read, it does not poll
its sockets between two ticks, so that one read brings several tokens. Every ``POLL_S`` it checks
whether a run was cancelled, and whether a server has been silent for too long.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol, TypeVar

import aiohttp

from inference_site.core.domain.errors import EngineUnavailable
from worker.engines.base import OnEnd

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""Interval of the checks for cancellation and silence."""
_TICK_S, _LONGEST_TICK_S = 0.02, 0.1
"""Bounds of a tick. The end of an answer waits for the next one, and so does its slot."""
_REST_RATIO = 9
"""Ratio of the pause before a tick to the time that the last tick took."""

T = TypeVar("T")


class Cancelled(Exception):
    """The run was cancelled; its connection is closed."""


class Silent(Exception):
    """The server has sent nothing for too long."""


class Lost(Exception):
    """The connection was closed without an end of the answer."""


class Watched(Protocol):
    """What can cancel a run: a sink or a ``ChunkReader``."""

    @property
    def cancelled(self) -> bool:
        """Whether to end the run now."""


class Watch:
    """Cancels a task that waits for a server once there is a reason to."""

    def __init__(
        self, watched: Watched, timeout_s: float, why_not: Callable[[float], Exception | None]
    ) -> None:
        self._watched, self._timeout_s, self._why_not = watched, timeout_s, why_not
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._reason: Exception | None = None
        self._looks_lost = 0
        self.is_lost: Callable[[], bool] = lambda: False
        """Whether the connection was closed before the end of the answer.

        aiohttp closes a connection with invalid HTTP without an error for the reader of the body.
        The task is cancelled at the second check: before it, the reader reads a regular end.
        """
        self.heard()

    def heard(self) -> None:
        """Restart the timeout: the server has sent data."""
        self._heard_at = self._loop.time()

    def look(self, now: float) -> None:
        """Cancel the task if there is a reason to."""
        if self._reason is not None:
            return
        self._looks_lost += self.is_lost()
        if self._watched.cancelled:
            self._reason = Cancelled()
        elif now - self._heard_at > self._timeout_s:
            self._reason = Silent(f"nothing came for {self._timeout_s:g} s")
        elif self._looks_lost > 1:
            self._reason = Lost("it was cut off")
        else:
            self._reason = self._why_not(now - self._heard_at)
        if self._reason is not None:
            self._task.cancel()

    def raise_reason(self) -> None:
        """Raise the reason if this watch has cancelled the task."""
        if self._reason is not None:
            self._task.uncancel()
            raise self._reason


class _Reading:
    """An answer that is read tick by tick."""

    def __init__(self, content: aiohttp.StreamReader, take: Callable[[bytes], None]) -> None:
        self._content, self._take = content, take
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def read(self) -> None:
        if self.ended.done():
            return
        try:
            # The public ``read_nowait`` raises the error of a broken connection, and never returns
            # the bytes that came before it. They may hold the end of the answer.
            if data := self._content._read_nowait(-1):
                self._take(data)
            if (error := self._content.exception()) is not None:
                raise error
            if self._content.at_eof():
                self.ended.set_result(None)
        except Exception as exc:  # noqa: BLE001  # The task that awaits ``ended`` raises it.
            self.ended.set_exception(exc)


class EventLoop:
    """The loop and its thread. ``start`` and ``run`` are for any other thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watches: set[Watch] = set()
        self._readings: set[_Reading] = set()
        self._begins = threading.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._looker: asyncio.Task[None] | None = None

        def run_forever() -> None:
            asyncio.set_event_loop(self._loop)
            self._loop.run_forever()

        threading.Thread(target=run_forever, name="upstreams", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine while the caller waits; return its result or raise its exception."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._begins.set()
        return future.result()

    def start(self, work: Coroutine[Any, Any, None], ended: OnEnd) -> None:
        """Begin a coroutine; at its end call ``ended`` on the loop, with its exception if any."""

        def on_done(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            error = EngineUnavailable("It was stopped.") if done.cancelled() else done.exception()
            if error is not None and not isinstance(error, Exception):
                kind = type(error).__name__
                error = EngineUnavailable(f"The model cannot be run now ({kind}).")
            ended(error)

        def begin() -> None:
            task = self._loop.create_task(work)
            self._tasks.add(task)  # The loop itself keeps no task alive.
            task.add_done_callback(on_done)

        self._loop.call_soon_threadsafe(begin)
        self._begins.set()

    def turned_within(self, seconds: float) -> bool:
        """Whether the loop runs a callback within this time; the caller waits for it."""
        turned = threading.Event()
        self._loop.call_soon_threadsafe(turned.set)
        self._begins.set()
        return turned.wait(seconds)

    @contextmanager
    def watching(
        self,
        watched: Watched,
        timeout_s: float,
        why_not: Callable[[float], Exception | None] = lambda _: None,
    ) -> Iterator[Watch]:
        """Watch the current task inside the ``with`` block.

        Raise Cancelled once ``watched`` is cancelled, Silent after ``timeout_s`` without data, and
        the exception that ``why_not`` returns; it is called with the seconds since the last data.
        """
        watch = Watch(watched, timeout_s, why_not)
        self._watches.add(watch)
        if self._looker is None:
            self._looker = self._loop.create_task(self._look())
        try:
            yield watch
        except asyncio.CancelledError:
            watch.raise_reason()
            raise
        finally:
            self._watches.discard(watch)

    async def read(self, content: aiohttp.StreamReader, take: Callable[[bytes], None]) -> None:
        """Pass the received data to ``take`` at each tick, to its end.

        Raise what ``take`` does, and the error that ended the connection.
        """
        reading = _Reading(content, take)
        self._readings.add(reading)
        if self._ticker is None:
            self._ticker = self._loop.create_task(self._tick())
        try:
            await reading.ended
        finally:
            self._readings.discard(reading)

    async def _look(self) -> None:
        while self._watches:
            await asyncio.sleep(POLL_S)
            now = self._loop.time()
            for watch in tuple(self._watches):
                watch.look(now)
        self._looker = None

    async def _tick(self) -> None:
        tick_s = _TICK_S
        while self._readings:
            started = await self._rest(tick_s)
            for reading in tuple(self._readings):
                reading.read()
            spent_s = self._loop.time() - started
            tick_s = min(max(_TICK_S, _REST_RATIO * spent_s), _LONGEST_TICK_S)
        self._ticker = None

    async def _rest(self, seconds: float) -> float:
        """Pause; block the loop, without polling its sockets, if all tasks only read streams.

        Return the time at which the pause ended; the sockets are read after it.
        """
        self._begins.clear()
        await asyncio.sleep(0)  # Begins the work that was scheduled before ``clear``.
        if not len(self._readings) == len(self._watches) == len(self._tasks):
            await asyncio.sleep(seconds)
            return self._loop.time()
        self._begins.wait(seconds)
        ended = self._loop.time()
        for _ in range(2):  # The loop polls the sockets, then runs their callbacks.
            await asyncio.sleep(0)
        return ended


_first_use = threading.Lock()


def event_loop() -> EventLoop:
    """Return the loop of this process; the first call starts it. Thread-safe."""
    with _first_use:  # Models that load at the same time must share one loop.
        return _shared_loop()


_shared_loop = cache(EventLoop)
