"""Admin of stored chat completions: read-only."""

from __future__ import annotations

from django.contrib import admin

from completions.models import StoredCompletion
from worker.admin.generations import ModelFilter
from worker.admin.keyset import KeysetAdmin, SinceFilter


@admin.register(StoredCompletion)
class StoredCompletionAdmin(KeysetAdmin):
    """What applications asked to keep."""

    list_display = ("public_id", "created_at", "project", "model", "metadata")
    list_filter = (ModelFilter, SinceFilter, "project")
    list_select_related = ("project",)
