"""What the request log shows of prompts and answers, to those who may see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django.db.models.fields.json import KT
from django.db.models.functions import Left
from django.urls import reverse
from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe

from completions.models import StoredCompletion
from completions.storage import with_previews as with_completion_previews
from inference_site.admin_pages.keyset import look_down
from inference_site.admin_pages.labels import PREVIEW_LENGTH, preview
from inference_site.console.request_log.choice import Choice
from inference_site.console.request_log.rows import PAGE, Listed
from inference_site.generations.models import Generation
from inference_site.kept_content.models import KeptContent
from responses_api.annotations import with_previews
from responses_api.models import StoredResponse
from responses_api.search import HIT_ENDS, HIT_STARTS, headlines


@dataclass(frozen=True, slots=True)
class Content:
    """How a prompt and its answer begin, and the page that has all of it, if it is stored."""

    asked: str
    answered: str
    page: str


def contents(public_ids: Sequence[str]) -> dict[str, Content]:
    """Return what is stored of these generations."""
    responses = StoredResponse.objects.filter(public_id__in=public_ids)
    completions = StoredCompletion.objects.filter(public_id__in=public_ids)
    columns = ("public_id", "pk", "asked", "answered")
    found = {
        "responses_api_storedresponse": with_previews(responses).values_list(*columns),
        "completions_storedcompletion": with_completion_previews(completions).values_list(*columns),
    }
    stored = {
        public_id: Content(
            preview(asked), preview(answered), reverse(f"admin:{table}_change", args=(pk,))
        )
        for table, rows in found.items()
        for public_id, pk, asked, answered in rows
    }
    return {**_kept(public_ids), **stored}


def _kept(public_ids: Sequence[str]) -> dict[str, Content]:
    """Return what is kept for debugging; the page of the generation has more of it."""
    length = PREVIEW_LENGTH + 1
    asked, answered = Left(KT("prompt__-1__content"), length), Left("answer", length)
    rows = KeptContent.objects.shown().filter(public_id__in=public_ids)
    texts = rows.values_list("public_id", asked, answered)
    return {id_: Content(preview(asked), preview(answered), "") for id_, asked, answered in texts}


def mentioning(choice: Choice) -> tuple[Listed, dict[str, SafeString]]:
    """Return the requests whose prompts or answers have the words, and where they have them.

    Only stored responses are indexed. To be called within ``search.search_time``.
    """
    rows = StoredResponse.objects.mentioning(choice.words, choice.project)
    of_choice = choice.generations()
    if of_choice is None:
        return Listed([], [], None, False), {}
    if choice.project is not None:
        rows = rows.filter(project=choice.project)
    if choice.key or choice.model or choice.status or choice.error or choice.since:
        rows = rows.filter(public_id__in=of_choice.values("public_id"))
    found = look_down(rows, choice.before[0] if choice.before else None, PAGE)
    ids = {row.public_id: row.pk for row in found.rows}
    shown = list(Generation.objects.filter(public_id__in=ids).order_by("-pk"))
    hits = headlines(list(ids.values()), choice.words)
    older = None if found.reached is None else f"{found.reached}-0"
    marked = {public_id: _marked(hits[pk]) for public_id, pk in ids.items() if pk in hits}
    return Listed(shown, shown, older, older is not None and len(found.rows) < PAGE), marked


def _marked(hit: str) -> SafeString:
    """Return the text with what was found in ``mark`` elements."""
    text = str(escape(hit)).replace(HIT_STARTS, "<mark>").replace(HIT_ENDS, "</mark>")
    return mark_safe(text)  # noqa: S308  # Escaped above; the marks are ours.
