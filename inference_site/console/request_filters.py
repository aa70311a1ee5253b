"""The filters of the page of requests: read from a query string, applied to both tables.

Filters without an index (endpoint, metadata, duration) are only for searches that read
windows of ids within a time limit, as ``keyset_page`` does.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.contrib import admin
from django.db.models import Exists, F, Model, OuterRef, Q, QuerySet
from django.http import HttpRequest, QueryDict
from django.utils import timezone
from unfold.contrib.filters.forms import AutocompleteDropdownForm

from completions.models import StoredCompletion
from inference_site.accounts.models import ApiKey
from inference_site.core.admin_pages.base_admin import SPANS, id_of
from inference_site.core.storage.old_rows import first_id_since
from inference_site.runs.models import Generation, Status
from inference_site.runs.request_log.models import Refusal
from responses_api.models import StoredResponse

REFUSED, UNFINISHED = "refused", "unfinished"
"""Values of the filter by status beside those of generations and HTTP; the second is "queued or
running"."""
ACCEPTED = "accepted"
"""Beside ``REFUSED``, the name of the table in the address of a request's page."""
SORTS = ("time", "duration", "ttft", "queue", "tokens", "cost")
"""Columns by which a list can be sorted; with a minus, the largest values come first."""
FILTER_NAMES = (
    *("q", "project", "key", "model", "status", "error", "since"),
    *("kind", "user", "metadata", "slower", "sort"),
)
"""Query parameters of the filters; a saved filter keeps these."""
ID_PREFIXES = (
    *("chatcmpl-", "cmpl-", "resp_", "msg_", "embd-", "tok-", "modr-", "audio-", "rerank-"),
    *("score-", "infill-", "ollama-", "vsearch_", "req_"),
)
ENDPOINTS = {
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
"""Paths by the kind of their generations."""
_CURSOR = re.compile(r"([0-9]{1,18})-([0-9]{1,18})", re.ASCII)
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,3})?", re.ASCII)
_LAST_PAGE = 1_000
_MAX_KEYS = 200


@dataclass(frozen=True, slots=True)
class LogFilters:
    """The filters of a page; ``before`` has the ids of generations and refusals below which it
    begins.

    ``metadata`` is ``name=value``; ``slower`` is in seconds, 0 for all. ``page`` is the number of a
    page of a sorted list, from 1.
    """

    q: str = ""
    project: int | None = None
    key: int | None = None
    model: str = ""
    status: str = ""
    error: str = ""
    since: str = ""
    kind: str = ""
    user: str = ""
    metadata: str = ""
    slower: float = 0
    sort: str = ""
    page: int = 1
    before: tuple[int, int] | None = None

    @property
    def id(self) -> str:
        """``q``, if it is an id."""
        return self.q if self.q.startswith(ID_PREFIXES) else ""

    @property
    def words(self) -> str:
        """``q``, if it is words to search in prompts and answers."""
        return "" if self.id else self.q

    @property
    def has_columns(self) -> bool:
        """Whether a filter other than ``q`` and the project is set."""
        columns = (self.key, self.model, self.status, self.error, self.since)
        return any((*columns, self.kind, self.user, self.metadata, self.slower))

    @property
    def is_of_refusals(self) -> bool:
        """Whether the status is one that only refused requests have."""
        return self.status == REFUSED or self.status.isdecimal()

    def generations(self) -> QuerySet[Generation] | None:
        """Return the accepted requests; None if the filters exclude all of them."""
        if self.is_of_refusals:
            return None
        rows = self._filter_common(Generation)
        if self.status == UNFINISHED:
            rows = rows.filter(finished_at=None)
        elif self.status:
            rows = rows.filter(status=self.status)
        elif self.error:
            # Only these have an error; the index on the status finds them.
            rows = rows.filter(status__in=[Status.FAILED, Status.CANCELLED])
        if self.kind:
            rows = rows.filter(kind=self.kind)
        if self.user:
            rows = rows.filter(end_user=self.user)
        if self.metadata:
            # The pair is in the tags, or in the stored object. That takes a look-up by id in two
            # tables for each row, so it is only for bounded searches.
            name, _, value = self.metadata.partition("=")
            of_row = {"public_id": OuterRef("public_id"), "metadata__contains": {name: value}}
            responses = Exists(StoredResponse.objects.filter(deleted_at=None, **of_row))
            completions = Exists(StoredCompletion.objects.filter(**of_row))
            tagged = Q(tags__contains=[self.metadata])
            rows = rows.filter(tagged | Q(responses) | Q(completions))
        if self.slower:
            length = dt.timedelta(seconds=self.slower)
            ended = Q(finished_at__gt=F("created_at") + length)
            runs = Q(finished_at=None, created_at__lt=timezone.now() - length)
            rows = rows.filter(ended | runs)
        if self.id:
            column = "request_id" if self.id.startswith("req_") else "public_id"
            rows = rows.filter(**{column: self.id})
        return rows

    def refusals(self) -> QuerySet[Refusal] | None:
        """Return the refused requests; None if the filters exclude all of them."""
        if self.words or (self.id and not self.id.startswith("req_")):
            return None
        if self.user or self.metadata:  # Nothing of a refused request's content is kept.
            return None
        rows = self._filter_common(Refusal)
        if self.status.isdecimal():
            rows = rows.filter(status=self.status)
        elif self.status and self.status != REFUSED:
            return None
        if self.kind:
            rows = rows.filter(path=ENDPOINTS[self.kind])
        if self.slower:
            rows = rows.filter(duration_ms__gt=self.slower * 1000)
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


def key_within(project: int | None, key: int | None) -> int | None:
    """Return the key of a filter; None if another project is chosen, as after a change of it."""
    if project is None or key is None:
        return key
    return key if ApiKey.objects.filter(pk=key, project=project).exists() else None


def project_form(request: HttpRequest, chosen: int | None) -> AutocompleteDropdownForm:
    """Return the filter by project, which is found by typing: all projects are too many."""
    return AutocompleteDropdownForm(
        request=request,
        name="project",
        label="Project",
        choices=(),
        field=ApiKey._meta.get_field("project"),
        model_admin=admin.site.get_model_admin(ApiKey),
        data={"project": chosen},
    )


def offered_keys(project: int | None, chosen: int | None) -> list[ApiKey]:
    """Return the keys that a filter offers: the newest of the project, and the chosen one."""
    keys = list(ApiKey.objects.filter(project=project)[:_MAX_KEYS])
    if chosen is not None and all(key.pk != chosen for key in keys):
        keys += ApiKey.objects.filter(pk=chosen)
    return keys


def filters_of(query: QueryDict) -> LogFilters:
    """Return the filters in a query string; missing and invalid values become the defaults."""
    text = {name: query.get(name, "").strip()[:200] for name in FILTER_NAMES}
    status, since, kind = text["status"], text["since"], text["kind"]
    known = (REFUSED, UNFINISHED, *Status.values)
    is_http = status.isascii() and status.isdecimal() and len(status) == 3
    cursor = _CURSOR.fullmatch(query.get("before", ""))
    page = query.get("page", "")
    is_page = page.isascii() and page.isdecimal() and len(page) <= 4
    project = id_of(text["project"])
    return LogFilters(
        q=text["q"],
        project=project,
        key=key_within(project, id_of(text["key"])),
        model=text["model"],
        status=status if status in known or is_http else "",
        error=text["error"],
        since=since if since in SPANS else "",
        kind=kind if kind in ENDPOINTS else "",
        user=text["user"],
        metadata=text["metadata"] if "=" in text["metadata"] else "",
        slower=float(text["slower"]) if _SECONDS.fullmatch(text["slower"]) else 0,
        sort=text["sort"] if text["sort"].removeprefix("-") in SORTS else "",
        page=min(max(int(page), 1), _LAST_PAGE) if is_page else 1,
        before=(int(cursor[1]), int(cursor[2])) if cursor else None,
    )


@dataclass(frozen=True, slots=True)
class Tab:
    """A view of the list: its title, and the query that opens it with the other filters kept."""

    title: str
    query: str
    is_chosen: bool


_TABS: tuple[tuple[str, dict[str, str], Callable[[LogFilters], bool]], ...] = (
    ("All", {}, lambda filters: not (filters.status or filters.slower or filters.sort)),
    ("Failed", {"status": Status.FAILED.value}, lambda filters: filters.status == Status.FAILED),
    (
        "Slow",
        {"sort": "-duration"},
        lambda filters: not filters.status and (filters.sort == "-duration" or filters.slower > 0),
    ),
    ("Running", {"status": UNFINISHED}, lambda filters: filters.status == UNFINISHED),
    ("Refused", {"status": REFUSED}, lambda filters: filters.is_of_refusals),
)


def tabs_of(filters: LogFilters, query: QueryDict) -> list[Tab]:
    """Return the tabs above the list; ``query`` is the query of the page."""
    tabs = []
    for title, chosen, is_chosen in _TABS:
        changed = query.copy()
        for name in ("before", "page", "status", "slower", "sort", "error"):
            changed.pop(name, None)
        for name, value in chosen.items():
            changed[name] = value
        tabs.append(Tab(title, changed.urlencode(), is_chosen(filters)))
    return tabs


def saved_query(query: QueryDict) -> str:
    """Return the part of a query string that a saved filter keeps."""
    kept = QueryDict(mutable=True)
    for name in FILTER_NAMES:
        if value := query.get(name, "").replace("\0", "")[:200]:
            kept[name] = value
    return kept.urlencode()


def posted_query(request: HttpRequest) -> str:
    """Return the query of the list that a form of its page has sent along."""
    return saved_query(QueryDict(request.POST.get("query", "")[:1000]))[:1000]
