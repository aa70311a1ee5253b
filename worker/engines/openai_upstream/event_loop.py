"""The event loop on which this process reads all its upstream models.

One thread runs it. Answers are read in ticks: what has come for all streams since the last tick is
parsed at once, without a switch of tasks for each token. While nothing else is under way the loop
does not even look at its sockets between two ticks, so that one read brings several tokens. Every
``POLL_S`` it looks whether a run was cancelled, or its server has been silent for too long.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol, TypeVar

from inference_site.domain.errors import EngineUnavailable

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""Between two looks at cancellation and silence."""
_TICK_S, _LONGEST_TICK_S = 0.02, 0.1
"""As long as the publisher's: what comes in between would wait there for its turn."""
_SHARE = 9
"""A tick is this many times as long as it took to read and parse what the last one brought."""

T = TypeVar("T")


class Cancelled(Exception):
    """The run that waited was cancelled; its connection is closed."""


class Silent(Exception):
    """The server has sent nothing for too long."""


class Lost(Exception):
    """The connection was closed without an end of the answer."""


class Watched(Protocol):
    """Who waits: a sink, or what stands for one."""

    @property
    def cancelled(self) -> bool:
        """Whether the waiting is in vain."""


class Content(Protocol):
    """A body that is being received; aiohttp's StreamReader."""

    def read_nowait(self, n: int = -1) -> bytes:
        """Return what has come. Raise what has ended the connection."""

    def at_eof(self) -> bool:
        """Whether all was read."""


class Watch:
    """A task that waits for a server, as long as somebody wants the answer."""

    def __init__(
        self, watched: Watched, timeout_s: float, why_not: Callable[[float], Exception | None]
    ) -> None:
        self._watched, self._timeout_s, self._why_not = watched, timeout_s, why_not
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task, self._reason = task, _NEVER
        self._looks_lost = 0
        self.is_lost: Callable[[], bool] = lambda: False
        """Whether the connection is closed; its end is read before the second look, if it has one.

        aiohttp tells a reader of a body nothing of bytes that are no HTTP, and closes it.
        """
        self.heard()

    def heard(self) -> None:
        """Note that the server has sent something."""
        self._heard_at = self._loop.time()

    def look(self, now: float) -> None:
        """End the waiting if there is a reason to."""
        if self._reason is not _NEVER:
            return
        reason: Exception | None = None
        self._looks_lost += self.is_lost()
        if self._watched.cancelled:
            reason = Cancelled()
        elif now - self._heard_at > self._timeout_s:
            reason = Silent(f"nothing came for {self._timeout_s:g} s")
        elif self._looks_lost > 1:
            reason = Lost("it was cut off")
        else:
            reason = self._why_not(now - self._heard_at)
        if reason is not None:
            self._reason = reason
            self._task.cancel()

    def raise_reason(self) -> None:
        """Raise why the task was cancelled, if it was from here."""
        if self._reason is not _NEVER:
            self._task.uncancel()
            raise self._reason


_NEVER = Exception("The task was not cancelled from here.")


class _Reading:
    """An answer that is read tick by tick."""

    def __init__(self, content: Content, take: Callable[[bytes], None]) -> None:
        self._content, self._take = content, take
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def read(self) -> None:
        if self.ended.done():
            return
        try:
            if data := self._content.read_nowait():
                self._take(data)
            if self._content.at_eof():
                self.ended.set_result(None)
        except Exception as exc:  # noqa: BLE001  # Whatever it is, its own task raises it.
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
        threading.Thread(target=self._main, name="upstreams", daemon=True).start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it to its end while the caller waits; return or raise what comes of it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._begins.set()
        return future.result()

    def start(
        self, work: Coroutine[Any, Any, None], ended: Callable[[Exception | None], None]
    ) -> None:
        """Begin it; at its end call ``ended`` on the loop, with what it has raised if it has."""
        self._loop.call_soon_threadsafe(self._begin, work, ended)
        self._begins.set()

    def _begin(
        self, work: Coroutine[Any, Any, None], ended: Callable[[Exception | None], None]
    ) -> None:
        def on_done(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            error = EngineUnavailable("It was stopped.") if done.cancelled() else done.exception()
            ended(error if isinstance(error, Exception) or error is None else _wrapped(error))

        task = self._loop.create_task(work)
        self._tasks.add(task)  # The loop itself keeps no task alive.
        task.add_done_callback(on_done)

    def turned_within(self, seconds: float) -> bool:
        """Whether it calls what it is given within so many seconds; a caller waits for that."""
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
        """Watch the current task meanwhile.

        Raise Cancelled once nobody wants the answer, Silent after ``timeout_s`` without a sign of
        the server, and what ``why_not`` returns as soon as that is something; it is given for how
        long the server has been silent, in seconds.
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

    async def read(self, content: Content, take: Callable[[bytes], None]) -> None:
        """Hand over what comes, tick by tick, to the end. Raise what ``take`` does."""
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
            tick_s = min(max(_TICK_S, _SHARE * spent_s), _LONGEST_TICK_S)
        self._ticker = None

    async def _rest(self, seconds: float) -> float:
        """Wait, without a look at any socket if all there is to do is to read answers.

        Return when the wait was over; then come the sockets.
        """
        self._begins.clear()
        await asyncio.sleep(0)  # What was asked for until now begins.
        if not self._only_reads:
            await asyncio.sleep(seconds)
            return self._loop.time()
        self._begins.wait(seconds)
        ended = self._loop.time()
        for _ in range(2):  # The loop looks at the sockets, then takes what has come.
            await asyncio.sleep(0)
        return ended

    @property
    def _only_reads(self) -> bool:
        return len(self._readings) == len(self._watches) == len(self._tasks)


def _wrapped(error: BaseException) -> Exception:
    return EngineUnavailable(f"The model cannot be run now ({type(error).__name__}).")


_first_use = threading.Lock()


def event_loop() -> EventLoop:
    """Return the one of this process, which begins to run now if it has not. For any thread."""
    with _first_use:  # Models that are loaded at the same time must not begin one each.
        return _event_loop()


@cache
def _event_loop() -> EventLoop:
    return EventLoop()
