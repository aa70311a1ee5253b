"""Admin of rules, recipients, alarms and notices."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from inference_site.admin_pages.keyset import KeysetAdmin
from inference_site.admin_pages.labels import status_label, time_label
from inference_site.admin_pages.site_admin import SiteAdmin
from inference_site.alarms.models import Alarm, Notice, Recipient, Rule


@admin.register(Rule)
class RuleAdmin(SiteAdmin):
    """The conditions that raise alarms."""

    list_display = ("kind", "bound", "factor", "is_enabled")
    list_editable = ("is_enabled",)


@admin.register(Recipient)
class RecipientAdmin(SiteAdmin):
    """Who is told of alarms. The secret of a webhook is shown to those who may change it."""

    list_display = ("address", "way", "is_enabled")

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Leave the secret out for those who may only look."""
        fields = ("way", "address", "is_enabled")
        return (*fields, "secret") if self.has_change_permission(request, obj) else fields


@admin.register(Alarm)
class AlarmAdmin(KeysetAdmin):
    """What the rules have found, newest first."""

    list_display = ("time", "state", "text", "rule", "resolved_at")
    list_filter = (("resolved_at", admin.EmptyFieldListFilter),)
    list_select_related = ("rule",)
    search_fields = ("subject__exact",)
    search_help_text = "Search by the exact subject, such as a model"

    @admin.display(description="began (UTC)")
    def time(self, alarm: Alarm) -> str:
        return time_label(alarm.started_at)

    @admin.display(description="state")
    def state(self, alarm: Alarm) -> str:
        return status_label("resolved" if alarm.resolved_at else "firing")


@admin.register(Notice)
class NoticeAdmin(KeysetAdmin):
    """The outbox: what was sent to whom, and what went wrong."""

    list_display = ("time", "recipient", "text", "is_resolved", "attempts", "delivered_at", "error")
    list_select_related = ("recipient",)

    @admin.display(description="time (UTC)")
    def time(self, notice: Notice) -> str:
        return time_label(notice.created_at)
