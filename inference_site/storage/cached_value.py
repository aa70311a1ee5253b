"""A value that every request asks for, and that is read again when it is a second or two old."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """What ``read`` returned at most ``ttl_s`` seconds ago.

    One thread reads it; meanwhile the others take the last value, or wait if there is none. What
    ``read`` raises is raised to the one that reads, and the next one reads again.
    """

    def __init__(self, read: Callable[[], T], ttl_s: float) -> None:
        self._read, self._ttl_s = read, ttl_s
        self._known: tuple[T, float] | None = None
        self._lock = threading.Lock()

    def now(self) -> T:
        """Return the value as it was at most ``ttl_s`` ago, or a little longer while it is read."""
        if (known := self._known) is None:
            return self.at_most(self._ttl_s)
        if self._is_older_than(self._ttl_s) and self._lock.acquire(blocking=False):
            try:
                return self._renew()
            finally:
                self._lock.release()
        return known[0]

    def at_most(self, age_s: float) -> T:
        """Return the value as it was at most so many seconds ago; wait for whoever reads it."""
        with self._lock:
            if (known := self._known) is None or self._is_older_than(age_s):
                return self._renew()
            return known[0]

    def forget(self) -> None:
        """Have it read anew by who asks next."""
        self._known = None

    def _is_older_than(self, age_s: float) -> bool:
        return self._known is None or time.monotonic() - self._known[1] > age_s

    def _renew(self) -> T:
        value = self._read()
        self._known = value, time.monotonic()
        return value
