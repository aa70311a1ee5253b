"""A value that every request reads, cached in the process for a second or two."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from inference_site.core.observability.outages import OutageLog
from inference_site.core.storage.postgresql import release_connection_after

_FRESH = 0.75
"""The part of ``ttl_s`` after which ``keep_fresh`` reads again."""
_ASKED_S = 60.0
"""``keep_fresh`` reads nothing once nobody has asked for this long."""

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
        self._asked_at = 0.0
        self._is_asked = threading.Event()

    def keep_fresh(self) -> None:
        """Read new values on a thread, before the old ones are too old: no request waits for one.

        Call it once, in a process that serves. After a minute without ``now`` the thread pauses;
        the next call of ``now`` reads by itself.
        """

        def read_again() -> None:
            outage = OutageLog(logging.getLogger(self._read.__module__), "cached value")
            while True:
                time.sleep(self._ttl_s * _FRESH)
                if time.monotonic() - self._asked_at > _ASKED_S:
                    self._is_asked.clear()
                    self._is_asked.wait()
                    continue
                try:
                    with self._lock, release_connection_after():
                        self._refresh()
                except Exception as exc:  # noqa: BLE001  # The next call of ``now`` raises it.
                    outage.failed(exc)
                else:
                    outage.succeeded()

        threading.Thread(target=read_again, name="cached value", daemon=True).start()

    def now(self) -> T:
        """Return a value that is at most ``ttl_s`` old, or older while another thread reads."""
        self._asked_at = time.monotonic()
        self._is_asked.set()
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
