"""Deletes stored chat completions that are older than their project keeps them."""

from __future__ import annotations

import time

from completions.models import StoredCompletion
from inference_site.accounts.retention import kept_since

_BATCH = 500


def prune(until: float) -> int:
    """Delete some, oldest first, until the monotonic clock passes ``until``; return how many."""
    deleted = 0
    for project, since in kept_since("completions_days"):
        mine = StoredCompletion.objects.filter(project=project)
        while time.monotonic() < until:
            # Ids grow with time, and the index of a project's rows is in their order.
            oldest = list(mine.order_by("pk").values_list("pk", "created_at")[:_BATCH])
            old = [pk for pk, created_at in oldest if created_at < since]
            deleted += mine.filter(pk__in=old).delete()[0]
            if len(old) < _BATCH:
                break
    return deleted
