"""Celery tasks of beat: settling, and pruning of what is not kept.

Upkeep runs on the same thread: each of them stops after a while, and the next one goes on.
"""

from __future__ import annotations

import logging
import time

from celery import shared_task
from django.db import OperationalError

from inference_site.usage.pruning import prune
from inference_site.usage.settlement import settle

logger = logging.getLogger(__name__)

_PATIENCE_S = 1.0


@shared_task(name="accounts.account", ignore_result=True, expires=5)
def account_ended() -> None:
    """Account what has ended, and correct the tokens that limits have counted."""
    until = time.monotonic() + _PATIENCE_S
    try:
        while settle() and time.monotonic() < until:
            pass
    except OperationalError as exc:
        logger.warning("accounting: %s", exc)


@shared_task(name="accounts.prune", ignore_result=True, expires=30)
def prune_old() -> None:
    """Delete some of what is older than it is kept for."""
    try:
        prune(time.monotonic() + _PATIENCE_S)
    except OperationalError as exc:
        logger.warning("pruning: %s", exc)
