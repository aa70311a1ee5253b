"""KeptContent: what was asked and answered without being stored, for debugging."""

from __future__ import annotations

import datetime as dt

from django.db import models
from django.utils import timezone

from inference_site.site_settings.current import site_settings
from inference_site.storage.fields import ContentField


def kept_since() -> dt.datetime:
    """Return the moment from which on content is kept; what is older is to be deleted."""
    hours = site_settings().debug_content_hours or 0
    return timezone.now() - dt.timedelta(hours=hours)


class KeptContentQuerySet(models.QuerySet["KeptContent"]):
    """Kept content, of which much may not have been deleted yet."""

    def shown(self) -> KeptContentQuerySet:
        """Return what may be shown: nothing that is to be deleted."""
        return self.filter(created_at__gt=kept_since())


class KeptContent(models.Model):
    """The content of one generation, shortened; deleted after hours.

    ``prompt`` is a list of objects with ``role`` and ``content``, the latest turns if not all.
    """

    public_id = models.CharField("ID", max_length=64, unique=True)
    prompt = ContentField(default=list)
    answer = models.TextField(blank=True, default="")
    created_at = models.DateTimeField(default=timezone.now)

    objects = KeptContentQuerySet.as_manager()

    def __str__(self) -> str:
        return self.public_id
