"""What a user has chosen to see of the request log."""

from __future__ import annotations

import datetime as dt
import heapq
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from django.contrib import messages
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
from completions.previews import with_previews as with_completion_previews
from inference_site.accounts.models import ApiKey, Project
from inference_site.admin_pages.bubbles import may_see_content
from inference_site.admin_pages.keyset import Found, first_since, look_down
from inference_site.admin_pages.labels import PREVIEW_LENGTH, preview
from inference_site.catalogue.catalogue import catalogue
from inference_site.generations.models import Generation, Status
from inference_site.kept_content.models import KeptContent
from inference_site.request_log.models import Refusal, SavedFilter
from responses_api.models import StoredResponse
from responses_api.previews import with_previews
from responses_api.search import HIT_ENDS, HIT_STARTS, SearchTooBroad, hits_in, search_time

REFUSED = "refused"
SPANS = {"1h": dt.timedelta(hours=1), "24h": dt.timedelta(days=1), "7d": dt.timedelta(days=7)}
FIELDS = ("q", "project", "key", "model", "status", "error", "since")
"""The parameters of a choice; what a saved filter keeps."""
_OWN_IDS = ("chatcmpl-", "cmpl-", "resp_", "embd-", "tok-")
_CURSOR = re.compile(r"([0-9]{1,18})-([0-9]{1,18})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Choice:
    """Filters, words, and the ids of generations and refusals below which the page begins."""

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
        """The id that is looked for, if ``q`` is one."""
        return self.q if self.q.startswith((*_OWN_IDS, "req_")) else ""

    @property
    def words(self) -> str:
        """The words that are looked for in prompts and answers."""
        return "" if self.id else self.q

    def generations(self) -> QuerySet[Generation] | None:
        """Return the accepted requests; None if the choice is of refused ones."""
        rows = self._shared(Generation)
        if self.status == REFUSED or self.status.isdecimal():
            return None
        if self.status:
            rows = rows.filter(status=self.status)
        elif self.error:
            # Only these have an error, and the index of the status finds them.
            rows = rows.filter(status__in=[Status.FAILED, Status.CANCELLED])
        if self.id:
            column = "request_id" if self.id.startswith("req_") else "public_id"
            rows = rows.filter(**{column: self.id})
        return rows

    def refusals(self) -> QuerySet[Refusal] | None:
        """Return the refused requests; None if the choice is of accepted ones."""
        rows = self._shared(Refusal)
        if self.words or (self.id and not self.id.startswith("req_")):
            return None
        if self.status.isdecimal():
            rows = rows.filter(status=self.status)
        elif self.status and self.status != REFUSED:
            return None
        return rows.filter(request_id=self.id) if self.id else rows

    def _shared(self, table: type[Model]) -> QuerySet[Any]:
        """Return the rows of a table by what both tables have."""
        given = {
            "project": self.project,
            "api_key": self.key,
            "model": self.model or None,
            "error_code": self.error or None,
        }
        rows = table._default_manager.filter(
            **{name: value for name, value in given.items() if value is not None}
        )
        if self.since:
            moment = timezone.now() - SPANS[self.since]
            first = first_since(table, "created_at", moment)
            rows = rows.filter(pk__gte=first, created_at__gte=moment)
        return rows


def chosen(query: QueryDict) -> Choice:
    """Return the choice in a query string; missing and invalid values become the defaults."""
    text = {name: query.get(name, "").replace("\0", "").strip()[:200] for name in FIELDS}
    status, since = text["status"], text["since"]
    is_known = status in (REFUSED, *Status.values) or (status.isascii() and len(status) == 3)
    cursor = _CURSOR.fullmatch(query.get("before", ""))
    return Choice(
        q=text["q"],
        project=_number(text["project"]),
        key=_number(text["key"]),
        model=text["model"],
        status=status if is_known and (status.isdecimal() or status.isalpha()) else "",
        error=text["error"],
        since=since if since in SPANS else "",
        before=(int(cursor[1]), int(cursor[2])) if cursor else None,
    )


def _number(given: str) -> int | None:
    return int(given) if given.isdecimal() and len(given) <= 18 else None


PAGE = 50
LOOKED_AT = 500
"""Rows of each table that are looked at: the page is the newest of them, facets count them all."""

Entry = Generation | Refusal


@dataclass(frozen=True, slots=True)
class Listed:
    """The rows of a page, newest first, and those that facets count.

    ``older`` is the cursor of the next page; None at the end of the log.
    """

    shown: Sequence[Entry]
    counted: Sequence[Entry]
    older: str | None
    is_cut_short: bool


class _Side:
    """One of the two tables, below an id."""

    def __init__(self, model: type[Model], rows: QuerySet[Any] | None, before: int | None) -> None:
        if before is None:
            before = (model._default_manager.aggregate(top=Max("pk"))["top"] or 0) + 1
        self.before = before
        found = Found([], None) if rows is None else look_down(rows, before, LOOKED_AT)
        self.rows: list[Any] = found.rows
        self.is_cut_short = found.reached is not None and len(found.rows) < LOOKED_AT
        self.has_more = found.reached is not None
        self._reached = found.reached
        self._model = model

    def floor(self) -> dt.datetime | None:
        """Return the time down to which it was searched; None: as far as its rows go."""
        if not self.is_cut_short:
            return None
        at = self._model._default_manager.filter(pk__gte=self._reached).order_by("pk")
        row = at.values_list("created_at", flat=True).first()
        return row if isinstance(row, dt.datetime) else None

    def below(self, shown: Sequence[Any]) -> int:
        """Return the id below which it goes on after these rows."""
        own = [row for row in shown if isinstance(row, self._model)]
        if self.is_cut_short and len(own) == len(self.rows) and self._reached is not None:
            return self._reached
        return own[-1].pk if own else self.before


def listed(choice: Choice) -> Listed:
    """Return the page of a choice that is not one of words."""
    generations, refusals = choice.before or (None, None)
    sides = (
        _Side(Generation, choice.generations(), generations),
        _Side(Refusal, choice.refusals(), refusals),
    )
    # What is older than a table was searched for may not come before what it still has.
    floors = [floor for side in sides if (floor := side.floor()) is not None]
    floor = max(floors, default=dt.datetime.min.replace(tzinfo=dt.UTC))
    merged: list[Any] = list(
        takewhile(
            lambda row: row.created_at >= floor,
            heapq.merge(*(side.rows for side in sides), key=_time, reverse=True),
        )
    )
    shown = merged[:PAGE]
    has_older = len(merged) > PAGE or any(side.has_more for side in sides)
    cursor = "-".join(str(side.below(shown)) for side in sides)
    is_cut_short = len(shown) < PAGE and any(side.is_cut_short for side in sides)
    return Listed(shown, merged, cursor if has_older else None, is_cut_short)


def _time(row: Any) -> dt.datetime:
    at: dt.datetime = row.created_at
    return at


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
    hits = hits_in(list(ids.values()), choice.words)
    older = None if found.reached is None else f"{found.reached}-0"
    marked = {public_id: _marked(hits[pk]) for public_id, pk in ids.items() if pk in hits}
    return Listed(shown, shown, older, older is not None and len(found.rows) < PAGE), marked


def _marked(hit: str) -> SafeString:
    """Return the text with what was found in ``mark`` elements."""
    text = str(escape(hit)).replace(HIT_STARTS, "<mark>").replace(HIT_ENDS, "</mark>")
    return mark_safe(text)  # noqa: S308  # Escaped above; the marks are ours.


_MOST = 12


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a facet: its text, how many have it, and the query that chooses it, or not."""

    label: str
    count: int
    query: str
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class Facet:
    """One property of requests, with its most frequent values."""

    title: str
    values: Sequence[Value]


def facets(
    choice: Choice, entries: Sequence[Entry], keys: Mapping[int, ApiKey], query: Any
) -> list[Facet]:
    """Return the facets of these entries; ``query`` is the query of the page."""
    labels = {pk: f"{key.name} ({key.prefix}…)" for pk, key in keys.items()}
    properties: list[tuple[str, str, Iterable[tuple[Any, int]], str]] = [
        ("Status", "status", ((_status(e), _weight(e)) for e in entries), choice.status),
        ("Error", "error", ((e.error_code, _weight(e)) for e in entries), choice.error),
        ("Key", "key", ((e.api_key_id, _weight(e)) for e in entries), str(choice.key or "")),
        ("Model", "model", ((e.model, _weight(e)) for e in entries), choice.model),
    ]
    return [
        Facet(title, _values(name, found, chosen, query, labels if name == "key" else {}))
        for title, name, found, chosen in properties
    ]


def _values(
    name: str,
    found: Iterable[tuple[Any, int]],
    chosen: str,
    query: Any,
    labels: Mapping[Any, str],
) -> list[Value]:
    counts: Counter[Any] = Counter()
    for value, weight in found:
        if value:
            counts[value] += weight
    return [
        Value(
            labels.get(value, str(value)),
            count,
            _with(query, name, "" if str(value) == chosen else str(value)),
            str(value) == chosen,
        )
        for value, count in counts.most_common(_MOST)
    ]


def _with(query: Any, name: str, value: str) -> str:
    changed = query.copy()
    changed.pop("before", None)
    changed.pop(name, None)
    if value:
        changed[name] = value
    return str(changed.urlencode())


def _status(entry: Entry) -> str:
    return str(entry.status)


def _weight(entry: Entry) -> int:
    return 1 if isinstance(entry, Generation) else entry.count


VIEW = "generations.view_generation"
_MOST_KEYS, _MOST_SAVED = 200, 30
_NOTHING = Listed([], [], None, False)
_TOO_BROAD = "Too much would have to be searched: choose a project, or give more words."
_ENDPOINTS = {
    "chat.completion": "/v1/chat/completions",
    "text_completion": "/v1/completions",
    "embedding": "/v1/embeddings",
    "infill": "/infill",
    "response": "/v1/responses",
    "response.compaction": "/v1/responses/compact",
    "response.input_tokens": "/v1/responses/input_tokens",
    "ollama": "/api/chat",
    "ollama.embedding": "/api/embed",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One request as the page shows it; times in milliseconds, None while they are unknown."""

    entry: Entry
    is_refused: bool
    page: str
    endpoint: str
    project: Project | None
    key: ApiKey | None
    content: Content | None
    hit: SafeString | str
    ttft_ms: float | None
    duration_ms: float | None


def requests_context(request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the page. Raise PermissionDenied without the permission."""
    if not request.user.has_perm(VIEW):
        raise PermissionDenied
    choice = chosen(request.GET)
    may_see = may_see_content(request)
    found, hits = _found(request, choice, may_see)
    keys = ApiKey.objects.in_bulk({e.api_key_id for e in found.counted if e.api_key_id})
    projects = Project.objects.in_bulk({e.project_id for e in found.shown if e.project_id})
    ids = [e.public_id for e in found.shown if isinstance(e, Generation)]
    known = contents(ids) if may_see else {}
    older = request.GET.copy()
    older["before"] = found.older or ""
    return {
        "choice": choice,
        "may_see": may_see,
        "lines": [_line(e, projects, keys, known, hits) for e in found.shown],
        "facets": facets(choice, found.counted, keys, request.GET),
        "counted": len(found.counted),
        "older": older.urlencode() if found.older else "",
        "is_cut_short": found.is_cut_short,
        "is_live": choice.before is None,
        "projects": Project.objects.values_list("pk", "name"),
        "keys": ApiKey.objects.filter(project=choice.project)[:_MOST_KEYS],
        "models": list(catalogue().models),
        "statuses": [*Status.values, REFUSED],
        "spans": {"1h": "Last hour", "24h": "Last 24 hours", "7d": "Last 7 days"}.items(),
        "query": _kept_page(request.GET),
        "saved": SavedFilter.objects.filter(user=_user(request)),
    }


def _found(
    request: HttpRequest, choice: Choice, may_see: bool
) -> tuple[Listed, dict[str, SafeString]]:
    if not choice.words:
        return listed(choice), {}
    if not may_see:
        messages.warning(request, "You do not have permission to search prompts and answers.")
        return _NOTHING, {}
    try:
        with search_time():
            return mentioning(choice)
    except SearchTooBroad:
        messages.warning(request, _TOO_BROAD)
        return _NOTHING, {}


def _line(
    entry: Entry,
    projects: dict[int, Project],
    keys: dict[int, ApiKey],
    known: dict[str, Content],
    hits: dict[str, SafeString],
) -> Line:
    shared: dict[str, Any] = {
        "entry": entry,
        "project": projects.get(entry.project_id or 0),
        "key": keys.get(entry.api_key_id or 0),
    }
    if not isinstance(entry, Generation):
        # Nearly all are POST.
        endpoint = entry.path if entry.method == "POST" else f"{entry.method} {entry.path}".strip()
        return Line(
            **shared,
            is_refused=True,
            page="",
            endpoint=endpoint,
            content=None,
            hit="",
            ttft_ms=None,
            duration_ms=entry.duration_ms,
        )
    page = reverse("admin:generations_generation_change", args=(entry.pk,))
    content = known.get(entry.public_id)
    return Line(
        **shared,
        is_refused=False,
        page=(content and content.page) or page,
        endpoint=_ENDPOINTS.get(entry.kind, entry.kind),
        content=content,
        hit=hits.get(entry.public_id, ""),
        ttft_ms=entry.ttft_ms,
        duration_ms=_duration_ms(entry.created_at, entry.finished_at),
    )


def _duration_ms(start: dt.datetime, end: dt.datetime | None) -> float | None:
    return None if end is None else (end - start).total_seconds() * 1000


def _kept_page(query: QueryDict) -> str:
    """Return the part of a query string that a saved filter keeps."""
    kept = QueryDict(mutable=True)
    for name in FIELDS:
        if value := query.get(name, "").replace("\0", "")[:200]:
            kept[name] = value
    return kept.urlencode()


def save_filter(request: HttpRequest) -> HttpResponse:
    """Keep or delete a filter of this user, and go back to the page."""
    if not request.user.has_perm(VIEW):
        raise PermissionDenied
    query = _kept_page(QueryDict(request.POST.get("query", "")[:1000]))[:1000]
    own = SavedFilter.objects.filter(user=_user(request))
    if request.POST.get("delete", "").isdecimal():
        own.filter(pk=request.POST["delete"][:18]).delete()
    elif name := request.POST.get("name", "").replace("\0", "").strip()[:60]:
        if own.exclude(name=name).count() >= _MOST_SAVED:
            messages.error(request, f"You have {_MOST_SAVED} saved filters: delete one first.")
        else:
            SavedFilter.objects.update_or_create(
                user_id=_user(request), name=name, defaults={"query": query}
            )
            messages.success(request, f"Saved {name}.")
    return HttpResponseRedirect(f"{reverse('admin:requests')}?{query}")


def _user(request: HttpRequest) -> int:
    return int(request.user.pk or 0)
