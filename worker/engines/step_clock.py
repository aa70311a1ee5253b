"""StepClock: whether an engine goes on while generations run on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from inference_site.domain.deltas import Delta
from worker.engines.base import Sink


class StepClock:
    """Counts the steps of an engine, and what runs on it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = self._steps = 0

    @property
    def steps(self) -> int | None:
        """A number that changes with each step; None while nothing runs."""
        return self._steps if self._running else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count something that runs."""
        with self._lock:
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                self._steps += 1

    def counted(self, callback: Callable[[bytes], bool]) -> Callable[[bytes], bool]:
        """Return the callback of a step; each call counts."""

        def called(chunk: bytes) -> bool:
            self.step()
            return callback(chunk)

        return called

    @contextmanager
    def watched(self, sink: Sink) -> Iterator[Sink]:
        """Count something that runs; yield its sink, each use of which is a step."""
        with self.running():
            yield _SteppingSink(self, sink)

    def step(self) -> None:
        """Count a step."""
        self._steps += 1


class _SteppingSink:
    """A sink whose engine makes a step whenever it feeds it, or looks whether it is cancelled."""

    def __init__(self, clock: StepClock, sink: Sink) -> None:
        self._clock, self._sink = clock, sink

    @property
    def cancelled(self) -> bool:
        """Whether the engine must stop now (see ``Sink``)."""
        self._clock.step()
        return self._sink.cancelled

    def feed(self, delta: Delta) -> None:
        """Pass the delta on."""
        self._clock.step()
        self._sink.feed(delta)
