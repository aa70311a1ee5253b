"""The Celery tasks of a worker, and its answer to ``celery inspect active``."""

from __future__ import annotations

import logging
import os
from typing import Any

from celery import shared_task
from celery.worker.control import inspect_command

from inference_site.core.storage.postgresql import DATABASE_UNAVAILABLE, release_connection_after
from inference_site.runs.wake_ups import GENERATE_TASK, queue_name
from worker.runtime.process import current_runtime
from worker.runtime.wake_up_consumer import LISTEN_TASK

logger = logging.getLogger(__name__)


# Without a trail: a thread sends wake-ups to others for as long as it finds generations to run.
@shared_task(name=GENERATE_TASK, ignore_result=True, trail=False)
def generate(model: str) -> None:
    """Run waiting generations of a model. If PostgreSQL is down, maintenance sends a wake-up."""
    try:
        with release_connection_after():  # Hooks of the operator may have used the database.
            current_runtime().serve(model)
    except DATABASE_UNAVAILABLE as exc:
        logger.warning("cannot claim for %s: %s", model, exc)


@shared_task(name=LISTEN_TASK, ignore_result=True)
def listen_again() -> None:
    """Do nothing: the message has done its work when it is read (see ``LISTEN_TASK``)."""


@inspect_command(alias="dump_active")
def active(state: Any, **_: Any) -> list[dict[str, Any]]:
    """List the generations that run, in the form in which Celery lists tasks.

    In place of Celery's list of its requests: a wake-up is no work of its own, most engines run
    without a thread of Celery's pool, and a slot runs one generation after another.
    """
    return [
        {
            "id": claim.public_id,
            "name": GENERATE_TASK,
            "type": claim.kind,
            "args": [claim.model],
            "kwargs": {"attempt": claim.attempt},
            "hostname": state.hostname,
            "time_start": started_at,
            "acknowledged": True,
            "delivery_info": {"routing_key": queue_name(claim.model)},
            "worker_pid": os.getpid(),
        }
        for claim, started_at in current_runtime().runs.running
    ]
