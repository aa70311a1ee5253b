"""Celery tasks: what the messages in the queues of wake-ups call."""

from __future__ import annotations

import logging

from celery import shared_task

from inference_site.core.storage.postgresql import DATABASE_UNAVAILABLE, release_connection_after
from inference_site.runs.wake_ups import GENERATE_TASK
from worker.runtime.process import current_runtime
from worker.runtime.wake_up_consumer import AT_ONCE, LISTEN_TASK, NOTED

logger = logging.getLogger(__name__)


@shared_task(name=GENERATE_TASK, ignore_result=True, Strategy=AT_ONCE)  # type: ignore[call-overload, untyped-decorator]  # The stubs know no strategy.
def generate(model: str) -> None:
    """Run waiting generations of a model. If PostgreSQL is down, maintenance sends a wake-up."""
    try:
        with release_connection_after():  # Hooks of the operator may have used the database.
            current_runtime().serve(model)
    except DATABASE_UNAVAILABLE as exc:
        logger.warning("cannot claim for %s: %s", model, exc)


@shared_task(name=LISTEN_TASK, ignore_result=True, Strategy=NOTED)  # type: ignore[call-overload, untyped-decorator]  # The stubs know no strategy.
def listen_again() -> None:
    """Do nothing: the message has done its work when it is read (see ``LISTEN_TASK``)."""
