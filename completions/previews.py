"""How prompts and answers of stored chat completions begin."""

from __future__ import annotations

from django.db.models import QuerySet
from django.db.models.fields.json import KT
from django.db.models.functions import Coalesce, Left

from completions.models import StoredCompletion
from inference_site.admin_pages.labels import PREVIEW_LENGTH


def with_previews(rows: QuerySet[StoredCompletion]) -> QuerySet[StoredCompletion]:
    """Add ``asked`` and ``answered``: how the last message and the first answer begin."""
    asked = Coalesce(KT("messages__-1__content__0__text"), KT("messages__-1__content"))
    answered = KT("completion__choices__0__message__content")
    return rows.annotate(
        asked=Left(asked, PREVIEW_LENGTH + 1), answered=Left(answered, PREVIEW_LENGTH + 1)
    )
