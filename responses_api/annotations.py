"""Columns that lists of responses and conversations show from other tables: status, previews."""

from __future__ import annotations

from typing import Any

from django.db.models import Case, Count, Max, OuterRef, QuerySet, Subquery, When
from django.db.models.fields.json import KT
from django.db.models.functions import Coalesce, Left

from inference_site.core.admin_pages.labels import PREVIEW_LENGTH
from inference_site.runs.models import Generation, Status
from responses_api.models import ENDED, Conversation, Item, ResponseStatus, StoredResponse

_OPEN = sorted(set(ResponseStatus) - ENDED)
_OPEN_STATUSES = {
    Status.QUEUED: ResponseStatus.QUEUED,
    Status.RUNNING: ResponseStatus.IN_PROGRESS,
}
"""The status of an open response by the status of its generation."""


def with_previews(
    rows: QuerySet[StoredResponse], length: int = PREVIEW_LENGTH
) -> QuerySet[StoredResponse]:
    """Add ``asked`` and ``answered``: the start of the last input message and of the answer.

    They have at most one character more than ``length``, which says that there is more.
    """
    texts = _message_starts(Item.objects.filter(response=OuterRef("pk")), length)
    asked = texts.filter(is_output=False).order_by("-position")[:1]
    answered = texts.filter(is_output=True).order_by("position")[:1]
    return rows.annotate(asked=Subquery(asked), answered=Subquery(answered))


def with_last_message(rows: QuerySet[Conversation]) -> QuerySet[Conversation]:
    """Add ``said``: the start of the last message of a conversation."""
    texts = _message_starts(Item.objects.filter(conversation=OuterRef("pk")))
    return rows.annotate(said=Subquery(texts.order_by("-conversation_position")[:1]))


def with_latest_response(rows: QuerySet[Conversation]) -> QuerySet[Conversation]:
    """Add ``response_count`` and ``latest_at``: how many responses, and when the last was made."""
    own = StoredResponse.objects.filter(conversation=OuterRef("pk")).order_by()
    counted = own.values("conversation").annotate(count=Count("pk"), latest=Max("created_at"))
    return rows.annotate(
        response_count=Subquery(counted.values("count")),
        latest_at=Subquery(counted.values("latest")),
    )


def _message_starts(items: QuerySet[Item], length: int = PREVIEW_LENGTH) -> QuerySet[Item, Any]:
    text = Coalesce(KT("data__content__0__text"), KT("data__content"))
    messages = items.filter(data__type="message")
    return messages.annotate(text=Left(text, length + 1)).values("text")


def with_generation_status(rows: QuerySet[Any]) -> QuerySet[Any]:
    """Add ``generation_status``: that of an open response's generation, null for ended ones."""
    generation = Generation.objects.filter(public_id=OuterRef("public_id")).values("status")
    status = Case(When(status__in=_OPEN, then=Subquery(generation[:1])))
    annotated: QuerySet[Any] = rows.annotate(generation_status=status)
    return annotated


def status_of(stored: StoredResponse, generation_status: str | None) -> str:
    """Return the status of a response.

    The row says only that a response is open. The status of its generation says whether it runs.
    """
    if stored.status in ENDED or generation_status is None:
        return stored.status
    return _OPEN_STATUSES.get(Status(generation_status), ResponseStatus(stored.status))


def in_status(rows: QuerySet[Any], status: ResponseStatus) -> QuerySet[Any]:
    """Return the responses with this ``status_of``; ``rows`` is ``with_generation_status``."""
    for generation_status, shown in _OPEN_STATUSES.items():
        if shown == status:
            return rows.filter(status__in=_OPEN, generation_status=generation_status)
    return rows.filter(status=status)
