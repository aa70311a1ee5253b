"""Deletes responses and conversations that are older than their project keeps them.

They are deleted as by their clients: what others build on is hidden until those are gone.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterable
from typing import TypeVar

from django.db.models import Exists, OuterRef

from inference_site.accounts.models import retention_cutoffs
from responses_api.models import ENDED, Conversation, StoredResponse
from responses_api.state.deletion import delete, delete_conversation

_BATCH = 100
Row = TypeVar("Row")


def prune(until: float) -> int:
    """Delete some, oldest first, until the monotonic clock passes ``until``; return how many."""
    deleted = 0
    for project, since in retention_cutoffs("responses_days"):
        while time.monotonic() < until and (found := _responses(project, since)):
            for stored in _in_time(found, until):
                delete(stored)
                deleted += 1
    for project, since in retention_cutoffs("conversations_days"):
        while time.monotonic() < until and (conversations := _conversations(project, since)):
            for conversation in _in_time(conversations, until):
                delete_conversation(conversation)
                deleted += 1
    return deleted


def _in_time(rows: Iterable[Row], until: float) -> Iterable[Row]:
    for row in rows:
        if time.monotonic() >= until:
            return
        yield row


def _responses(project: int, since: dt.datetime) -> list[StoredResponse]:
    ended = StoredResponse.objects.filter(project=project, status__in=ENDED, deleted_at=None)
    return list(ended.filter(created_at__lt=since).order_by("created_at", "pk")[:_BATCH])


def _conversations(project: int, since: dt.datetime) -> list[Conversation]:
    """Return those without a response since then, none of which runs."""
    later = StoredResponse.objects.filter(conversation=OuterRef("pk"), created_at__gte=since)
    running = StoredResponse.objects.filter(conversation=OuterRef("pk")).exclude(status__in=ENDED)
    rows = Conversation.objects.filter(project=project, created_at__lt=since, deleted_at=None)
    return list(rows.exclude(Exists(later)).exclude(Exists(running)).order_by("pk")[:_BATCH])
