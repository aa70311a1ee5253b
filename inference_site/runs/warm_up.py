"""Warming up the connections of a process: a generation that is claimed and deleted, never run.

When a connection first needs them, PostgreSQL reads the catalogue entries of tables and indexes and
plans the statements. That takes three times as long as running the statements.
"""

from __future__ import annotations

from contextlib import suppress

from django.db import Error, transaction
from redis.exceptions import RedisError

from inference_site.core.storage.postgresql import release_connection_after
from inference_site.core.storage.redis import all_clients
from inference_site.runs.models import Generation
from inference_site.runs.queue import new_id


def warm_up() -> None:
    """Write, claim and delete a generation in one transaction, and connect to each event log.

    If PostgreSQL or Redis is down, do nothing.
    """
    id_ = new_id("rehearsal-")  # No model has this name.
    row = Generation(public_id=id_, project_id=0, api_key_id=0, kind="", model=id_)
    with suppress(Error), release_connection_after(), transaction.atomic():
        row.insert()
        Generation.objects.claim(row.model, "nobody")
        row.delete()  # After a rollback psycopg would forget its prepared statements.
    with suppress(RedisError):
        for client in all_clients():
            client.ping()
