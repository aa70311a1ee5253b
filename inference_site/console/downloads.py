"""Downloads of tables as CSV or JSONL, streamed in batches."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import orjson
from asgiref.sync import sync_to_async
from django.http import StreamingHttpResponse
from django.utils import timezone

from inference_site.core.storage.postgresql import release_connection_after
from inference_site.runs.usage.queries import csv_row

FORMS = {"csv": "text/csv; charset=utf-8", "jsonl": "application/x-ndjson"}
"""The content type by the form of a download."""

Rows = Sequence[Mapping[str, Any]]


def download(
    name: str, form: str, columns: Sequence[str], batches: Iterator[Rows]
) -> StreamingHttpResponse:
    """Return an answer with the rows of all batches; each batch is read in a thread."""
    answer = StreamingHttpResponse(_lines(form, columns, batches), content_type=FORMS[form])
    name = f"{name}-{timezone.now():%Y%m%d-%H%M}.{form}"
    answer["Content-Disposition"] = f'attachment; filename="{name}"'
    return answer


async def _lines(
    form: str, columns: Sequence[str], batches: Iterator[Rows]
) -> AsyncIterator[bytes]:
    read = sync_to_async(_next, thread_sensitive=False)
    if form == "csv":
        yield _csv([columns])
    while (rows := await read(batches)) is not None:
        if form == "csv":
            yield _csv(csv_row(row, columns) for row in rows)
        else:
            yield b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)


def _next(batches: Iterator[Rows]) -> Rows | None:
    with release_connection_after():
        return next(batches, None)


def _csv(rows: Iterable[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()
