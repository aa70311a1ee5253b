"""The page of the request log, and the filters that its users keep."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.urls import reverse
from django.utils.safestring import SafeString

from inference_site.accounts.models import ApiKey, Project
from inference_site.admin_pages.bubbles import may_see_content
from inference_site.catalogue.catalogue import catalogue
from inference_site.console.request_log.choice import FIELDS, REFUSED, Choice, chosen
from inference_site.console.request_log.content import Content, contents, mentioning
from inference_site.console.request_log.facets import facets
from inference_site.console.request_log.rows import Entry, Listed, listed
from inference_site.generations.models import Generation, Status
from inference_site.request_log.models import SavedFilter
from responses_api.search import SearchTooBroad, search_timeout

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
    "message": "/v1/messages",
    "message.input_tokens": "/v1/messages/count_tokens",
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
        "query": _kept(request.GET),
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
        with search_timeout():
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


def _kept(query: QueryDict) -> str:
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
    query = _kept(QueryDict(request.POST.get("query", "")[:1000]))[:1000]
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
