"""Admin of stored chat completions: read-only."""

from __future__ import annotations

from django.contrib import admin

from completions.models import StoredCompletion
from worker.admin import ReadOnlyAdmin


@admin.register(StoredCompletion)
class StoredCompletionAdmin(ReadOnlyAdmin[StoredCompletion]):
    """What applications asked to keep."""

    list_display = ("public_id", "created_at", "project", "model", "metadata")
    list_filter = ("project",)
