"""Deletes stored chat completions that are older than their project keeps them."""

from __future__ import annotations

from completions.models import StoredCompletion
from inference_site.accounts.retention import kept_since
from inference_site.storage.postgresql import delete_older

_BATCH = 500


def prune(until: float) -> int:
    """Delete some, oldest first, until the monotonic clock passes ``until``; return how many."""
    deleted = 0
    for project, since in kept_since("completions_days"):
        # The index of a project's rows is in the order of their ids.
        mine = StoredCompletion.objects.filter(project=project)
        deleted += delete_older(mine, since, until, _BATCH)
    return deleted
