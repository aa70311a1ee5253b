"""Generations that were accepted while their model was loading, and until when they wait for it.

The times are those of Redis; the hosts' clocks may differ.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from worker.redis_clients import site_client

LOAD_RETRY_S = 10
"""When a client is told to try again while a model is loading."""
_KEY = "load-waits"


def wait_for_load(generation_id: str, wait_s: int) -> None:
    """Have a generation given up when its model is not served after so long."""
    site_client().zadd(_KEY, {generation_id: _now() + wait_s})


def overdue() -> list[str]:
    """Return the generations whose time has passed, those among them that have ended too."""
    found: Any = site_client().zrangebyscore(_KEY, "-inf", _now())
    return [generation_id.decode() for generation_id in found]


def forget_waits(generation_ids: Collection[str]) -> None:
    """Wait no longer for the models of these."""
    site_client().zrem(_KEY, *generation_ids)


def _now() -> float:
    seconds, microseconds = site_client().time()
    return float(seconds) + float(microseconds) / 1e6
