"""Celery tasks: the bell of a model, and the upkeep that beat asks for."""

from __future__ import annotations

import logging

from celery import shared_task
from django.db import OperationalError

from inference_site.generations.maintenance import attempt, tend
from inference_site.generations.queue import GENERATE_TASK
from inference_site.observability.metrics import MAINTENANCE_DONE
from worker.runtime.process import current_runtime

logger = logging.getLogger(__name__)

UPKEEP_TASK = "generations.maintain"


@shared_task(name=GENERATE_TASK, ignore_result=True)
def generate(model: str) -> None:
    """Answer a bell. With PostgreSQL down the bell is lost, and upkeep rings again."""
    try:
        current_runtime().serve(model)
    except OperationalError as exc:
        logger.warning("cannot claim for %s: %s", model, exc)


@shared_task(name=UPKEEP_TASK, ignore_result=True, expires=5)
def upkeep() -> None:
    """Give up what is abandoned, expire what waits too long, ring for what nobody heard."""
    if attempt("upkeep", tend):
        MAINTENANCE_DONE.set_to_current_time()
