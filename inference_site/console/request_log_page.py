"""The request log: accepted and refused requests in one list, with search, facets and filters.

A page merges two tables by time, generations and refusals, each paged by its own ids; the cursor of
a page is a pair of ids. So no row is copied, shown twice or left out, and no index on the time is
needed.
"""

from __future__ import annotations

import datetime as dt
import heapq
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import permission_required
from django.core.exceptions import PermissionDenied
from django.db.models import Max, Model, QuerySet
from django.db.models.fields.json import KT
from django.db.models.functions import Left
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.urls import reverse
from django.utils import timezone
from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe

from completions.models import StoredCompletion
from completions.storage import with_previews as with_completion_previews
from inference_site.accounts.models import ApiKey, Project
from inference_site.catalogue.catalogue import catalogue
from inference_site.core.admin_pages.base_admin import KeysetPage, keyset_page
from inference_site.core.admin_pages.labels import PREVIEW_LENGTH, may_see_content, preview
from inference_site.core.storage.old_rows import first_id_since
from inference_site.runs.kept_content.models import KeptContent
from inference_site.runs.models import Generation, Status
from inference_site.runs.request_log.models import Refusal, SavedFilter
from responses_api.annotations import with_previews as with_response_previews
from responses_api.models import StoredResponse
from responses_api.search import HIT_ENDS, HIT_STARTS, SearchTooBroad, headlines, search_timeout

VIEW = "generations.view_generation"
PAGE_SIZE = 50
MAX_ROWS_READ = 500
"""Rows read of each table: the page shows the newest of them, the facets count all."""
REFUSED = "refused"
SPANS = {"1h": dt.timedelta(hours=1), "24h": dt.timedelta(days=1), "7d": dt.timedelta(days=7)}
FILTER_NAMES = ("q", "project", "key", "model", "status", "error", "since")
"""Query parameters of the filters; a saved filter keeps these."""
ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "embd-", "tok-", "modr-", "audio-", "req_")
_CURSOR = re.compile(r"([0-9]{1,18})-([0-9]{1,18})", re.ASCII)
_MAX_KEYS, _MAX_SAVED, _MAX_FACET_VALUES = 200, 30, 12
_TOO_BROAD = "Too much would have to be searched: choose a project, or give more words."
_ENDPOINTS = {
    "chat.completion": "/v1/chat/completions",
    "text_completion": "/v1/completions",
    "embedding": "/v1/embeddings",
    "rerank": "/v1/rerank",
    "score": "/v1/score",
    "moderation": "/v1/moderations",
    "speech": "/v1/audio/speech",
    "speech.events": "/v1/audio/speech",
    "transcription": "/v1/audio/transcriptions",
    "translation": "/v1/audio/translations",
    "infill": "/infill",
    "response": "/v1/responses",
    "response.compaction": "/v1/responses/compact",
    "response.input_tokens": "/v1/responses/input_tokens",
    "message": "/v1/messages",
    "message.input_tokens": "/v1/messages/count_tokens",
    "ollama": "/api/chat",
    "ollama.embedding": "/api/embed",
    "vector_store.embedding": "files of vector stores",
    "vector_store.search": "/v1/vector_stores/{vector_store_id}/search",
}

LoggedRequest = Generation | Refusal


@dataclass(frozen=True, slots=True)
class LogFilters:
    """The filters of a page; ``before`` has the ids of generations and refusals below which it
    begins."""

    q: str = ""
    project: int | None = None
    key: int | None = None
    model: str = ""
    status: str = ""
    error: str = ""
    since: str = ""
    before: tuple[int, int] | None = None

    @property
    def id(self) -> str:
        """``q``, if it is an id."""
        return self.q if self.q.startswith(ID_PREFIXES) else ""

    @property
    def words(self) -> str:
        """``q``, if it is words to search in prompts and answers."""
        return "" if self.id else self.q

    def generations(self) -> QuerySet[Generation] | None:
        """Return the accepted requests; None if the filters exclude all of them."""
        if self.status == REFUSED or self.status.isdecimal():
            return None
        rows = self._filter_common(Generation)
        if self.status:
            rows = rows.filter(status=self.status)
        elif self.error:
            # Only these have an error; the index on the status finds them.
            rows = rows.filter(status__in=[Status.FAILED, Status.CANCELLED])
        if self.id:
            column = "request_id" if self.id.startswith("req_") else "public_id"
            rows = rows.filter(**{column: self.id})
        return rows

    def refusals(self) -> QuerySet[Refusal] | None:
        """Return the refused requests; None if the filters exclude all of them."""
        if self.words or (self.id and not self.id.startswith("req_")):
            return None
        rows = self._filter_common(Refusal)
        if self.status.isdecimal():
            rows = rows.filter(status=self.status)
        elif self.status and self.status != REFUSED:
            return None
        return rows.filter(request_id=self.id) if self.id else rows

    def _filter_common(self, table: type[Model]) -> QuerySet[Any]:
        """Return the rows of a table, filtered by the columns that both tables have."""
        columns = {
            "project": self.project,
            "api_key": self.key,
            "model": self.model or None,
            "error_code": self.error or None,
        }
        rows = table._default_manager.filter(
            **{name: value for name, value in columns.items() if value is not None}
        )
        if self.since:
            moment = timezone.now() - SPANS[self.since]
            first = first_id_since(table, "created_at", moment)
            rows = rows.filter(pk__gte=first, created_at__gte=moment)
        return rows


def filters_of(query: QueryDict) -> LogFilters:
    """Return the filters in a query string; missing and invalid values become the defaults."""
    text = {name: query.get(name, "").replace("\0", "").strip()[:200] for name in FILTER_NAMES}
    status, since = text["status"], text["since"]
    is_known = status in (REFUSED, *Status.values) or (status.isascii() and len(status) == 3)
    numbers = {
        name: int(text[name]) if text[name].isdecimal() and len(text[name]) <= 18 else None
        for name in ("project", "key")
    }
    cursor = _CURSOR.fullmatch(query.get("before", ""))
    return LogFilters(
        q=text["q"],
        project=numbers["project"],
        key=numbers["key"],
        model=text["model"],
        status=status if is_known and (status.isdecimal() or status.isalpha()) else "",
        error=text["error"],
        since=since if since in SPANS else "",
        before=(int(cursor[1]), int(cursor[2])) if cursor else None,
    )


@dataclass(frozen=True, slots=True)
class LogPage:
    """The requests of a page, newest first, and those that the facets count.

    ``older`` is the cursor of the next page, None at the end of the log. ``is_cut_short`` says that
    the search ran out of time before the page was full.
    """

    shown: Sequence[LoggedRequest] = ()
    counted: Sequence[LoggedRequest] = ()
    older: str | None = None
    is_cut_short: bool = False


class _TablePage:
    """The rows of one of the two tables, below an id."""

    def __init__(self, model: type[Model], rows: QuerySet[Any] | None, before: int | None) -> None:
        if before is None:
            before = (model._default_manager.aggregate(top=Max("pk"))["top"] or 0) + 1
        found = KeysetPage([], None)
        if rows is not None:
            found = keyset_page(rows, MAX_ROWS_READ, before=before)
        self._model, self._before, self._reached = model, before, found.reached
        self.rows: list[Any] = found.rows
        self.has_more = found.reached is not None
        self.is_cut_short = self.has_more and len(found.rows) < MAX_ROWS_READ

    def searched_to(self) -> dt.datetime | None:
        """Return the time of the oldest row that a search without enough time has read; else None.

        The table may still have matching rows that are older.
        """
        if not self.is_cut_short:
            return None
        following = self._model._default_manager.filter(pk__gte=self._reached).order_by("pk")
        at = following.values_list("created_at", flat=True).first()
        return at if isinstance(at, dt.datetime) else None

    def cursor_after(self, shown: Sequence[Any]) -> int:
        """Return the id below which this table continues after a page with these rows."""
        own = [row for row in shown if isinstance(row, self._model)]
        if self.is_cut_short and len(own) == len(self.rows) and self._reached is not None:
            return self._reached
        return own[-1].pk if own else self._before


def log_page(filters: LogFilters) -> LogPage:
    """Return the page of filters without words."""
    generations_before, refusals_before = filters.before or (None, None)
    tables = (
        _TablePage(Generation, filters.generations(), generations_before),
        _TablePage(Refusal, filters.refusals(), refusals_before),
    )
    # Rows of one table must not be shown before newer rows of the other that were not read yet.
    limits = [limit for table in tables if (limit := table.searched_to()) is not None]
    oldest = max(limits, default=dt.datetime.min.replace(tzinfo=dt.UTC))
    rows = heapq.merge(
        *(table.rows for table in tables), key=lambda row: row.created_at, reverse=True
    )
    merged: list[Any] = list(takewhile(lambda row: row.created_at >= oldest, rows))
    shown = merged[:PAGE_SIZE]
    has_older = len(merged) > PAGE_SIZE or any(table.has_more for table in tables)
    cursor = "-".join(str(table.cursor_after(shown)) for table in tables)
    is_cut_short = len(shown) < PAGE_SIZE and any(table.is_cut_short for table in tables)
    return LogPage(shown, merged, cursor if has_older else None, is_cut_short)


def page_with_words(filters: LogFilters) -> tuple[LogPage, dict[str, SafeString]]:
    """Return the requests whose prompts or answers have the words, and the matching texts by id.

    Only stored responses are indexed. Call it within ``search.search_time``.
    """
    rows = StoredResponse.objects.mentioning(filters.words, filters.project)
    generations = filters.generations()
    if generations is None:
        return LogPage(), {}
    if filters.project is not None:
        rows = rows.filter(project=filters.project)
    if filters.key or filters.model or filters.status or filters.error or filters.since:
        rows = rows.filter(public_id__in=generations.values("public_id"))
    found = keyset_page(rows, PAGE_SIZE, before=filters.before[0] if filters.before else None)
    ids = {row.public_id: row.pk for row in found.rows}
    shown = list(Generation.objects.filter(public_id__in=ids).order_by("-pk"))
    hits = headlines(list(ids.values()), filters.words)
    older = None if found.reached is None else f"{found.reached}-0"
    marked = {public_id: _mark_hits(hits[pk]) for public_id, pk in ids.items() if pk in hits}
    is_cut_short = older is not None and len(found.rows) < PAGE_SIZE
    return LogPage(shown, shown, older, is_cut_short), marked


def _mark_hits(text: str) -> SafeString:
    """Return a text as HTML, with the words that were found in ``mark`` elements."""
    marked = str(escape(text)).replace(HIT_STARTS, "<mark>").replace(HIT_ENDS, "</mark>")
    return mark_safe(marked)  # noqa: S308  # Escaped above; only the marks are HTML.


@dataclass(frozen=True, slots=True)
class Content:
    """Previews of a prompt and its answer, and the page with the full texts, if they are stored."""

    asked: str
    answered: str
    page: str


def _contents(public_ids: Sequence[str]) -> dict[str, Content]:
    """Return the previews of generations whose content is stored, or kept for debugging."""
    length = PREVIEW_LENGTH + 1
    asked_last, answer = Left(KT("prompt__-1__content"), length), Left("answer", length)
    kept = KeptContent.objects.shown().filter(public_id__in=public_ids)
    contents = {
        public_id: Content(preview(asked), preview(answered), "")
        for public_id, asked, answered in kept.values_list("public_id", asked_last, answer)
    }
    responses = StoredResponse.objects.filter(public_id__in=public_ids)
    completions = StoredCompletion.objects.filter(public_id__in=public_ids)
    columns = ("public_id", "pk", "asked", "answered")
    stored = {
        "responses_api_storedresponse": with_response_previews(responses).values_list(*columns),
        "completions_storedcompletion": with_completion_previews(completions).values_list(*columns),
    }
    for table, rows in stored.items():
        for public_id, pk, asked, answered in rows:
            page = reverse(f"admin:{table}_change", args=(pk,))
            contents[public_id] = Content(preview(asked), preview(answered), page)
    return contents


@dataclass(frozen=True, slots=True)
class FacetValue:
    """A value of a property: how many requests have it, and the query that chooses it.

    The query of a chosen value removes the choice.
    """

    label: str
    count: int
    query: str
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class Facet:
    """A property of requests, with its most frequent values."""

    title: str
    values: Sequence[FacetValue]


def _facets(
    filters: LogFilters,
    counted: Sequence[LoggedRequest],
    keys: Mapping[int, ApiKey],
    query: QueryDict,
) -> list[Facet]:
    """Return the facets of requests; ``query`` is the query of the page."""
    key_labels = {pk: f"{key.name} ({key.prefix}…)" for pk, key in keys.items()}
    properties: list[tuple[str, str, Callable[[Any], Any], str]] = [
        ("Status", "status", lambda one: str(one.status), filters.status),
        ("Error", "error", lambda one: one.error_code, filters.error),
        ("Key", "key", lambda one: one.api_key_id, str(filters.key or "")),
        ("Model", "model", lambda one: one.model, filters.model),
    ]
    facets = []
    for title, name, property_of, chosen in properties:
        counts: Counter[Any] = Counter()
        for one in counted:
            if value := property_of(one):
                counts[value] += 1 if isinstance(one, Generation) else one.count
        values = []
        for value, count in counts.most_common(_MAX_FACET_VALUES):
            is_chosen = str(value) == chosen
            changed = query.copy()
            changed.pop("before", None)
            changed.pop(name, None)
            if not is_chosen:
                changed[name] = str(value)
            label = key_labels.get(value, str(value)) if name == "key" else str(value)
            values.append(FacetValue(label, count, changed.urlencode(), is_chosen))
        facets.append(Facet(title, values))
    return facets


@dataclass(frozen=True, slots=True)
class LogRow:
    """One request as the page shows it; times in milliseconds, None while they are unknown."""

    request: LoggedRequest
    project: Project | None
    key: ApiKey | None
    is_refused: bool
    endpoint: str
    duration_ms: float | None
    page: str = ""
    content: Content | None = None
    hit: SafeString | str = ""
    ttft_ms: float | None = None


def _row(
    one: LoggedRequest,
    projects: Mapping[int, Project],
    keys: Mapping[int, ApiKey],
    contents: Mapping[str, Content],
    hits: Mapping[str, SafeString],
) -> LogRow:
    project, key = projects.get(one.project_id or 0), keys.get(one.api_key_id or 0)
    if not isinstance(one, Generation):
        # The method is shown only if it is not POST, as of nearly all requests.
        endpoint = one.path if one.method == "POST" else f"{one.method} {one.path}".strip()
        return LogRow(
            one, project, key, is_refused=True, endpoint=endpoint, duration_ms=one.duration_ms
        )
    duration_ms = None
    if one.finished_at is not None:
        duration_ms = (one.finished_at - one.created_at).total_seconds() * 1000
    content = contents.get(one.public_id)
    page = reverse("admin:generations_generation_change", args=(one.pk,))
    return LogRow(
        one,
        project,
        key,
        is_refused=False,
        endpoint=_ENDPOINTS.get(one.kind, one.kind),
        duration_ms=duration_ms,
        page=(content and content.page) or page,
        content=content,
        hit=hits.get(one.public_id, ""),
        ttft_ms=one.ttft_ms,
    )


def requests_context(request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the page.

    Raise PermissionDenied if the user may not view it.
    """
    if not request.user.has_perm(VIEW):
        raise PermissionDenied
    filters, may_see = filters_of(request.GET), may_see_content(request)
    page, hits = LogPage(), dict[str, SafeString]()
    if not filters.words:
        page = log_page(filters)
    elif not may_see:
        messages.warning(request, "You do not have permission to search prompts and answers.")
    else:
        try:
            with search_timeout():
                page, hits = page_with_words(filters)
        except SearchTooBroad:
            messages.warning(request, _TOO_BROAD)
    keys = ApiKey.objects.in_bulk({one.api_key_id for one in page.counted if one.api_key_id})
    projects = Project.objects.in_bulk({one.project_id for one in page.shown if one.project_id})
    ids = [one.public_id for one in page.shown if isinstance(one, Generation)]
    contents = _contents(ids) if may_see else {}
    older = request.GET.copy()
    older["before"] = page.older or ""
    return {
        "filters": filters,
        "may_see": may_see,
        "rows": [_row(one, projects, keys, contents, hits) for one in page.shown],
        "facets": _facets(filters, page.counted, keys, request.GET),
        "counted": len(page.counted),
        "older": older.urlencode() if page.older else "",
        "is_cut_short": page.is_cut_short,
        "is_live": filters.before is None,
        "projects": Project.objects.values_list("pk", "name"),
        "keys": ApiKey.objects.filter(project=filters.project)[:_MAX_KEYS],
        "models": list(catalogue().models),
        "statuses": [*Status.values, REFUSED],
        "spans": {"1h": "Last hour", "24h": "Last 24 hours", "7d": "Last 7 days"}.items(),
        "query": _saved_query(request.GET),
        "saved": SavedFilter.objects.filter(user=int(request.user.pk or 0)),
    }


def _saved_query(query: QueryDict) -> str:
    """Return the part of a query string that a saved filter keeps."""
    kept = QueryDict(mutable=True)
    for name in FILTER_NAMES:
        if value := query.get(name, "").replace("\0", "")[:200]:
            kept[name] = value
    return kept.urlencode()


@permission_required(VIEW, raise_exception=True)
def save_filter(request: HttpRequest) -> HttpResponse:
    """Save or delete a filter of this user, and redirect to the page."""
    query = _saved_query(QueryDict(request.POST.get("query", "")[:1000]))[:1000]
    user_id = int(request.user.pk or 0)
    own = SavedFilter.objects.filter(user=user_id)
    if request.POST.get("delete", "").isdecimal():
        own.filter(pk=request.POST["delete"][:18]).delete()
    elif name := request.POST.get("name", "").replace("\0", "").strip()[:60]:
        if own.exclude(name=name).count() >= _MAX_SAVED:
            messages.error(request, f"You have {_MAX_SAVED} saved filters: delete one first.")
        else:
            SavedFilter.objects.update_or_create(
                user_id=user_id, name=name, defaults={"query": query}
            )
            messages.success(request, f"Saved {name}.")
    return HttpResponseRedirect(f"{reverse('admin:requests')}?{query}")
