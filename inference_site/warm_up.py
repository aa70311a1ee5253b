"""A generation that is never run: what a process does for each, done once before the first.

PostgreSQL's side of a connection reads what it knows of tables and indexes, and plans a statement,
when it first needs them. That takes three times as long as the statement.
"""

from __future__ import annotations

from contextlib import suppress

from django.db import Error, transaction
from redis.exceptions import RedisError

from inference_site.generations.models import Generation
from inference_site.generations.queue import new_id
from inference_site.storage.postgresql import lent_connection
from inference_site.storage.redis import all_clients


def rehearse() -> None:
    """Write a generation, claim and delete it, unseen, and connect to each event log.

    PostgreSQL or Redis that is down is no error.
    """
    id_ = new_id("rehearsal-")  # And no model has this name.
    row = Generation(public_id=id_, project_id=0, api_key_id=0, kind="", model=id_)
    with suppress(Error), lent_connection(), transaction.atomic():
        row.insert()
        Generation.objects.claim(row.model, "nobody")
        row.delete()  # Not a rollback: with that psycopg forgets what it has prepared.
    with suppress(RedisError):
        for client in all_clients():
            client.ping()
