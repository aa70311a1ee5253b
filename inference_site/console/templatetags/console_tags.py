"""The link to a model's page, as a filter."""

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
from inference_site.console.tiles import LATEST, Tile, latest_errors, tiles_over
from inference_site.generations.models import Generation
from inference_site.usage.models import Period
from inference_site.usage.queries import LENGTH, Span, floor

register = template.Library()
register.filter("model_link", model_link)


_MONTH = dt.timedelta(days=30)
_NEARLY = 80
"""Percent of a budget from which its bar is a warning."""


@dataclass(frozen=True, slots=True)
class Bar:
    """How much of a budget or a limit is used; ``percent`` is at most 100."""

    name: str
    used: str
    of: str
    percent: int

    @property
    def is_bad(self) -> bool:
        """Whether little or nothing is left."""
        return self.percent >= _NEARLY


@register.inclusion_tag("console/tenant_overview.html", takes_context=True)
def tenant_overview(context: dict[str, Any], tenant: ApiKey | Project) -> dict[str, Any]:
    """Return what is shown of a key or a project to this user."""
    user = context["request"].user
    is_key = isinstance(tenant, ApiKey)
    column, chosen = ("api_key", "key") if is_key else ("project", "project")
    generations = Generation.objects.filter(**{column: tenant.pk})
    return {
        "tiles": _tiles(tenant) if user.has_perm("usage.view_usagerollup") else [],
        "bars": [*_budgets(tenant), *_a_minute(tenant), *_running(tenant, generations)],
        "may_see_errors": user.has_perm("generations.view_generation"),
        "errors": latest_errors(generations),
        "latest": f"{LATEST:,}",
        "refused": f"{reverse('admin:requests')}?status=refused&{chosen}={tenant.pk}",
    }


def _tiles(tenant: ApiKey | Project) -> list[Tile]:
    """Return the usage of the last 30 days."""
    end = floor(timezone.now(), Period.DAY) + LENGTH[Period.DAY]
    keys, projects = ([tenant.pk], None) if isinstance(tenant, ApiKey) else (None, [tenant.pk])
    span = Span(Period.DAY, end - _MONTH, end, projects=projects, api_keys=keys)
    return tiles_over(span)


def _budgets(tenant: ApiKey | Project) -> list[Bar]:
    """Return the budgets that bound it: of a key, also those of its whole project."""
    budgets = Budget.objects.filter(project=tenant.pk)
    if isinstance(tenant, ApiKey):
        of_project = Budget.objects.filter(project=tenant.project_id, api_key=None)
        budgets = Budget.objects.filter(api_key=tenant.pk) | of_project
    return [_bar(budget) for budget in budgets.select_related("api_key").order_by("pk")]


def _bar(budget: Budget) -> Bar:
    start = period_start(Budget.Every(budget.every), timezone.now())
    spends = BudgetSpend.objects.filter(budget=budget, start=start)
    spent: Decimal = spends.aggregate(total=Sum("spent"))["total"] or Decimal(0)
    percent = int(100 * spent / budget.amount) if budget.amount else 100
    whose = "whole project" if budget.api_key is None else f"key {budget.api_key.name}"
    name = f"Budget of a {budget.every}, {whose}"
    return Bar(name, budget.shown(spent), budget.shown(budget.amount), min(100, percent))


def _a_minute(tenant: ApiKey | Project) -> list[Bar]:
    try:
        windows = rate_limits.used(tenant)
    except redis.exceptions.RedisError:  # The page is there without them.
        return []
    bars = []
    for window in windows:
        now = max(0, window.amount - window.remaining)
        percent = min(100, 100 * now // window.amount)
        name = f"{window.unit.capitalize()} in this minute"
        bars.append(Bar(name, f"{now:,}", f"{window.amount:,}", percent))
    return bars


def _running(tenant: ApiKey | Project, generations: QuerySet[Generation]) -> list[Bar]:
    if tenant.concurrent_runs is None:
        return []
    # The project leads the index of what has not ended.
    project = tenant.project_id if isinstance(tenant, ApiKey) else tenant.pk
    now = generations.filter(project=project, finished_at=None).count()
    percent = min(100, 100 * now // tenant.concurrent_runs)
    return [Bar("Waiting and running now", str(now), str(tenant.concurrent_runs), percent)]
