"""Kept content: prompts and answers of requests with ``store: false``, for debugging."""

from __future__ import annotations

import datetime as dt

from django.db import models
from django.utils import timezone

from inference_site.core.site_settings.models import site_settings
from inference_site.core.storage.fields import ContentField


def kept_since() -> dt.datetime:
    """Return the time before which kept content has expired; now, if the setting is off."""
    hours = site_settings().debug_content_hours or 0
    return timezone.now() - dt.timedelta(hours=hours)


class KeptContentQuerySet(models.QuerySet["KeptContent"]):
    """Rows of kept content; expired rows may not have been deleted yet."""

    def shown(self) -> KeptContentQuerySet:
        """Return the rows that may be shown: those that have not expired."""
        return self.filter(created_at__gt=kept_since())


class KeptContent(models.Model):
    """Prompt and answer of one generation, shortened.

    ``prompt`` is a list of objects with ``role`` and ``content``: the newest turns that fit.
    """

    public_id = models.CharField("ID", max_length=64, unique=True)
    prompt = ContentField(default=list)
    answer = models.TextField(blank=True, default="")
    created_at = models.DateTimeField(default=timezone.now)

    objects = KeptContentQuerySet.as_manager()

    def __str__(self) -> str:
        return self.public_id
