"""KeptContent: what was asked and answered without being stored, for debugging."""

from __future__ import annotations

from django.db import models
from django.utils import timezone


class KeptContent(models.Model):
    """The content of one generation, shortened; deleted after hours.

    ``prompt`` is a list of objects with ``role`` and ``content``, the latest turns if not all.
    """

    public_id = models.CharField("ID", max_length=64, unique=True)
    prompt = models.JSONField(default=list)
    answer = models.TextField(blank=True, default="")
    created_at = models.DateTimeField(default=timezone.now)

    def __str__(self) -> str:
        return self.public_id
