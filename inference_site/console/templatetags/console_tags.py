"""Template tags: the link to a model's page, and the overview on the page of a key or project."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import redis.exceptions
from django import template
from django.db.models import QuerySet, Sum
from django.urls import reverse
from django.utils import timezone

from inference_site.accounts import rate_limits
from inference_site.accounts.budgets import period_start
from inference_site.accounts.models import ApiKey, Budget, BudgetSpend, Project
from inference_site.catalogue.model_labels import model_link
from inference_site.console.tiles import LATEST, Tile, latest_errors, recent_tiles
from inference_site.runs.models import Generation
from inference_site.runs.usage.models import Period

register = template.Library()
register.filter("model_link", model_link)

_WARNING_PERCENT = 80


@dataclass(frozen=True, slots=True)
class ProgressBar:
    """How much of a budget or a limit is used; ``percent`` is at most 100."""

    name: str
    used: str
    of: str
    percent: int

    @property
    def is_bad(self) -> bool:
        """Whether little or nothing is left."""
        return self.percent >= _WARNING_PERCENT


@register.inclusion_tag("console/tenant_overview.html", takes_context=True)
def tenant_overview(context: dict[str, Any], tenant: ApiKey | Project) -> dict[str, Any]:
    """Show usage, budgets, limits and errors of a key or a project, as far as the user may."""
    user = context["request"].user
    is_key = isinstance(tenant, ApiKey)
    column, parameter = ("api_key", "key") if is_key else ("project", "project")
    generations = Generation.objects.filter(**{column: tenant.pk})
    tiles: list[Tile] = []
    if user.has_perm("usage.view_usagerollup"):
        keys, projects = ([tenant.pk], None) if is_key else (None, [tenant.pk])
        tiles = recent_tiles(Period.DAY, dt.timedelta(days=30), projects=projects, api_keys=keys)
    return {
        "tiles": tiles,
        "bars": [*_budgets(tenant), *_rate_limits(tenant), *_concurrent_runs(tenant, generations)],
        "may_see_errors": user.has_perm("generations.view_generation"),
        "errors": latest_errors(generations),
        "latest": f"{LATEST:,}",
        "refused": f"{reverse('admin:requests')}?status=refused&{parameter}={tenant.pk}",
    }


def _budgets(tenant: ApiKey | Project) -> list[ProgressBar]:
    """Return the budgets of a project, or of a key and its project as a whole."""
    budgets = Budget.objects.filter(project=tenant.pk)
    if isinstance(tenant, ApiKey):
        of_project = Budget.objects.filter(project=tenant.project_id, api_key=None)
        budgets = Budget.objects.filter(api_key=tenant.pk) | of_project
    bars = []
    for budget in budgets.select_related("api_key").order_by("pk"):
        start = period_start(Budget.Every(budget.every), timezone.now())
        spends = BudgetSpend.objects.filter(budget=budget, start=start)
        spent: Decimal = spends.aggregate(total=Sum("spent"))["total"] or Decimal(0)
        percent = int(100 * spent / budget.amount) if budget.amount else 100
        whose = "whole project" if budget.api_key is None else f"key {budget.api_key.name}"
        name = f"Budget of a {budget.every}, {whose}"
        used, of = budget.shown(spent), budget.shown(budget.amount)
        bars.append(ProgressBar(name, used, of, min(100, percent)))
    return bars


def _rate_limits(tenant: ApiKey | Project) -> list[ProgressBar]:
    """Return the use of the limits per minute; nothing while Redis is not reachable."""
    try:
        windows = rate_limits.used(tenant)
    except redis.exceptions.RedisError:
        return []
    bars = []
    for window in windows:
        used = max(0, window.amount - window.remaining)
        percent = min(100, 100 * used // window.amount)
        name = f"{window.unit.capitalize()} in this minute"
        bars.append(ProgressBar(name, f"{used:,}", f"{window.amount:,}", percent))
    return bars


def _concurrent_runs(
    tenant: ApiKey | Project, generations: QuerySet[Generation]
) -> list[ProgressBar]:
    limit = tenant.concurrent_runs
    if limit is None:
        return []
    # The project is the first column of the index of generations that have not ended.
    project = tenant.project_id if isinstance(tenant, ApiKey) else tenant.pk
    runs = generations.filter(project=project, finished_at=None).count()
    percent = min(100, 100 * runs // limit)
    return [ProgressBar("Waiting and running now", str(runs), str(limit), percent)]
