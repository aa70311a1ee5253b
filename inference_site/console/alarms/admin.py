"""Admin of rules and alarms."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from inference_site.console.alarms.models import Alarm, Rule
from inference_site.core.admin_pages.base_admin import KeysetAdmin, SiteAdmin
from inference_site.core.admin_pages.labels import status_label, time_label


@admin.register(Rule)
class RuleAdmin(SiteAdmin):
    """The conditions that raise alarms."""

    list_display = ("kind", "shown_bound", "shown_factor", "is_enabled")
    list_editable = ("is_enabled",)

    @admin.display(description="bound", ordering="bound")
    def shown_bound(self, rule: Rule) -> str:
        return f"{rule.bound:,g}"

    @admin.display(description="times the usual", ordering="factor")
    def shown_factor(self, rule: Rule) -> str:
        return f"{rule.factor:g}" if rule.factor else "—"


class AlarmStateFilter(admin.SimpleListFilter):
    """Filter by whether an alarm fires or is resolved."""

    title, parameter_name = "state", "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("firing", "Firing"), ("resolved", "Resolved")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        is_firing = {"firing": True, "resolved": False}.get(self.value() or "")
        return queryset if is_firing is None else queryset.filter(resolved_at__isnull=is_firing)


@admin.register(Alarm)
class AlarmAdmin(KeysetAdmin):
    """Alarms, newest first."""

    list_display = ("time", "state", "text", "rule", "ended")
    list_filter = (AlarmStateFilter,)
    list_select_related = ("rule",)
    search_fields = ("subject__exact",)
    search_help_text = "Search by the exact subject, such as a model"

    @admin.display(description="began (UTC)")
    def time(self, alarm: Alarm) -> str:
        return time_label(alarm.started_at)

    @admin.display(description="state")
    def state(self, alarm: Alarm) -> str:
        return status_label("resolved" if alarm.resolved_at else "firing")

    @admin.display(description="resolved (UTC)")
    def ended(self, alarm: Alarm) -> str:
        return time_label(alarm.resolved_at)
