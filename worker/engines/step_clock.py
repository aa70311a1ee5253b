"""StepClock: whether an engine goes on while generations run on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
            self._steps += 1
            return callback(chunk)

        return called
