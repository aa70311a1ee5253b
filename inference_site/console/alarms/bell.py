"""The firing alarms of a page, for the bell in its header and for the home page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django.http import HttpRequest
from django.urls import reverse

from inference_site.console.alarms.models import Alarm, RuleKind
from inference_site.console.tiles import VIEW_REQUESTS

CHANGE = "alarms.change_alarm"
_VIEW = "alarms.view_alarm"
_MAX_READ = 500
_MAX_SHOWN = 10
_PAGES = {
    RuleKind.NO_WORKER: "admin:queue",
    RuleKind.QUEUE_WAIT: "admin:queue",
    RuleKind.ERRORS: "admin:requests",
    RuleKind.TTFT: "admin:requests",
    RuleKind.BUDGET: "admin:requests",
}
"""The list that shows what an alarm of a kind is about."""


@dataclass(frozen=True, slots=True)
class ShownAlarm:
    """An alarm with the address of the list of what it is about; "" for a user who may not see it.

    Handling it also handles the other alarms with its text.
    """

    alarm: Alarm
    link: str


@dataclass(frozen=True, slots=True)
class FiringAlarms:
    """The alarms that nobody handles (``open``) and those that are acknowledged or snoozed.

    Two rules, of 80 and of 100 percent of a budget, raise alarms with the same text: one is shown.
    ``count`` is the number of open ones, of which the newest are listed.
    """

    open: Sequence[ShownAlarm]
    handled: Sequence[ShownAlarm]
    count: int
    may_handle: bool


def firing_alarms(request: HttpRequest) -> FiringAlarms | None:
    """Return the firing alarms, read once for a request; None if the user may not see alarms."""
    if not request.user.has_perm(_VIEW):
        return None
    if not hasattr(request, "firing_alarms"):
        rows = Alarm.objects.filter(resolved_at=None).select_related("rule", "handled_by")
        by_text: dict[str, Alarm] = {}
        for alarm in rows[:_MAX_READ]:
            other = by_text.get(alarm.text)
            if other is None or other.state != "firing":
                by_text[alarm.text] = alarm
        shown = [ShownAlarm(alarm, link_of(alarm, request)) for alarm in by_text.values()]
        unhandled = [one for one in shown if one.alarm.state == "firing"]
        handled = [one for one in shown if one.alarm.state != "firing"]
        may_handle = request.user.has_perm(CHANGE)
        request.firing_alarms = FiringAlarms(  # type: ignore[attr-defined]  # For this request.
            unhandled[:_MAX_SHOWN], handled[:_MAX_SHOWN], len(unhandled), may_handle
        )
    found: FiringAlarms = request.firing_alarms  # type: ignore[attr-defined]  # As above.
    return found


def link_of(alarm: Alarm, request: HttpRequest) -> str:
    """Return the address of the list of what an alarm is about; "" if the user sees none."""
    page = _PAGES.get(RuleKind(alarm.rule.kind))
    if page is None or not request.user.has_perm(VIEW_REQUESTS):
        return ""
    return f"{reverse(page)}?{alarm.query}" if alarm.query else reverse(page)
