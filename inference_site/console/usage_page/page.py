"""The home page: usage from the roll-ups, and the queue and workers as they are now."""

from __future__ import annotations

import csv
import datetime as dt
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils import timezone

from inference_site.accounts.models import ApiKey, Project
from inference_site.admin_pages.labels import milliseconds, money
from inference_site.alarms.models import Alarm
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.model_labels import cost_label
from inference_site.console.usage_page.charts import Chart, Series, chart
from inference_site.console.usage_page.choice import GROUPS, RANGES, Choice, chosen
from inference_site.console.usage_page.tiles import (
    LEAST,
    SLOWEST,
    short,
    summed,
    tiles_now,
    tiles_of,
)
from inference_site.usage.histograms import percentile
from inference_site.usage.models import Measure
from inference_site.usage.queries import (
    Histograms,
    Span,
    Usage,
    histograms,
    total_by,
    usage_by,
    usage_rows,
    without_table_scans,
)

PERMISSION = "usage.view_usagerollup"
_MOST_ALARMS = 10
_MOST_KEYS = 200
_MOST_GROUPS = 50


def home_context(request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the home page."""
    if not request.user.has_perm(PERMISSION):
        return {"may_see_usage": False}
    choice = chosen(request.GET, timezone.now())
    with without_table_scans():
        read, latencies = usage_by(choice.span), histograms(choice.span)
        table = _table(choice.span, choice.group)
    buckets = [read.get((start, ()), Usage()) for start in choice.span.starts()]
    keys = ApiKey.objects.none()
    if choice.project is not None:
        keys = ApiKey.objects.filter(project=choice.project)[:_MOST_KEYS]
    of_models = choice.span.models or ()
    return {
        "may_see_usage": True,
        "choice": choice,
        "ranges": RANGES,
        "groups": GROUPS.items(),
        "projects": Project.objects.values_list("pk", "name"),
        "keys": keys,
        "models": list(catalogue().models),
        "tiles": [*tiles_of(summed(buckets), latencies, of_models), *tiles_now()],
        "charts": _charts(choice, buckets, latencies),
        "table": table,
        "group_label": GROUPS[choice.group],
    }


def firing(request: HttpRequest) -> dict[str, Any]:
    """Return the alarms that are firing, for those who may see them.

    A budget that is spent has an alarm of each rule that it has passed: it is told once.
    """
    if not request.user.has_perm("alarms.view_alarm"):
        return {}
    alarms = Alarm.objects.filter(resolved_at=None)
    told = list({alarm.text: alarm for alarm in alarms[:_MOST_ALARMS]}.values())
    texts = alarms.order_by().values("text").distinct().count()
    return {"may_see_alarms": True, "alarms": told, "firing": texts}


def usage_csv(request: HttpRequest) -> HttpResponse:
    """Answer with the usage of the home page as CSV, by bucket, project, key and model."""
    if not request.user.has_perm(PERMISSION):
        raise PermissionDenied
    choice = chosen(request.GET, timezone.now())
    with without_table_scans():
        usage = usage_by(choice.span, "project_id", "api_key_id", "model")
    name = f"usage-{choice.range}-{timezone.now():%Y%m%d-%H%M}.csv"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    answer = HttpResponse(content_type="text/csv; charset=utf-8", headers=headers)
    csv.writer(answer).writerows(usage_rows(usage))
    return answer


def _charts(choice: Choice, buckets: Sequence[Usage], latencies: Histograms) -> list[Chart]:
    starts, times, ticks = list(choice.span.starts()), choice.times(), choice.ticks()

    def counted(name: str, *fields: str) -> Series:
        first, *less = fields
        values = [getattr(b, first) - sum(getattr(b, field) for field in less) for b in buckets]
        return Series(name, values)

    requests = [
        counted("completed", "completed"),
        counted("cancelled", "cancelled"),
        counted("failed", "failed"),
    ]
    tokens = [
        counted("input", "input_tokens", "cached_tokens"),
        counted("cached input", "cached_tokens"),
        counted("output", "output_tokens"),
    ]
    ttft = _percentiles(latencies[Measure.TTFT], starts)
    speed = _percentiles(latencies[Measure.SPEED], starts, LEAST)
    ms, of_one = milliseconds, "Tokens per second of one answer"
    return [
        chart("requests", "Requests", times, requests, "bars", short, ticks),
        chart("tokens", "Tokens", times, tokens, "bars", short, ticks),
        chart("ttft", "Time to first token", times, ttft, "lines", ms, ticks),
        chart("speed", of_one, times, speed, "lines", short, ticks),
    ]


def _percentiles(
    counts: Mapping[dt.datetime, Counter[int]],
    starts: Sequence[dt.datetime],
    shares: Mapping[str, float] = SLOWEST,
) -> list[Series]:
    return [
        Series(name, [percentile(counts.get(start, {}), share) for start in starts])
        for name, share in shares.items()
    ]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: the usage of one model, project or key, and the address of its page."""

    name: str
    page: str
    usage: Usage
    cost: str


def _table(span: Span, group: str) -> list[Row]:
    """Return the groups with the most tokens, largest first."""
    totals = total_by(span, group)
    names = _names(group, [key for (key,) in totals])
    rows = [
        Row(names.get(key, str(key)), _page(group, key), usage, _cost(group, key, usage))
        for (key,), usage in totals.items()
    ]
    rows.sort(key=lambda row: row.usage.input_tokens + row.usage.output_tokens, reverse=True)
    return rows[:_MOST_GROUPS]


def _cost(group: str, key: Any, usage: Usage) -> str:
    return cost_label(key, usage.cost) if group == "model" else money(usage.cost)


def _page(group: str, key: Any) -> str:
    if group == "model":
        return reverse("admin:model", args=[key]) if key in catalogue().models else ""
    page = "project" if group == "project_id" else "apikey"
    return reverse(f"admin:accounts_{page}_change", args=[key])


def _names(group: str, keys: Sequence[Any]) -> dict[Any, str]:
    if group == "project_id":
        return dict(Project.objects.filter(pk__in=keys).values_list("pk", "name"))
    if group == "api_key_id":
        found = ApiKey.objects.filter(pk__in=keys).select_related("project")
        return {key.pk: f"{key.project.name}: {key.name}" for key in found}
    return {}
