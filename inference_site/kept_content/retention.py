"""Deletes kept content after the hours of the settings; all of it once nothing is to be kept."""

from __future__ import annotations

import datetime as dt

from django.utils import timezone

from inference_site.kept_content.models import KeptContent
from inference_site.site_settings.current import site_settings
from inference_site.storage.old_rows import delete_older

_BATCH = 500


def prune(until: float) -> int:
    """Delete some, oldest first, until the monotonic clock passes ``until``; return how many."""
    hours = site_settings().debug_content_hours or 0
    limit = timezone.now() - dt.timedelta(hours=hours)
    return delete_older(KeptContent.objects.all(), limit, until, _BATCH)
