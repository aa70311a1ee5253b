"""One request, accepted or refused: what happened, where its time went, and what to do about it.

The same template is the panel beside the list, which its script fetches, and a page of its own.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from django.contrib import admin
from django.contrib.auth.decorators import permission_required
from django.db.models import Model, QuerySet
from django.http import Http404, HttpRequest
from django.shortcuts import get_object_or_404
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils import timezone

from inference_site.accounts.models import ApiKey, Project
from inference_site.catalogue.model_labels import cost_label
from inference_site.console.key_states import state_at
from inference_site.console.request_filters import (
    ACCEPTED,
    ENDPOINTS,
    REFUSED,
    filters_of,
)
from inference_site.console.request_log_page import contents_of
from inference_site.console.tiles import VIEW_REQUESTS, may_filter
from inference_site.core.admin_pages.base_admin import keyset_page
from inference_site.core.admin_pages.labels import may_see_content, milliseconds
from inference_site.core.storage.old_rows import first_id_since
from inference_site.runs.models import Generation
from inference_site.runs.request_log.models import Refusal
from inference_site.runs.tool_calls.models import ToolCall

_TABLES: dict[str, type[Model]] = {ACCEPTED: Generation, REFUSED: Refusal}
_LONGEST_TEXT = 10_000
_MAX_CALLS = 50
_DISORDER = dt.timedelta(minutes=2)
"""Rows that are younger than a time by this much have higher ids than those before it."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the time of a request; ``start`` and ``length`` are percent of the whole."""

    name: str
    kind: str
    duration: str
    start: str
    length: str


@permission_required(VIEW_REQUESTS, raise_exception=True)
def request_page(request: HttpRequest, table: str, pk: int) -> TemplateResponse:
    """Show one request; with the parameter ``fragment`` only the part that the panel shows.

    The other parameters are the filters of the list, for the requests before and after it.
    """
    if table not in _TABLES:
        raise Http404
    row: Any = get_object_or_404(_TABLES[table], pk=pk)
    context = _facts_of(request, row) | _neighbours(request, row)
    if "fragment" in request.GET:
        return TemplateResponse(request, "console/request_panel.html", context)
    shown = {**admin.site.each_context(request), "title": "Request", "is_page": True, **context}
    return TemplateResponse(request, "console/request.html", shown)


def _facts_of(request: HttpRequest, row: Generation | Refusal) -> dict[str, Any]:
    key = ApiKey.objects.filter(pk=row.api_key_id).first() if row.api_key_id else None
    project = Project.objects.filter(pk=row.project_id).first() if row.project_id else None
    shared = {
        "row": row,
        "key": key,
        "key_state": key and state_at(key, row.created_at),
        "project": project,
        "advice": advice_for(request.user, row.error_code, row.status, key),
    }
    if isinstance(row, Refusal):
        facts = [
            ("Request ID", row.request_id),
            ("Trace ID", row.trace_id),
            ("Code", row.error_code),
            ("Parameter", row.param),
            ("Message", row.message),
            ("Requests alike", f"{row.count:,}" if row.count > 1 else ""),
        ]
        spans = [_span("Checks, refusal", "prefill", 0, row.duration_ms, row.duration_ms)]
        title = f"{row.method} {row.path}"
        own = {"is_refused": True, "facts": facts, "spans": spans, "request_title": title}
        return shared | own
    facts = [
        ("ID", row.public_id),
        ("Request ID", row.request_id),
        ("Trace ID", row.trace_id),
        ("Code", row.error_code),
        ("Finish reason", row.finish_reason),
        ("End user", row.end_user),
        ("Tags", ", ".join(row.tags)),
        ("Class", row.get_service_class_display()),
        ("Worker", row.worker),
        ("Attempts", str(row.attempt) if row.attempt > 1 else ""),
        ("Ignored parameters", ", ".join(row.ignored_params)),
        ("Tokens in", f"{row.input_tokens:,}, {row.cached_tokens:,} of them cached"),
        ("Tokens out", f"{row.output_tokens:,}, {row.reasoning_tokens:,} of them reasoning"),
        ("Tokens/s", f"{row.tokens_per_s:.0f}" if row.tokens_per_s else ""),
        ("Cost", cost_label(row.model, row.cost)),
    ]
    may_see = may_see_content(request)
    found = contents_of([row.public_id], _LONGEST_TEXT, _text) if may_see else {}
    details = reverse("admin:generations_generation_change", args=[row.pk])
    return shared | {
        "facts": facts,
        "spans": _waterfall(row),
        "request_title": ENDPOINTS.get(row.kind, row.kind),
        "may_see": may_see,
        "content": found.get(row.public_id),
        "details": details,
    }


def _text(text: str | None) -> str:
    """Return a text as the panel shows it, with a sign at its end if there is more."""
    shown = text or ""
    return shown if len(shown) <= _LONGEST_TEXT else f"{shown[:_LONGEST_TEXT]}…"


def _waterfall(row: Generation) -> Sequence[Span]:
    """Return the parts of a generation's time, then its calls of tools.

    Admission is what was done with its HTTP request before it was accepted. After a restart the
    queue includes the earlier attempts. Prefill includes the time until the engine began.
    """
    end = row.finished_at or timezone.now()
    before_ms = row.admission_ms or 0.0
    total_ms = max((end - row.created_at).total_seconds() * 1000 + before_ms, 0.001)

    def part(
        name: str, kind: str, start: dt.datetime | None, stop: dt.datetime | None
    ) -> Span | None:
        if start is None:
            return None
        first_ms = (start - row.created_at).total_seconds() * 1000 + before_ms
        length_ms = ((stop or end) - start).total_seconds() * 1000
        return _span(name, kind, first_ms, length_ms, total_ms)

    spans = [
        _span("Admission", "admission", 0, before_ms, total_ms) if before_ms else None,
        part("Queue", "queue", row.created_at, row.claimed_at),
        part("Prefill", "prefill", row.claimed_at, row.first_token_at),
        part("Decode", "decode", row.first_token_at, row.finished_at),
    ]
    for call in ToolCall.objects.of(row.public_id).defer("result")[:_MAX_CALLS]:
        spans.append(part(f"Tool {call.name}", "call", call.sent_at, call.finished_at))
    return [span for span in spans if span is not None]


def _span(name: str, kind: str, start_ms: float, length_ms: float, total_ms: float) -> Span:
    start = min(max(100 * start_ms / total_ms, 0), 99.5) if total_ms else 0.0
    length = min(max(100 * length_ms / total_ms, 0.5), 100 - start) if total_ms else 100.0
    return Span(name, kind, milliseconds(max(length_ms, 0)), f"{start:.2f}%", f"{length:.2f}%")


def _neighbours(request: HttpRequest, row: Generation | Refusal) -> dict[str, Any]:
    """Return the addresses of the newer and the older request of the list, by time."""
    filters = replace(filters_of(request.GET), before=None)
    query = request.GET.copy()
    query.pop("fragment", None)
    links = {"list_query": query.urlencode(), "newer": "", "older": ""}
    if filters.words or not may_filter(request.user, filters.metadata):
        return links
    lists = {ACCEPTED: filters.generations(), REFUSED: filters.refusals()}
    for name, nearest, first in (("newer", _nearest_after, min), ("older", _nearest_before, max)):
        found = [
            (one.created_at, table, one.pk)
            for table, rows in lists.items()
            if rows is not None
            for one in nearest(rows.values_list("pk", "created_at", named=True), row)
        ]
        if found:
            _, table, pk = first(found)
            address = reverse("admin:request", args=[table, pk])
            links[name] = f"{address}?{query.urlencode()}" if query else address
    return links


def _nearest_after(rows: QuerySet[Any], row: Generation | Refusal) -> list[Any]:
    """Return the oldest of some rows that is newer than a row of this or the other table."""
    after = row.pk
    if not isinstance(row, rows.model):
        rows = rows.filter(created_at__gt=row.created_at)
        after = first_id_since(rows.model, "created_at", row.created_at) - 1
    return keyset_page(rows, 1, after=after).rows


def _nearest_before(rows: QuerySet[Any], row: Generation | Refusal) -> list[Any]:
    """Return the newest of some rows that is older than a row of this or the other table."""
    before: int | None = row.pk
    if not isinstance(row, rows.model):
        rows = rows.filter(created_at__lt=row.created_at)
        later = row.created_at + _DISORDER
        # Else rows are still added, and the id is kept in memory.
        is_over = later < timezone.now()
        before = first_id_since(rows.model, "created_at", later) if is_over else None
    return keyset_page(rows, 1, before=before).rows


_KEY, _FLEET, _QUEUE, _SETTINGS = "key", "admin:fleet", "admin:queue", "admin:settings"
_BUDGETS, _KEYS = "admin:accounts_budget_changelist", "admin:accounts_apikey_changelist"
_ADVICE = {
    "invalid_api_key": ("The secret is not, or no longer, one of this site: make a key.", _KEYS),
    "key_revoked": ("The key was revoked: give the client another one.", _KEYS),
    "insufficient_scope": ("The key lacks a permission: add it to the key.", _KEY),
    "permission_denied": ("The key lacks a permission: add it to the key.", _KEY),
    "rate_limit_exceeded": ("A limit of the key or its project was reached: raise it.", _KEY),
    "insufficient_quota": ("A budget is spent: raise it, or wait until it resets.", _BUDGETS),
    "model_not_allowed": ("The key does not allow this model: add it to the key.", _KEY),
    "model_not_found": ("The project has no such model: compare the name, or add it.", _FLEET),
    "model_loading": ("The model was being loaded: the client should try again.", _FLEET),
    "no_worker": ("No worker serves the model: start one, or load the model.", _FLEET),
    "engine_unavailable": ("The model's server did not answer: see its state.", _FLEET),
    "worker_lost": ("The worker died during the run: see its log.", _FLEET),
    "worker_unavailable": ("The worker stopped or lost its storage: see its state.", _FLEET),
    "model_error": ("The model's library failed: see the worker's log.", _FLEET),
    "context_length_exceeded": (
        "The prompt is longer than the model's context: shorten it, or raise the length.",
        _FLEET,
    ),
    "queue_full": ("Too much waits: add a worker or slots, or stop what waits.", _QUEUE),
    "project_queue_full": ("Too much of one project waits: see the queue.", _QUEUE),
    "queue_timeout": ("It waited too long: add a worker or slots.", _QUEUE),
    "queue_memory_full": ("Redis is full: give it more memory.", _QUEUE),
    "stopped_by_operator": ("An operator stopped it in the console.", _QUEUE),
    "hook_failed": ("The site's own hook failed: see the log of the web process.", _SETTINGS),
    "database_unavailable": ("PostgreSQL did not answer: see its log.", ""),
    "queue_unavailable": ("Redis did not answer: see its log.", ""),
    "cancelled": ("The client closed the connection or cancelled the run.", ""),
}
_OF_STATUS = {
    400: "The request is invalid: correct the parameter that is named.",
    401: "The request has no valid key.",
    404: "The client asks for something that is not there: compare the address and the ids.",
    413: "The body is too large: send less, or raise MAX_BODY_BYTES.",
    415: "The client sends another type of content: it should be application/json.",
}
_PERMISSIONS = {
    _KEYS: "accounts.view_apikey",
    _BUDGETS: "accounts.view_budget",
    _SETTINGS: "site_settings.view_sitesettings",
}


@dataclass(frozen=True, slots=True)
class Advice:
    """A sentence, and the address and name of the page where it is done; "" without one."""

    sentence: str
    link: str = ""
    title: str = ""


_TITLES = {
    _KEYS: "API keys",
    _BUDGETS: "Budgets",
    _FLEET: "Models and workers",
    _QUEUE: "Queue",
    _SETTINGS: "Settings",
}


def advice_for(user: Any, code: str, status: int | str, key: ApiKey | None) -> Advice | None:
    """Return what to do about an error code; None if nothing is known about it.

    The link is left out if the user may not open its page.
    """
    sentence, route = _ADVICE.get(code, ("", ""))
    if not sentence:
        sentence = _OF_STATUS.get(status, "") if isinstance(status, int) else ""
    if not sentence:
        return None
    if route == _KEY:
        if key is None or not user.has_perm("accounts.view_apikey"):
            return Advice(sentence)
        link = reverse("admin:accounts_apikey_change", args=[key.pk])
        return Advice(sentence, link, f"Key {key.name}")
    if not route or not user.has_perm(_PERMISSIONS.get(route, VIEW_REQUESTS)):
        return Advice(sentence)
    return Advice(sentence, reverse(route), _TITLES[route])
