"""Settlement: replaces the estimates of ended generations by their actual usage.

It runs an accounting step (roll-ups, budgets), then corrects the windows of token limits.
"""

from __future__ import annotations

import logging
import time

from redis.exceptions import RedisError

from inference_site.accounts.rate_limits import Accounted, correct
from inference_site.usage.accounting import account

logger = logging.getLogger(__name__)

_REQUEST_ROWS, _REQUEST_WAIT_MS = 500, 500
"""Bounds of the step that a request runs before a budget refuses it."""


def settle() -> list[Accounted]:
    """Run one accounting step; return the generations, none while another step runs."""
    return _corrected(account())


def settle_for_request() -> None:
    """Run an accounting step that is small enough for a waiting request."""
    _corrected(account(_REQUEST_ROWS, _REQUEST_WAIT_MS))


def _corrected(accounted: list[Accounted]) -> list[Accounted]:
    try:
        correct(accounted, time.time())
    except RedisError as exc:
        logger.warning("rate limits: token counts not corrected: %s", exc)
    return accounted
