"""Deleting what is older than it is kept for."""

from __future__ import annotations

import datetime as dt
import time
from typing import Any

from django.db.models import QuerySet


def delete_older(rows: QuerySet[Any], limit: dt.datetime, until: float, batch: int) -> int:
    """Delete rows that were created before ``limit``, oldest first; return how many.

    Their ids grow with time. A transaction deletes a ``batch`` of them, so that writers of the
    table wait for one at most; none begins once the monotonic clock has passed ``until``.
    """
    deleted = 0
    while time.monotonic() < until:
        oldest = rows.order_by("pk").values_list("pk", "created_at")[:batch]
        gone = [pk for pk, created_at in oldest if created_at < limit]
        deleted += rows.filter(pk__in=gone).delete()[0]
        if len(gone) < batch:
            break
    return deleted
