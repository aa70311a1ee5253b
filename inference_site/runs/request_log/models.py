"""Tables of the request log beside the generations: refused requests, and saved filters."""

from __future__ import annotations

from django.conf import settings
from django.contrib.postgres.indexes import BrinIndex
from django.db import models
from django.utils import timezone

LONGEST_PATH, LONGEST_MODEL = 120, 100
LONGEST_MESSAGE, LONGEST_PARAM = 500, 120


class Refusal(models.Model):
    """A request that was answered with an error and never became a generation.

    A row has no content of the request: values that its error's message quotes are taken out (see
    ``refusals.kept_message``). Above a rate, one row stands for ``count`` requests with the same
    error (see ``refusals.RefusalBuffer``).
    """

    created_at = models.DateTimeField(default=timezone.now)
    # Without constraints, as in Generation; null if the key is unknown.
    project = models.ForeignKey(
        "accounts.Project",
        on_delete=models.DO_NOTHING,
        null=True,
        db_constraint=False,
        db_index=False,
    )
    api_key = models.ForeignKey(
        "accounts.ApiKey",
        on_delete=models.DO_NOTHING,
        null=True,
        db_constraint=False,
        db_index=False,
    )
    method = models.CharField(max_length=16)
    path = models.CharField(max_length=LONGEST_PATH)
    # From the request, if the site has this model or the text looks like a name.
    model = models.CharField(max_length=LONGEST_MODEL, blank=True, default="")
    status = models.PositiveSmallIntegerField("HTTP status")
    error_code = models.CharField(max_length=64, blank=True, default="")
    param = models.CharField(max_length=LONGEST_PARAM, blank=True, default="", db_default="")
    message = models.CharField(max_length=LONGEST_MESSAGE, blank=True, default="", db_default="")
    request_id = models.CharField(max_length=128, blank=True, default="")
    # Of OpenTelemetry; empty without tracing.
    trace_id = models.CharField(max_length=32, blank=True, default="", db_default="")
    duration_ms = models.FloatField(default=0)
    count = models.PositiveIntegerField(default=1)

    class Meta:
        indexes = [
            models.Index(fields=["project", "-id"], name="refusal_by_project"),
            models.Index(fields=["api_key", "-id"], name="refusal_by_key"),
            models.Index(fields=["model", "-id"], name="refusal_by_model"),
            models.Index(fields=["status", "-id"], name="refusal_by_status"),
            models.Index(fields=["error_code", "-id"], name="refusal_by_error"),
            models.Index(fields=["request_id"], name="refusal_by_request"),
            BrinIndex(fields=["created_at"], autosummarize=True, name="refusal_by_time"),
        ]

    def __str__(self) -> str:
        return f"{self.status} {self.error_code} of {self.method} {self.path}"


class SavedFilter(models.Model):
    """Filters of the request log that a user has saved under a name, as a query string."""

    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="saved_filters"
    )
    name = models.CharField(max_length=60)
    query = models.CharField(max_length=1000, blank=True)

    class Meta:
        ordering = ["name"]
        constraints = [
            models.UniqueConstraint(fields=["user", "name"], name="saved_filter_name_once")
        ]

    def __str__(self) -> str:
        return self.name
