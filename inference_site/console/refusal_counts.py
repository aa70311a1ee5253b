"""How many requests were refused in a time: a tile, and the change against the time before it.

There are no roll-ups of refusals: rows are counted, at most ``MAX_READ`` of them, newest first.
Rows above a rate stand for many requests, so this is enough for most floods.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import replace

from django.db.models import Count, Sum
from django.utils import timezone

from inference_site.core.storage.old_rows import first_id_since
from inference_site.runs.request_log.models import Refusal
from inference_site.runs.usage.queries import Span

MAX_READ = 50_000
_DISORDER = dt.timedelta(minutes=2)


def earlier(span: Span) -> Span:
    """Return the time of the same length before a span, with its filters."""
    return replace(span, start=span.start - (span.end - span.start), end=span.start)


def refused_in(span: Span) -> tuple[int, bool]:
    """Return how many requests were refused in a span, and whether there are more than that."""
    rows = Refusal.objects.filter(
        pk__gte=first_id_since(Refusal, "created_at", span.start),
        created_at__gte=span.start,
        created_at__lt=span.end,
    )
    after = span.end + _DISORDER
    if after < timezone.now():  # Else rows are still added, and the id is kept in memory.
        rows = rows.filter(pk__lt=first_id_since(Refusal, "created_at", after))
    filters = {"project": span.projects, "api_key": span.api_keys, "model": span.models}
    for column, values in filters.items():
        if values is not None:
            rows = rows.filter(**{f"{column}__in": list(values)})
    newest = rows.order_by("-pk")[: MAX_READ + 1]
    found = newest.aggregate(requests=Sum("count"), read=Count("pk"))
    return found["requests"] or 0, found["read"] > MAX_READ
