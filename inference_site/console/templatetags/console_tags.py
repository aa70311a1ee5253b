"""Template tags: the link to a model's page, and what the page of a key or project shows."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django import template
from django.http import QueryDict
from django.urls import reverse

from inference_site.accounts.models import ApiKey, Project
from inference_site.catalogue.model_labels import model_link
from inference_site.console.key_states import (
    bars_of,
    may_rotate,
    spends_of,
    state_of,
    states_of,
    valid_secrets,
)
from inference_site.console.tiles import LATEST, VIEW_REQUESTS, Tile, latest_errors, recent_tiles
from inference_site.runs.models import Generation
from inference_site.runs.usage.models import Period

register = template.Library()
register.filter("model_link", model_link)

_MAX_KEYS = 50


@register.simple_tag
def request_tabs() -> list[Any]:
    """Return the tabs of the page of requests, without filters."""
    # Here, because that module imports forms, which import all tags.
    from inference_site.console.request_filters import LogFilters, tabs_of

    return tabs_of(LogFilters(), QueryDict())


@register.inclusion_tag("console/tenant_overview.html", takes_context=True)
def tenant_overview(context: dict[str, Any], tenant: ApiKey | Project) -> dict[str, Any]:
    """Show state, usage, budgets, limits and errors of a key or a project, as far as the user may.

    A key also has its secrets and the buttons that change them, a project its keys.
    """
    user = context["request"].user
    if context["request"].method == "POST":  # A form with errors has put its values on the object.
        tenant = type(tenant)._default_manager.get(pk=tenant.pk)
    is_key = isinstance(tenant, ApiKey)
    column, parameter = ("api_key", "key") if is_key else ("project", "project")
    generations = Generation.objects.filter(**{column: tenant.pk})
    tiles: list[Tile] = []
    may_see_usage = user.has_perm("usage.view_usagerollup")
    if may_see_usage:
        keys, projects = ([tenant.pk], None) if is_key else (None, [tenant.pk])
        tiles = recent_tiles(
            Period.DAY, dt.timedelta(days=30), projects=projects, api_keys=keys, user=user
        )
    may_see_errors, bars = user.has_perm(VIEW_REQUESTS), bars_of(tenant)
    found = {
        "csrf_token": context.get("csrf_token"),
        "tiles": tiles,
        "bars": bars,
        "may_see_errors": may_see_errors,
        "errors": latest_errors(generations),
        "latest": f"{LATEST:,}",
        "refused": f"{reverse('admin:requests')}?status=refused&{parameter}={tenant.pk}",
    }
    if isinstance(tenant, ApiKey):
        may_change = user.has_perm("accounts.change_apikey") and tenant.revoked_at is None
        state = state_of(tenant, bars, with_refusals=may_see_errors)
        return found | {
            "key": tenant,
            "state": state,
            "may_change": may_change,
            "may_rotate": may_change and may_rotate(tenant, user),
            "secrets": valid_secrets(tenant),
        }
    if user.has_perm("accounts.view_apikey"):
        newest = tenant.api_keys.select_related("project", "owner").order_by("-pk")
        of_project = list(newest[: _MAX_KEYS + 1])
        states, spends = states_of(of_project), spends_of(of_project) if may_see_usage else {}
        found |= {
            "project": tenant,
            "keys": [
                (key, states[key.pk], spends.get(key.pk, "—")) for key in of_project[:_MAX_KEYS]
            ],
            "has_more_keys": len(of_project) > _MAX_KEYS,
        }
    return found
