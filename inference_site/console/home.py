"""The home page: usage from the roll-ups, and the queue and workers as they are now."""

from __future__ import annotations

import csv
import datetime as dt
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import redis.exceptions
from django.core.exceptions import PermissionDenied
from django.db.models import Count, Min, QuerySet
from django.http import HttpRequest, HttpResponse, QueryDict
from django.utils import timezone

from inference_site.accounts.models import ApiKey, Project
from inference_site.admin_pages.labels import money, time_since
from inference_site.alarms.models import Alarm
from inference_site.catalogue.catalogue import catalogue
from inference_site.console.charts import Chart, Series, chart
from inference_site.fleet.leases import live_workers
from inference_site.generations.models import Generation, Status
from inference_site.usage.csv_export import usage_rows
from inference_site.usage.histograms import percentile
from inference_site.usage.models import LatencyRollup, Period
from inference_site.usage.queries import (
    LENGTH,
    Histograms,
    Span,
    Usage,
    floor,
    histograms,
    reading,
    total_by,
    usage_by,
)

PERMISSION = "usage.view_usagerollup"
LATEST = 5_000
"""Generations among which pages look for those that failed."""
_MOST_ALARMS = _MOST_ERRORS = 10
_MOST_KEYS = 200
_MOST_GROUPS = 50


@dataclass(frozen=True, slots=True)
class Range:
    """A time range to choose: its length, the period of its buckets and their label format."""

    id: str
    label: str
    span: dt.timedelta
    period: Period
    format: str


RANGES = (
    Range("1h", "1 hour", dt.timedelta(hours=1), Period.MINUTE, "%H:%M"),
    Range("24h", "24 hours", dt.timedelta(days=1), Period.HOUR, "%H:%M"),
    Range("7d", "7 days", dt.timedelta(days=7), Period.HOUR, "%a %H:%M"),
    Range("30d", "30 days", dt.timedelta(days=30), Period.DAY, "%d %b"),
)
SLOWEST, LEAST = {"p50": 0.5, "p95": 0.95}, {"p50": 0.5, "p5": 0.05}
"""Of times, the long ones matter; of speeds, the low ones."""
GROUPS = {"model": "Model", "project_id": "Project", "api_key_id": "API key"}


@dataclass(frozen=True, slots=True)
class Choice:
    """The time range, grouping and filters that the page shows."""

    range: Range
    group: str
    project: int | None
    api_key: int | None
    model: str | None

    def span(self, now: dt.datetime) -> Span:
        """Return the buckets to read; the last one contains ``now``."""
        period = self.range.period
        end = floor(now, period) + LENGTH[period]
        return Span(
            period,
            end - self.range.span,
            end,
            projects=None if self.project is None else [self.project],
            api_keys=None if self.api_key is None else [self.api_key],
            models=None if self.model is None else [self.model],
        )


def chosen(query: QueryDict) -> Choice:
    """Return the choice in a query string; missing and invalid values become the defaults."""
    group = str(query.get("by", ""))
    return Choice(
        range=next((one for one in RANGES if one.id == query.get("range")), RANGES[1]),
        group=group if group in GROUPS else "model",
        project=_number(query, "project"),
        api_key=_number(query, "key"),
        model=query.get("model", "").replace("\0", "") or None,
    )


def _number(query: QueryDict, name: str) -> int | None:
    given = query.get(name, "")
    return int(given) if given.isdecimal() and len(given) <= 18 else None


def home_context(request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the home page."""
    if not request.user.has_perm(PERMISSION):
        return {"may_see_usage": False}
    choice = chosen(request.GET)
    span = choice.span(timezone.now())
    starts = list(span.starts())
    with reading():
        read, latencies = usage_by(span), histograms(span)
        table = _table(span, choice.group)
    buckets = [read.get((start, ()), Usage()) for start in starts]
    keys = ApiKey.objects.none()
    if choice.project is not None:
        keys = ApiKey.objects.filter(project=choice.project)[:_MOST_KEYS]
    return {
        "may_see_usage": True,
        "choice": choice,
        "ranges": RANGES,
        "groups": GROUPS.items(),
        "projects": Project.objects.values_list("pk", "name"),
        "keys": keys,
        "models": list(catalogue().models),
        "tiles": [*tiles_of(_sum(buckets), latencies), *_now()],
        "charts": _charts(choice.range, starts, buckets, latencies),
        "table": table,
        "group_label": GROUPS[choice.group],
    }


def firing(request: HttpRequest) -> dict[str, Any]:
    """Return the alarms that are firing, for those who may see them."""
    if not request.user.has_perm("alarms.view_alarm"):
        return {}
    alarms = Alarm.objects.filter(resolved_at=None)
    return {"may_see_alarms": True, "alarms": alarms[:_MOST_ALARMS], "firing": alarms.count()}


def usage_csv(request: HttpRequest) -> HttpResponse:
    """Answer with the usage of the home page as CSV, by bucket, project, key and model."""
    if not request.user.has_perm(PERMISSION):
        raise PermissionDenied
    choice = chosen(request.GET)
    span = choice.span(timezone.now())
    with reading():
        usage = usage_by(span, "project_id", "api_key_id", "model")
    name = f"usage-{choice.range.id}-{timezone.now():%Y%m%d-%H%M}.csv"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    answer = HttpResponse(content_type="text/csv; charset=utf-8", headers=headers)
    csv.writer(answer).writerows(usage_rows(usage))
    return answer


@dataclass(frozen=True, slots=True)
class Tile:
    """A number with its name and a note below it."""

    name: str
    value: str
    note: str = ""
    is_bad: bool = False


def short(value: float) -> str:
    """Format a number in a few characters, such as ``12.3 k``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            divided = value / (1e3 if unit == "k" else size)
            return f"{divided:.3g} {unit}"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _ms(value: float) -> str:
    return f"{value / 1000:.3g} s" if value >= 1000 else f"{value:.0f} ms"


def _sum(buckets: Sequence[Usage]) -> Usage:
    names = [field.name for field in fields(Usage)]
    return Usage(**{name: sum(getattr(bucket, name) for bucket in buckets) for name in names})


def tiles_over(span: Span) -> list[Tile]:
    """Return tiles of the usage in a span."""
    with reading():
        return tiles_of(total_by(span).get((), Usage()), histograms(span))


def latest_errors(generations: QuerySet[Generation]) -> list[Generation]:
    """Return what failed last among the latest; looking through all would take seconds."""
    latest = generations.order_by("-id").values("pk")[:LATEST]
    failed = Generation.objects.filter(pk__in=latest, status=Status.FAILED)
    return list(failed.select_related("project", "api_key").order_by("-id")[:_MOST_ERRORS])


def tiles_of(total: Usage, latencies: Histograms) -> list[Tile]:
    """Return tiles of a usage and its times."""
    failed = f"{100 * total.failed / total.requests:.1f} %" if total.requests else "—"
    cached = 100 * total.cached_tokens / total.input_tokens if total.input_tokens else 0
    return [
        Tile("Requests", short(total.requests), f"{short(total.cancelled)} cancelled"),
        Tile("Errors", short(total.failed), failed, is_bad=total.failed > 0),
        Tile("Input tokens", short(total.input_tokens), f"{cached:.0f} % cached"),
        Tile(
            "Output tokens",
            short(total.output_tokens),
            f"{short(total.reasoning_tokens)} reasoning",
        ),
        _pair("First token", latencies[LatencyRollup.Measure.TTFT], _ms),
        _pair("Tokens/s", latencies[LatencyRollup.Measure.SPEED], short, LEAST),
        _pair("Queue wait", latencies[LatencyRollup.Measure.QUEUE], _ms),
        Tile("Cost", money(total.cost)),
    ]


def _pair(
    name: str,
    counts: Mapping[dt.datetime, Counter[int]],
    text: Callable[[float], str],
    shares: Mapping[str, float] = SLOWEST,
) -> Tile:
    together: Counter[int] = sum(counts.values(), Counter())
    (_, middle), (label, worst) = ((n, percentile(together, s)) for n, s in shares.items())
    if middle is None or worst is None:
        return Tile(name, "—")
    return Tile(name, text(middle), f"{label} {text(worst)}")


def _now() -> list[Tile]:
    """Return tiles of the queue and the workers; counting is cheap, the queue is bounded."""
    queued = Generation.objects.filter(status=Status.QUEUED)
    waiting = queued.aggregate(count=Count("pk"), oldest=Min("created_at"))
    note = f"longest {time_since(waiting['oldest'])}" if waiting["oldest"] else ""
    queue = Tile("Waiting now", short(waiting["count"]), note)
    try:
        workers = live_workers()
    except redis.exceptions.RedisError:
        return [queue, Tile("Workers", "—", "Redis is not reachable", is_bad=True)]
    slots = sum(model.slots for worker in workers for model in worker.models)
    busy = sum(model.busy for worker in workers for model in worker.models)
    return [
        queue,
        Tile("Workers", str(len(workers)), f"{busy} of {slots} slots busy", is_bad=not workers),
    ]


def _charts(
    range_: Range,
    starts: Sequence[dt.datetime],
    buckets: Sequence[Usage],
    latencies: Histograms,
) -> list[Chart]:
    labels = [start.strftime(range_.format) for start in starts]

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
    ttft = _percentiles(latencies[LatencyRollup.Measure.TTFT], starts)
    speed = _percentiles(latencies[LatencyRollup.Measure.SPEED], starts, LEAST)
    return [
        chart("requests", "Requests", labels, requests, "bars", short),
        chart("tokens", "Tokens", labels, tokens, "bars", short),
        chart("ttft", "Time to first token", labels, ttft, "lines", _ms),
        chart("speed", "Tokens per second of one answer", labels, speed, "lines", short),
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
    """A line of the table: the usage of one model, project or key."""

    name: str
    usage: Usage


def _table(span: Span, group: str) -> list[Row]:
    """Return the groups with the most tokens, largest first."""
    totals = total_by(span, group)
    names = _names(group, [key for (key,) in totals])
    rows = [Row(names.get(key, str(key)), usage) for (key,), usage in totals.items()]
    rows.sort(key=lambda row: row.usage.input_tokens + row.usage.output_tokens, reverse=True)
    return rows[:_MOST_GROUPS]


def _names(group: str, keys: Sequence[Any]) -> dict[Any, str]:
    if group == "project_id":
        return dict(Project.objects.filter(pk__in=keys).values_list("pk", "name"))
    if group == "api_key_id":
        found = ApiKey.objects.filter(pk__in=keys).select_related("project")
        return {key.pk: f"{key.project.name}: {key.name}" for key in found}
    return {}
