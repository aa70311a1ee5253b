"""How prompts and answers begin, for lists of those who may see content."""

from __future__ import annotations

from typing import Any

from django.db.models import OuterRef, QuerySet, Subquery
from django.db.models.fields.json import KT
from django.db.models.functions import Coalesce, Left

from inference_site.admin_pages.labels import PREVIEW_LENGTH
from responses_api.models import Conversation, Item, StoredResponse


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
