"""Lines of the log about a server that is away: few of them, however often it is tried."""

from __future__ import annotations

import logging
import threading
import time

_EVERY_S = 60.0
"""How often a line says that an outage lasts."""


class OutageLog:
    """Logs one outage after another: a line when it begins, one a minute, one when it ends.

    ``what`` begins each line. For any thread.
    """

    def __init__(self, logger: logging.Logger, what: str) -> None:
        self._logger, self._what = logger, what
        self._lock = threading.Lock()
        self._since: float | None = None
        self._logged_at = 0.0

    def failed(self, error: object) -> None:
        """Note that a try has failed."""
        with self._lock:
            now = time.monotonic()
            is_first = self._since is None
            if not is_first and now - self._logged_at < _EVERY_S:
                return
            since = self._since = now if self._since is None else self._since
            self._logged_at = now
        if is_first:
            self._logger.warning("%s: %s", self._what, error)
        else:
            self._logger.warning("%s: for %.0f s now: %s", self._what, now - since, error)

    def succeeded(self) -> None:
        """Note that a try has succeeded."""
        if self._since is None:  # Nearly always, so without the lock.
            return
        with self._lock:
            since, self._since = self._since, None
        if since is not None:
            lasted_s = time.monotonic() - since
            self._logger.warning("%s: works again after %.1f s", self._what, lasted_s)
