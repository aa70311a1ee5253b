"""Deletes kept content after the hours of the settings; all of it once nothing is to be kept."""

from __future__ import annotations

from inference_site.kept_content.models import KeptContent, kept_since
from inference_site.storage.postgresql import delete_older

_BATCH = 500


def prune(until: float) -> int:
    """Delete some, oldest first, until the monotonic clock passes ``until``; return how many."""
    return delete_older(KeptContent.objects.all(), kept_since(), until, _BATCH)
