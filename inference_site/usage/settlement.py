"""Settling: accounting, and the windows of token limits that follow from it."""

from __future__ import annotations

import logging
import time

from redis.exceptions import RedisError

from inference_site.accounts.rate_limits import Accounted, correct
from inference_site.usage.accounting import account

logger = logging.getLogger(__name__)

_REQUEST_ROWS, _REQUEST_WAIT_MS = 500, 500
"""How much a request settles that a budget would refuse, and how long it waits for its turn."""


def settle() -> list[Accounted]:
    """Account what has ended, a step of it; return that. Nothing while another does."""
    return _corrected(account())


def settle_for_request() -> None:
    """Account what has ended, as much as a request has time for."""
    _corrected(account(_REQUEST_ROWS, _REQUEST_WAIT_MS))


def _corrected(accounted: list[Accounted]) -> list[Accounted]:
    try:
        correct(accounted, time.time())
    except RedisError as exc:
        logger.warning("rate limits: not corrected: %s", exc)
    return accounted
