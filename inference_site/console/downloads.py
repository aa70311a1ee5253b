"""Downloads of tables as CSV or JSONL, streamed in batches, and that of the list of requests."""

from __future__ import annotations

import csv
import datetime as dt
import io
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

import orjson
from asgiref.sync import sync_to_async
from django.contrib import messages
from django.contrib.auth.decorators import permission_required
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponseRedirect, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.urls import reverse
from django.utils import timezone

from inference_site.accounts.models import ApiKey, Project
from inference_site.console.request_columns import LoggedRequest
from inference_site.console.request_filters import (
    ENDPOINTS,
    FILTER_NAMES,
    LogFilters,
    filters_of,
)
from inference_site.console.request_log_page import log_page
from inference_site.console.tiles import VIEW_REQUESTS, may_filter
from inference_site.core.admin_pages.base_admin import log_action
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.runs.models import Generation
from inference_site.runs.usage.queries import csv_row

FORMS = {"csv": "text/csv; charset=utf-8", "jsonl": "application/x-ndjson"}
"""The content type by the form of a download."""

_OF_PEOPLE = frozenset({"user", "tag", "metadata"})
"""Filters whose values may be of an end user."""

Rows = Sequence[Mapping[str, Any]]


def download(
    name: str, form: str, columns: Sequence[str], batches: Iterator[Rows]
) -> StreamingHttpResponse:
    """Return an answer with the rows of all batches; each is read and written in a thread."""
    answer = StreamingHttpResponse(_lines(form, columns, batches), content_type=FORMS[form])
    name = f"{name}-{timezone.now():%Y%m%d-%H%M}.{form}"
    answer["Content-Disposition"] = f'attachment; filename="{name}"'
    return answer


async def _lines(
    form: str, columns: Sequence[str], batches: Iterator[Rows]
) -> AsyncIterator[bytes]:
    @sync_to_async(thread_sensitive=False)
    def next_lines() -> bytes | None:
        with release_connection_after():
            rows = next(batches, None)
        if rows is None:
            return None
        if form == "csv":
            return _csv(csv_row(row, columns) for row in rows)
        return b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)

    if form == "csv":
        yield _csv([columns])
    while (lines := await next_lines()) is not None:
        yield lines


def _csv(rows: Iterable[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def log_export(request: HttpRequest, what: str, form: str, names: Sequence[str]) -> None:
    """Write the entry of a download with its filters, which have these names.

    Of a filter by end user or metadata only the name: ``manage.py forget`` does not read entries.
    """
    given = {name: value for name in names if (value := request.GET.get(name))}
    shown = {name: value[:100] for name, value in given.items() if name not in _OF_PEOPLE}
    parts = [urlencode(shown)] if shown else []
    parts += [f"a filter by {name}" for name in given if name in _OF_PEOPLE]
    chosen = f": {', '.join(parts)}" if parts else ""
    log_action(request, what, f"Exported as {form}{chosen}.")


MAX_EXPORTED = 100_000
"""Requests of one download, the newest; a day of a busy site."""
_BATCH = 500
_COLUMNS = (
    *("id", "request_id", "time", "endpoint", "model", "project", "key", "key_prefix", "end_user"),
    *("tags", "status", "error_code", "finish_reason", "requests", "streamed", "background"),
    *("queue_ms", "first_token_ms", "duration_ms", "input_tokens", "cached_tokens"),
    *("output_tokens", "reasoning_tokens", "cost"),
)


@permission_required(VIEW_REQUESTS, raise_exception=True)
def export(request: HttpRequest) -> HttpResponseBase:
    """Download the requests that match the filters, newest first, and write that to the audit log.

    A search for words and an order are not part of a download.
    """
    filters, form = filters_of(request.GET), request.GET.get("format", "csv")
    if not may_filter(request.user, filters.metadata):
        raise PermissionDenied
    if filters.words or form not in FORMS:
        messages.warning(request, "A search for words cannot be downloaded: use other filters.")
        return HttpResponseRedirect(f"{reverse('admin:requests')}?{request.GET.urlencode()}")
    log_export(request, "Requests", form, FILTER_NAMES)
    return download("requests", form, _COLUMNS, _batches(replace(filters, sort="", page=1)))


def _batches(filters: LogFilters) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows, newest first, until ``MAX_EXPORTED`` or the end of the log."""
    written = 0
    while written < MAX_EXPORTED:
        page = log_page(filters, size=_BATCH)
        keys = ApiKey.objects.in_bulk({one.api_key_id for one in page.shown if one.api_key_id})
        projects = Project.objects.in_bulk({one.project_id for one in page.shown if one.project_id})
        yield [_row(one, projects, keys) for one in page.shown]
        if page.older is None:
            return
        written += len(page.shown)
        generations, _, refusals = page.older.partition("-")
        filters = replace(filters, before=(int(generations), int(refusals)))


def _row(
    one: LoggedRequest, projects: dict[int, Project], keys: dict[int, ApiKey]
) -> dict[str, Any]:
    """Return the columns of one request; those that it does not have are None."""
    project, key = projects.get(one.project_id or 0), keys.get(one.api_key_id or 0)
    row: dict[str, Any] = dict.fromkeys(_COLUMNS) | {
        "request_id": one.request_id,
        "time": f"{one.created_at.astimezone(dt.UTC):%Y-%m-%dT%H:%M:%S.%fZ}",
        "model": one.model,
        "project": project and project.name,
        "key": key and key.name,
        "key_prefix": key and key.prefix,
        "status": one.status,
        "error_code": one.error_code,
    }
    if not isinstance(one, Generation):
        own = {"endpoint": one.path, "requests": one.count, "duration_ms": one.duration_ms}
        return row | own
    for name in (
        *("end_user", "finish_reason", "streamed", "background", "queue_ms", "duration_ms"),
        *("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"),
    ):
        row[name] = getattr(one, name)
    return row | {
        "id": one.public_id,
        "tags": "\n".join(one.tags),
        "endpoint": ENDPOINTS.get(one.kind, one.kind),
        "requests": 1,
        "first_token_ms": one.ttft_ms,
        "cost": f"{one.cost:f}",
    }
