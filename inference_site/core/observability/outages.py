"""Lines of the log about a server that is away: few of them, however often it is tried."""

from __future__ import annotations

import logging
import threading
import time

from inference_site.core.storage.postgresql import fault_of_database

_EVERY_S = 60.0
"""How often a line says that an outage lasts."""


class OutageLog:
    """Logs one outage after another: a line when it begins, one a minute, one when it ends.

    The last has the time from the first failure to the last one, because nothing may be tried for
    hours after that. ``what`` begins each line. For any thread.
    """

    def __init__(self, logger: logging.Logger, what: str) -> None:
        self._logger, self._what = logger, what
        self._lock = threading.Lock()
        self._since: float | None = None
        self._logged_at = self._failed_at = 0.0

    def failed(self, error: BaseException | str) -> None:
        """Note that a try has failed."""
        shown = error if isinstance(error, str) else fault_of_error(error)
        with self._lock:
            now = self._failed_at = time.monotonic()
            is_first = self._since is None
            if not is_first and now - self._logged_at < _EVERY_S:
                return
            since = self._since = now if self._since is None else self._since
            self._logged_at = now
        if is_first:
            self._logger.warning("%s: %s", self._what, shown)
        else:
            self._logger.warning("%s: for %.0f s now: %s", self._what, now - since, shown)

    def succeeded(self) -> None:
        """Note that a try has succeeded."""
        if self._since is None:  # Nearly always, so without the lock.
            return
        with self._lock:
            since, self._since = self._since, None
            failed_at = self._failed_at
        if since is not None:
            failed_s = failed_at - since
            failures = f"{failed_s:.1f} s of failures" if failed_s else "one failure"
            self._logger.warning("%s: works again, after %s", self._what, failures)


def fault_of_error(error: BaseException) -> str:
    """Return the first line of an error's text; its class if it has none, as a TimeoutError."""
    return fault_of_database(error) or type(error).__name__
