"""Waiting for what another thread or process is about to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from inference_site.core.storage.postgresql import unpooled_connection

WAITING_FOR_LOCKS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock'
"""
"""How many statements wait for a lock."""


def wait_until(condition: Callable[[], object], timeout_s: float = 90.0) -> None:
    """Return when the condition holds. Raise AssertionError when it does not in time."""
    deadline = time.monotonic() + timeout_s
    for pause_s in pauses():
        if condition():
            return
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(pause_s)


def pauses() -> Iterator[float]:
    """Seconds between looks, which grow: to look is often a request, and takes a processor."""
    pause_s = 0.005
    while True:
        yield pause_s
        pause_s = min(1.3 * pause_s, 0.3)


def wait_for_a_wait() -> None:
    """Return when a statement in the tests' database waits for a lock."""
    with unpooled_connection() as own:  # A transaction sees the connections of its beginning.
        own.autocommit = True
        wait_until(lambda: own.execute(WAITING_FOR_LOCKS).fetchone() != (0,))
