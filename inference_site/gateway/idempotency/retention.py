"""Deletes keyed requests after a day, and kept answers beyond the limits of a project."""

from __future__ import annotations

import datetime as dt
import time

from django.conf import settings
from django.db.models import Count, Q, Sum
from django.utils import timezone

from inference_site.core.storage.postgresql import delete_older
from inference_site.gateway.idempotency.models import KEPT_S, MOST_BYTES, KeyedRequest, trim_answers

_BATCH = 500


def prune(until: float) -> int:
    """Delete the oldest until the monotonic clock passes ``until``; return how many."""
    limit = timezone.now() - dt.timedelta(seconds=KEPT_S)
    deleted = delete_older(KeyedRequest.objects.all(), limit, until, _BATCH)
    kept = KeyedRequest.objects.filter(kept_bytes__gt=0).values("project_id").order_by()
    sums = kept.annotate(keys=Count("id"), bytes=Sum("kept_bytes"))
    over = sums.filter(Q(keys__gt=settings.IDEMPOTENCY_KEYS) | Q(bytes__gt=MOST_BYTES))
    for project_id in list(over.values_list("project_id", flat=True)):
        while time.monotonic() < until and (trimmed := trim_answers(project_id)):
            deleted += trimmed
    return deleted
