"""The timers of the web server: a wall clock that is set does not move them."""

from __future__ import annotations

import time
from typing import Any

import daphne.server  # noqa: F401  # Has to be first: it installs the reactor.
from twisted.internet import reactor

import inference_site.gateway.daphne_server  # noqa: F401  # It sets the clock.


def test_a_timer_of_the_server_counts_by_a_clock_that_nobody_sets() -> None:
    """By the wall clock it came an hour late after that was set back by an hour."""
    timers: Any = reactor
    before = time.monotonic()
    timer = timers.callLater(60, lambda: None)
    due_at = timer.getTime()
    timer.cancel()
    assert before + 60 <= due_at <= time.monotonic() + 60
