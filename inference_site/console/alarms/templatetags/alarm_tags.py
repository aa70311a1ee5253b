"""The tag that gives a template the firing alarms."""

from __future__ import annotations

from typing import Any

from django import template

from inference_site.console.alarms.bell import FiringAlarms
from inference_site.console.alarms.bell import firing_alarms as alarms_of_request

register = template.Library()


@register.simple_tag(takes_context=True)
def firing_alarms(context: dict[str, Any]) -> FiringAlarms | None:
    """Return the firing alarms; None if the user may not see alarms, or before a login."""
    request = context.get("request")
    return None if request is None else alarms_of_request(request)
