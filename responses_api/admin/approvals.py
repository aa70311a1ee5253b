"""Admin of the approvals of MCP calls, read-only: what waits, and what was answered."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString

from inference_site.core.admin_pages.base_admin import KeysetAdmin
from inference_site.core.admin_pages.labels import (
    may_see_content,
    preview,
    status_label,
    time_label,
)
from responses_api.models import McpApproval


class AnswerFilter(admin.SimpleListFilter):
    """Filter by whether an approval was answered."""

    title, parameter_name = "answer", "answer"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("waiting", "Waiting"), ("answered", "Answered")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        match self.value():
            case "waiting":
                return queryset.filter(answered_at=None)
            case "answered":
                return queryset.exclude(answered_at=None)
        return queryset


@admin.register(McpApproval)
class McpApprovalAdmin(KeysetAdmin):
    """The approvals; those who may see content also see the arguments."""

    list_display = ("asked", "project", "server_label", "name", "answer", "answered_by")
    list_display_links = None  # The list shows all columns.
    list_filter = (AnswerFilter, "project")
    list_select_related = ("project", "item")
    search_fields = ("item__public_id__exact",)

    def get_list_display(self, request: HttpRequest) -> tuple[Any, ...]:
        """Add the arguments for users who may see content."""
        shown = tuple(self.list_display)
        return (*shown[:4], "arguments", *shown[4:]) if may_see_content(request) else shown

    @admin.display(description="asked (UTC)")
    def asked(self, approval: McpApproval) -> SafeString:
        return time_label(approval.asked_at)

    @admin.display(description="arguments")
    def arguments(self, approval: McpApproval) -> str:
        return preview(approval.item.data.get("arguments"))

    @admin.display(description="answer")
    def answer(self, approval: McpApproval) -> str:
        if approval.answered_at is None:
            return status_label("queued")
        return "approved" if approval.approve else "refused"
