"""Celery tasks of beat: accounting, and pruning of what is not kept."""

from __future__ import annotations

import logging
import time

from celery import shared_task
from django.db import OperationalError
from redis.exceptions import RedisError

from inference_site.accounts.accounting import account
from inference_site.accounts.pruning import prune
from inference_site.accounts.rate_limits import correct

logger = logging.getLogger(__name__)

_STEPS = 20
"""How many steps one task takes at most: the next one goes on."""


@shared_task(name="accounts.account", ignore_result=True, expires=5)
def account_ended() -> None:
    """Account what has ended, and correct the tokens that limits have counted."""
    try:
        for _ in range(_STEPS):
            accounted = account()
            if not accounted:
                return
            correct(accounted, time.time())
    except (OperationalError, RedisError) as exc:
        logger.warning("accounting: %s", exc)


@shared_task(name="accounts.prune", ignore_result=True, expires=600)
def prune_old() -> None:
    """Delete what is older than it is kept for."""
    try:
        prune()
    except OperationalError as exc:
        logger.warning("pruning: %s", exc)
