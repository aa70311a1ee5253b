"""A value that every request reads, cached in the process for a second or two."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class CachedValue(Generic[T]):
    """The result of ``read``, at most ``ttl_s`` seconds old.

    One thread reads a new value; meanwhile the others get the old one, or wait if there is none.
    An exception of ``read`` reaches only the thread that reads, and the next thread tries again.
    """

    def __init__(self, read: Callable[[], T], ttl_s: float) -> None:
        self._read, self._ttl_s = read, ttl_s
        self._cached: tuple[T, float] | None = None
        self._lock = threading.Lock()

    def now(self) -> T:
        """Return a value that is at most ``ttl_s`` old, or older while another thread reads."""
        if (cached := self._cached) is None:
            return self.no_older_than(self._ttl_s)
        if self._is_older_than(self._ttl_s) and self._lock.acquire(blocking=False):
            try:
                return self._refresh()
            finally:
                self._lock.release()
        return cached[0]

    def no_older_than(self, age_s: float) -> T:
        """Return a value that is at most ``age_s`` old; wait while another thread reads."""
        with self._lock:
            if (cached := self._cached) is None or self._is_older_than(age_s):
                return self._refresh()
            return cached[0]

    def forget(self) -> None:
        """Have the next call read a new value."""
        self._cached = None

    def _is_older_than(self, age_s: float) -> bool:
        return self._cached is None or time.monotonic() - self._cached[1] > age_s

    def _refresh(self) -> T:
        value = self._read()
        self._cached = value, time.monotonic()
        return value
