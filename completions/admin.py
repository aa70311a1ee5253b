"""Admin of stored chat completions: read-only."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from completions.models import StoredCompletion
from worker.admin import UncountedPaginator


@admin.register(StoredCompletion)
class StoredCompletionAdmin(admin.ModelAdmin[StoredCompletion]):
    """What applications asked to keep."""

    list_display = ("public_id", "created_at", "project", "model", "metadata")
    list_filter = ("project",)
    list_select_related = ("project",)
    list_per_page = 50
    ordering = ("-id",)
    sortable_by = ()
    search_fields = ("public_id__exact",)
    search_help_text = "A whole id"
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = UncountedPaginator

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
