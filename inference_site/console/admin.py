"""Admin of the audit log and of failed logins; Django imports this module to register admins."""

from __future__ import annotations

from typing import Any

from axes.models import AccessFailureLog
from django.contrib import admin
from django.contrib.admin.models import ADDITION, CHANGE, DELETION, LogEntry
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString

from inference_site.admin_pages.base_admin import KeysetAdmin
from inference_site.admin_pages.labels import time_label
from inference_site.console import stored_models
from inference_site.people import login_log

REGISTERED_HERE = (stored_models,)
"""Modules that register more admins when they are imported."""


@admin.register(AccessFailureLog)
class LoginFailureAdmin(KeysetAdmin):
    """Failed logins, read-only: each up to the one that locked the user."""

    list_display = ("time", "username", "ip_address", "locked_out", "user_agent")
    list_display_links = None  # The page of a row would show the same columns.
    list_filter = ("locked_out",)
    search_fields = ("username__exact", "ip_address")
    search_help_text = "Search by the user name or the address"

    @admin.display(description="time (UTC)")
    def time(self, failure: AccessFailureLog) -> str:
        return time_label(failure.attempt_time)


class ActionFilter(admin.SimpleListFilter):
    """Filter by action: those of Django, and logins."""

    title, parameter_name = "action", "done"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        labels = {ADDITION: "Addition", CHANGE: "Change", DELETION: "Deletion", **login_log.LABELS}
        return [(str(flag), label) for flag, label in labels.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value() or ""
        known = {value for value, _ in self.lookup_choices}
        return queryset.filter(action_flag=chosen) if chosen in known else queryset


@admin.register(LogEntry)
class AuditAdmin(KeysetAdmin):
    """The audit log, read-only: every action in the admin, with its user."""

    list_display = ("time", "user", "action", "kind", "target", "change")
    list_display_links = None  # The list shows all columns, and links to the changed object.
    list_filter = (ActionFilter, "user")
    list_select_related = ("user", "content_type")
    search_fields = ("object_id__exact",)
    search_help_text = "Search by the number of the changed object"

    @admin.display(description="time (UTC)")
    def time(self, entry: LogEntry) -> str:
        return time_label(entry.action_time)

    @admin.display(description="action")
    def action(self, entry: LogEntry) -> str:
        return login_log.LABELS.get(entry.action_flag) or entry.get_action_flag_display()

    @admin.display(description="kind")
    def kind(self, entry: LogEntry) -> str:
        return "—" if entry.content_type is None else str(entry.content_type.name)

    @admin.display(description="object")
    def target(self, entry: LogEntry) -> SafeString | str:
        address = None if entry.is_deletion() else entry.get_admin_url()
        if not address:
            return entry.object_repr
        return format_html('<a href="{}">{}</a>', address, entry.object_repr)

    @admin.display(description="change")
    def change(self, entry: LogEntry) -> SafeString:
        return format_html('<span class="long-text">{}</span>', entry.get_change_message())
