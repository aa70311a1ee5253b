"""How prompts and answers begin, for lists of those who may see content."""

from __future__ import annotations

from typing import Any

from django.db.models import Case, OuterRef, QuerySet, Subquery, When
from django.db.models.fields.json import KT
from django.db.models.functions import Coalesce, Left

from inference_site.admin_pages.labels import PREVIEW_LENGTH
from inference_site.generations.models import Generation, Status
from responses_api.models import ENDED, Conversation, Item, ResponseStatus, StoredResponse


def with_previews(rows: QuerySet[StoredResponse]) -> QuerySet[StoredResponse]:
    """Add ``asked`` and ``answered``: how the last input message and the first answer begin."""
    texts = _beginnings(Item.objects.filter(response=OuterRef("pk")))
    asked = texts.filter(is_output=False).order_by("-position")[:1]
    answered = texts.filter(is_output=True).order_by("position")[:1]
    return rows.annotate(asked=Subquery(asked), answered=Subquery(answered))


def with_last_message(rows: QuerySet[Conversation]) -> QuerySet[Conversation]:
    """Add ``said``: how the last message of a conversation begins."""
    texts = _beginnings(Item.objects.filter(conversation=OuterRef("pk")))
    return rows.annotate(said=Subquery(texts.order_by("-conversation_position")[:1]))


def _beginnings(items: QuerySet[Item]) -> QuerySet[Item, Any]:
    """Return how the messages among these items begin, as their only column."""
    text = Coalesce(KT("data__content__0__text"), KT("data__content"))
    messages = items.filter(data__type="message")
    return messages.annotate(text=Left(text, PREVIEW_LENGTH + 1)).values("text")


_OPEN = sorted(set(ResponseStatus) - ENDED)
_STATUS_OF_RUN = {
    Status.QUEUED: ResponseStatus.QUEUED,
    Status.RUNNING: ResponseStatus.IN_PROGRESS,
}


def with_run(rows: QuerySet[StoredResponse]) -> QuerySet[StoredResponse]:
    """Add ``run``, the status of the generation of each response that has not ended."""
    return rows.annotate(run=status_of_run())


def status_of_run() -> Case:
    """Return the status of the generation of a row of responses, null if the response has ended."""
    generation = Generation.objects.filter(public_id=OuterRef("public_id")).values("status")
    return Case(When(status__in=_OPEN, then=Subquery(generation[:1])))


def status_of(stored: StoredResponse, run: str | None) -> str:
    """Return the status of a response; ``run`` is the status of its generation, if it has one.

    The row of a response says only that it has not ended: whether it runs, its generation knows.
    """
    if stored.status in ENDED or run is None:
        return stored.status
    return _STATUS_OF_RUN.get(Status(run), ResponseStatus(stored.status))
