"""Responses as JSON lines: each with what it was sent, a few at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
from asgiref.sync import sync_to_async
from django.db.models import Prefetch, QuerySet
from django.http import StreamingHttpResponse

from inference_site.admin_pages.keyset import look_down
from inference_site.storage.postgresql import release_connection_after
from responses_api.models import Item, StoredResponse
from responses_api.search import search_time
from responses_api.state.reading import current_responses
from responses_api.wire.response import ResponseObject

_AT_ONCE = 100


def export(rows: QuerySet[StoredResponse]) -> StreamingHttpResponse:
    """Return the responses as a download, newest first; no more than a few are in memory."""
    answer = StreamingHttpResponse(_lines(rows), content_type="application/x-ndjson")
    answer["Content-Disposition"] = 'attachment; filename="responses.jsonl"'
    return answer


async def _lines(rows: QuerySet[StoredResponse]) -> AsyncIterator[bytes]:
    before: int | None = None
    read = sync_to_async(_some, thread_sensitive=False)
    while True:
        lines, before = await read(rows, before)
        yield lines
        if before is None:
            return


def _some(rows: QuerySet[StoredResponse], before: int | None) -> tuple[bytes, int | None]:
    """Return the next lines, and where those after them begin. Raise SearchTooBroad."""
    given = Prefetch(
        "items", Item.objects.filter(is_output=False).order_by("position"), to_attr="given"
    )
    rows = rows.select_related("previous", "conversation").prefetch_related(given)
    with release_connection_after():
        with search_time():
            found = look_down(rows, before, _AT_ONCE)
        responses = current_responses(found.rows)
    lines = [_line(row, response) for row, response in zip(found.rows, responses, strict=True)]
    return b"".join(lines), found.reached


def _line(row: Any, response: ResponseObject) -> bytes:
    given = [{"id": item.public_id, **item.data} for item in row.given]
    return orjson.dumps({**response.model_dump(), "input": given}, option=orjson.OPT_APPEND_NEWLINE)
