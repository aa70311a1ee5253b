"""Tiles: usage, latencies, the queue and the workers, each as a number with a note."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

import redis.exceptions
from django.db.models import Count, Min, QuerySet
from django.utils import timezone

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.fleet.leases import live_workers
from inference_site.catalogue.model_labels import NO_PRICE, is_priced
from inference_site.core.admin_pages.labels import milliseconds, money, time_since
from inference_site.runs.models import Generation, Status
from inference_site.runs.usage.models import Measure, Period, percentile
from inference_site.runs.usage.queries import (
    PERIOD_LENGTH,
    Histograms,
    Span,
    Usage,
    floor,
    histograms,
    total_by,
    without_table_scans,
)

LATEST = 5_000
"""The newest generations, among which pages search for failures."""
_MAX_ERRORS = 10
SLOWEST, LOWEST = {"p50": 0.5, "p95": 0.95}, {"p50": 0.5, "p5": 0.05}
"""Percentiles to show: of times the long ones matter, of speeds the low ones."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A number with its name and a note below it."""

    name: str
    value: str
    note: str = ""
    is_bad: bool = False


def short(value: float) -> str:
    """Format a number in a few characters, such as ``12.3 k``."""
    for unit, least, divisor in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e4, 1e3)):
        if value >= least:
            return f"{value / divisor:.3g} {unit}"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def sum_of(usages: Iterable[Usage]) -> Usage:
    """Return the sum of usages."""
    listed = list(usages)
    names = [field.name for field in fields(Usage)]
    return Usage(**{name: sum(getattr(usage, name) for usage in listed) for name in names})


def recent_tiles(
    period: Period,
    length: dt.timedelta,
    *,
    projects: list[int] | None = None,
    api_keys: list[int] | None = None,
    models: list[str] | None = None,
) -> list[Tile]:
    """Return tiles of the usage of these projects, keys or models in the time until now."""
    end = floor(timezone.now(), period) + PERIOD_LENGTH[period]
    span = Span(period, end - length, end, projects=projects, api_keys=api_keys, models=models)
    with without_table_scans():
        by_model = {model: usage for (model,), usage in total_by(span, "model").items()}
        return usage_tiles(sum_of(by_model.values()), histograms(span), models or by_model)


def latest_errors(generations: QuerySet[Generation]) -> list[Generation]:
    """Return the newest failures among the ``LATEST``; a search of all rows would take seconds."""
    latest = generations.order_by("-id").values("pk")[:LATEST]
    failed = Generation.objects.filter(pk__in=latest, status=Status.FAILED)
    return list(failed.select_related("project", "api_key").order_by("-id")[:_MAX_ERRORS])


def usage_tiles(total: Usage, latencies: Histograms, models: Iterable[str] = ()) -> list[Tile]:
    """Return tiles of a usage and its latencies.

    The cost shows a dash if none of ``models`` (of all models, if empty) has a price.
    """
    failed = f"{100 * total.failed / total.requests:.1f} %" if total.requests else "—"
    cached = 100 * total.cached_tokens / total.input_tokens if total.input_tokens else 0
    has_cost = total.cost or any(map(is_priced, list(models) or catalogue().models))
    cost = Tile("Cost", money(total.cost)) if has_cost else Tile("Cost", "—", NO_PRICE)
    reasoning = f"{short(total.reasoning_tokens)} reasoning"
    return [
        Tile("Requests", short(total.requests), f"{short(total.cancelled)} cancelled"),
        Tile("Errors", short(total.failed), failed, is_bad=total.failed > 0),
        Tile("Input tokens", short(total.input_tokens), f"{cached:.0f} % cached"),
        Tile("Output tokens", short(total.output_tokens), reasoning),
        _percentiles("First token", latencies[Measure.TTFT], milliseconds),
        _percentiles("Tokens/s", latencies[Measure.SPEED], short, LOWEST),
        _percentiles("Queue wait", latencies[Measure.QUEUE], milliseconds),
        cost,
    ]


def _percentiles(
    name: str,
    counts: Mapping[dt.datetime, Counter[int]],
    text: Callable[[float], str],
    fractions: Mapping[str, float] = SLOWEST,
) -> Tile:
    """Return a tile with the median, and with the second of ``fractions`` as its note."""
    total: Counter[int] = sum(counts.values(), Counter())
    (_, median), (label, extreme) = ((n, percentile(total, f)) for n, f in fractions.items())
    if median is None or extreme is None:
        return Tile(name, "—")
    return Tile(name, text(median), f"{label} {text(extreme)}")


def tiles_now() -> list[Tile]:
    """Return tiles of the queue and the workers at this time."""
    queued = Generation.objects.filter(status=Status.QUEUED)
    waiting = queued.aggregate(count=Count("pk"), oldest=Min("created_at"))
    note = f"longest {time_since(waiting['oldest'])}" if waiting["oldest"] else ""
    queue = Tile("Waiting now", short(waiting["count"]), note)
    try:
        workers = live_workers()
    except redis.exceptions.RedisError:
        return [queue, Tile("Workers", "—", "Redis is not reachable", is_bad=True)]
    models = [model for worker in workers for model in worker.models]
    busy, slots = sum(model.busy for model in models), sum(model.slots for model in models)
    note = f"{busy} of {slots} slots busy"
    return [queue, Tile("Workers", str(len(workers)), note, is_bad=not workers)]
