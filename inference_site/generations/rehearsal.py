"""A generation that is never run: what a process does for each, done once before the first.

PostgreSQL's side of a connection reads what it knows of tables and indexes, and plans a statement,
when it first needs them. That takes three times as long as the statement.
"""

from __future__ import annotations

from contextlib import suppress

from django.db import DatabaseError, transaction

from inference_site.generations.models import Generation
from inference_site.generations.queue import new_id
from inference_site.storage.connections import lent_connection


def rehearse() -> None:
    """Write a generation and claim it, and take both back. PostgreSQL that is down is no error."""
    row = Generation(public_id=new_id("rehearsal-"), project_id=0, api_key_id=0, kind="", model="")
    with suppress(DatabaseError), lent_connection(), transaction.atomic():
        row.insert()
        Generation.objects.claim(row.model, "nobody")
        transaction.set_rollback(True)
