"""Tiles: numbers of a usage, of its times, and of the queue and the workers as they are now."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

import redis.exceptions
from django.db.models import Count, Min, QuerySet

from inference_site.admin_pages.labels import milliseconds, money, time_since
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.model_labels import NO_PRICE, is_priced
from inference_site.fleet.leases import live_workers
from inference_site.generations.models import Generation, Status
from inference_site.usage.histograms import percentile
from inference_site.usage.models import Measure
from inference_site.usage.queries import Histograms, Span, Usage, histograms, reading, total_by

LATEST = 5_000
"""Generations among which pages look for those that failed."""
_MOST_ERRORS = 10
SLOWEST, LEAST = {"p50": 0.5, "p95": 0.95}, {"p50": 0.5, "p5": 0.05}
"""Of times, the long ones matter; of speeds, the low ones."""


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


def summed(usages: Iterable[Usage]) -> Usage:
    """Return the sum of usages."""
    listed = list(usages)
    names = [field.name for field in fields(Usage)]
    return Usage(**{name: sum(getattr(usage, name) for usage in listed) for name in names})


def tiles_over(span: Span) -> list[Tile]:
    """Return tiles of the usage in a span."""
    with reading():
        by_model = {model: usage for (model,), usage in total_by(span, "model").items()}
        models = span.models or by_model
        return tiles_of(summed(by_model.values()), histograms(span), models)


def latest_errors(generations: QuerySet[Generation]) -> list[Generation]:
    """Return what failed last among the latest; looking through all would take seconds."""
    latest = generations.order_by("-id").values("pk")[:LATEST]
    failed = Generation.objects.filter(pk__in=latest, status=Status.FAILED)
    return list(failed.select_related("project", "api_key").order_by("-id")[:_MOST_ERRORS])


def tiles_of(total: Usage, latencies: Histograms, models: Iterable[str] = ()) -> list[Tile]:
    """Return tiles of a usage of these models (without any, of all) and its times."""
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
        _pair("First token", latencies[Measure.TTFT], milliseconds),
        _pair("Tokens/s", latencies[Measure.SPEED], short, LEAST),
        _pair("Queue wait", latencies[Measure.QUEUE], milliseconds),
        _cost(total, models),
    ]


def _cost(total: Usage, models: Iterable[str]) -> Tile:
    if total.cost or any(map(is_priced, list(models) or catalogue().models)):
        return Tile("Cost", money(total.cost))
    return Tile("Cost", "—", NO_PRICE)


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


def tiles_now() -> list[Tile]:
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
