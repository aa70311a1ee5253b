"""Admin of projects and API keys."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest

from inference_site.accounts.keys import issue_key, revoke_key
from inference_site.accounts.models import ApiKey, Project


@admin.register(Project)
class ProjectAdmin(admin.ModelAdmin[Project]):
    """Projects are deactivated, never deleted: their generations are the usage log."""

    list_display = ("name", "is_active", "created_at")
    list_filter = ("is_active",)
    search_fields = ("name",)

    def has_delete_permission(self, request: HttpRequest, obj: Project | None = None) -> bool:
        return False


@admin.register(ApiKey)
class ApiKeyAdmin(admin.ModelAdmin[ApiKey]):
    """A key is shown once, when it is made; later only its prefix. It is revoked, not deleted."""

    list_display = ("name", "shown_prefix", "project", "created_at", "revoked_at")
    list_filter = (("revoked_at", admin.EmptyFieldListFilter), "project")
    list_select_related = ("project",)
    search_fields = ("name", "prefix")
    fields = ("project", "name", "shown_prefix", "created_at", "revoked_at")
    readonly_fields = ("shown_prefix", "created_at", "revoked_at")
    actions = ("revoke",)

    @admin.display(description="key", ordering="prefix")
    def shown_prefix(self, record: ApiKey) -> str:
        return f"{record.prefix}…" if record.prefix else "—"

    def get_readonly_fields(self, request: HttpRequest, obj: ApiKey | None = None) -> Any:
        """A key keeps its project: its generations were accounted there."""
        return (*self.readonly_fields, "project") if obj else self.readonly_fields

    def has_delete_permission(self, request: HttpRequest, obj: ApiKey | None = None) -> bool:
        return False

    def save_model(self, request: HttpRequest, obj: ApiKey, form: Any, change: bool) -> None:
        """Make the key on the first save, and show its secret once."""
        if change:
            super().save_model(request, obj, form, change)
            return
        secret = issue_key(obj)
        messages.warning(request, f"Copy the key now; it is not shown again: {secret}")

    @admin.action(description="Revoke the selected keys", permissions=["change"])
    def revoke(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> None:
        """Refuse the keys from now on."""
        for record in queryset:
            revoke_key(record)
        messages.success(request, "Revoked; other web processes follow within 5 seconds.")
