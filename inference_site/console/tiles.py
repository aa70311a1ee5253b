"""Tiles: usage, latencies, the queue and the workers, each as a number with a note."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import redis.exceptions
from django.db.models import Count, Min, QuerySet, Sum
from django.urls import reverse
from django.utils import timezone
from django.utils.http import urlencode

from inference_site.accounts.models import END_USER, TAG, retention_cutoffs
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.fleet.leases import live_workers
from inference_site.catalogue.model_labels import NO_PRICE, is_priced
from inference_site.core.admin_pages.labels import milliseconds, money, time_since
from inference_site.core.site_settings.models import RetentionKind, retention_days
from inference_site.core.storage.old_rows import first_id_since
from inference_site.runs.models import Generation, Status
from inference_site.runs.request_log.models import Refusal
from inference_site.runs.usage.models import (
    LONGEST_VALUE,
    OTHERS,
    DimensionRollup,
    Measure,
    Period,
    UsageRollup,
    percentile,
)
from inference_site.runs.usage.pruning import KEPT_DAYS
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

VIEW_REQUESTS = "generations.view_generation"
"""The permission to see the list of requests, without content."""
_VIEW_STORED = ("responses_api.view_storedresponse", "completions.view_storedcompletion")
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
    link: str = ""
    change: str = ""


_LISTS: dict[str, dict[str, str]] = {
    "Requests": {},
    "Errors": {"status": "failed"},
    "Refused": {"status": "refused"},
    "Input tokens": {"sort": "-tokens"},
    "Output tokens": {"sort": "-tokens"},
    "First token": {"sort": "-ttft"},
    "Tokens/s": {"sort": "-duration"},
    "Queue wait": {"sort": "-queue"},
    "Cost": {"sort": "-cost"},
}
"""Filters of the list of requests that a tile leads to, by its name."""


def requests_filter(span: Span) -> dict[str, Any] | None:
    """Return the filters of the list of requests for those of a span; None if it has no such."""
    chosen: dict[str, Any] = {}
    given = {"project": span.projects, "key": span.api_keys, "model": span.models}
    for name, values in given.items():
        if values is not None and len(values) != 1:
            return None
        if values is not None:
            chosen[name] = values[0]
    if span.dimension is None or span.value is None:
        return chosen
    name, prefix = "user", ""
    if span.dimension != END_USER:
        name, prefix = "metadata", f"{span.dimension.removeprefix(TAG)}="
    text = prefix + span.value
    # Longer values are cut in the roll-ups, and the list's filter cuts and strips what it gets.
    is_whole = span.value != OTHERS and len(span.value) < LONGEST_VALUE and len(text) <= 200
    return chosen | {name: text} if is_whole and text == text.strip() else None


def may_list(user: Any, filters: Mapping[str, Any]) -> bool:
    """Return whether a user may see the list of requests with these filters."""
    may_view = bool(user.has_perm(VIEW_REQUESTS))
    return may_view and may_filter(user, filters.get("metadata"))


def may_filter(user: Any, metadata: str | None) -> bool:
    """Return whether the user may see the stored objects that a filter by metadata searches."""
    return not metadata or bool(user.has_perms(_VIEW_STORED))


def linked(tiles: Iterable[Tile], user: Any, span: Span, since: str = "") -> list[Tile]:
    """Return tiles that lead to the lists of what they count, for a user who may see these.

    ``since`` is the value of the list's filter for the length of the span; "" without one.
    """
    chosen = requests_filter(span)
    if chosen is None or not may_list(user, chosen):
        return list(tiles)
    if since:
        chosen["since"] = since
    pages = {"Waiting now": reverse("admin:queue"), "Workers": reverse("admin:fleet")}
    for name, filters in _LISTS.items():
        pages[name] = f"{reverse('admin:requests')}?{urlencode(chosen | filters)}"
    return [replace(tile, link=pages.get(tile.name, "")) for tile in tiles]


def change(now: float, before: float) -> str:
    """Return the change against the period before in words; "" if there was nothing then."""
    percent = 100 * abs(now - before) / before if before else 0.0
    return f"{percent:,.0f} % {'less' if now < before else 'more'}" if before else ""


def refused_tile(span: Span) -> Tile:
    """Return the tile of the requests that were refused in a span."""
    count, is_more = refused_in(span)
    before, is_more_before = refused_in(earlier(span))
    is_known = _is_kept("refusals_days", earlier(span)) and not (is_more or is_more_before)
    changed = change(count, before) if is_known else ""
    text = f"more than {short(count)}" if is_more else short(count)
    return Tile("Refused", text, "before they ran", is_bad=count > 0, change=changed)


def short(value: float) -> str:
    """Format a number in a few characters, such as ``12.3 k``."""
    # In three digits 999,500 is a million.
    for unit, least, divisor in (("G", 999.5e6, 1e9), ("M", 999.5e3, 1e6), ("k", 1e4, 1e3)):
        if value >= least:
            number = value / divisor
            return f"{number:.3g} {unit}" if number < 999.5 else f"{number:,.0f} {unit}"
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
    user: Any = None,
) -> list[Tile]:
    """Return tiles of the usage of these projects, keys or models in the time until now.

    For a ``user`` they lead to lists (see ``linked``).
    """
    end = floor(timezone.now(), period) + PERIOD_LENGTH[period]
    span = Span(period, end - length, end, projects=projects, api_keys=api_keys, models=models)
    with without_table_scans():
        by_model = {model: usage for (model,), usage in total_by(span, "model").items()}
        tiles = usage_tiles(
            sum_of(by_model.values()),
            histograms(span),
            models or by_model,
            before=usage_before(span),
            refused=refused_tile(span),
        )
    since = {1: "24h", 7: "7d", 30: "30d"}.get(length.days, "")
    return tiles if user is None else linked(tiles, user, span, since)


def latest_errors(generations: QuerySet[Generation]) -> list[Generation]:
    """Return the newest failures among the ``LATEST``; a search of all rows would take seconds."""
    latest = generations.order_by("-id").values("pk")[:LATEST]
    failed = Generation.objects.filter(pk__in=latest, status=Status.FAILED)
    return list(failed.select_related("project", "api_key").order_by("-id")[:_MAX_ERRORS])


def usage_tiles(
    total: Usage,
    latencies: Histograms | None,
    models: Iterable[str] = (),
    *,
    before: Usage,
    refused: Tile | None,
) -> list[Tile]:
    """Return tiles of a usage and its latencies, with the change against that ``before``.

    There are no tiles of what is None.

    The cost shows a dash if none of ``models`` (of all models, if empty) has a price.
    """
    failed = f"{100 * total.failed / total.requests:.1f} %" if total.requests else "—"
    cached = 100 * total.cached_tokens / total.input_tokens if total.input_tokens else 0
    has_cost = total.cost or any(map(is_priced, list(models) or catalogue().models))
    spent = Tile("Cost", money(total.cost), change=change(float(total.cost), float(before.cost)))
    cost = spent if has_cost else Tile("Cost", "—", NO_PRICE)
    reasoning = f"{short(total.reasoning_tokens)} reasoning"
    return [
        Tile(
            "Requests",
            short(total.requests),
            f"{short(total.cancelled)} cancelled",
            change=change(total.requests, before.requests),
        ),
        Tile(
            "Errors",
            short(total.failed),
            failed,
            is_bad=total.failed > 0,
            change=change(total.failed, before.failed),
        ),
        *([] if refused is None else [refused]),
        Tile(
            "Input tokens",
            short(total.input_tokens),
            f"{cached:.0f} % cached",
            change=change(total.input_tokens, before.input_tokens),
        ),
        Tile(
            "Output tokens",
            short(total.output_tokens),
            reasoning,
            change=change(total.output_tokens, before.output_tokens),
        ),
        *([] if latencies is None else _latency_tiles(latencies)),
        cost,
    ]


def _latency_tiles(latencies: Histograms) -> list[Tile]:
    first = _percentiles("First token", latencies[Measure.TTFT], milliseconds)
    prefill = _percentiles("", latencies[Measure.PREFILL], milliseconds)
    if prefill.note:
        first = replace(first, note=f"{first.note}; p50 without queue wait {prefill.value}")
    return [
        first,
        _percentiles("Tokens/s", latencies[Measure.SPEED], short, LOWEST),
        _percentiles("Queue wait", latencies[Measure.QUEUE], milliseconds),
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


def usage_before(span: Span) -> Usage:
    """Return the usage of the time of the same length before a span.

    It is empty, so that nothing is compared with it, if a part of it is deleted already.
    """
    before = earlier(span)
    rollup = UsageRollup if span.dimension is None else DimensionRollup
    days = KEPT_DAYS[rollup].get(span.period)
    if days is not None and before.start < timezone.now() - dt.timedelta(days=days):
        return Usage()
    if span.dimension is not None and not _is_kept("generations_days", before):
        return Usage()
    return sum_of(total_by(before, "model").values())


def _is_kept(kind: RetentionKind, span: Span) -> bool:
    """Return whether the retention of a kind has deleted nothing of a span yet."""
    limits = [
        limit
        for project, limit in retention_cutoffs(kind)
        if span.projects is None or project in span.projects
    ]
    if span.projects is None and (days := retention_days(kind)):  # Of no project.
        limits.append(timezone.now() - dt.timedelta(days=days))
    return all(limit <= span.start for limit in limits)


MAX_READ = 50_000
_DISORDER = dt.timedelta(minutes=2)


def earlier(span: Span) -> Span:
    """Return the time of the same length before a span, with its filters."""
    return replace(span, start=span.start - (span.end - span.start), end=span.start)


def refused_in(span: Span) -> tuple[int, bool]:
    """Return how many requests were refused in a span, and whether there are more than that.

    There are no roll-ups of refusals: at most ``MAX_READ`` rows are counted, newest first. Rows
    above a rate stand for many requests, so this is enough for most floods.
    """
    rows = Refusal.objects.filter(
        pk__gte=first_id_since(Refusal, "created_at", span.start),
        created_at__gte=span.start,
        created_at__lt=span.end,
    )
    after = span.end + _DISORDER
    if after < timezone.now():  # Else rows are still added, and the id is kept in memory.
        rows = rows.filter(pk__lt=first_id_since(Refusal, "created_at", after))
    filters = {"project": span.projects, "api_key": span.api_keys, "model": span.models}
    for column, values in filters.items():
        if values is not None:
            rows = rows.filter(**{f"{column}__in": list(values)})
    newest = rows.order_by("-pk")[: MAX_READ + 1]
    found = newest.aggregate(requests=Sum("count"), read=Count("pk"))
    return found["requests"] or 0, found["read"] > MAX_READ
