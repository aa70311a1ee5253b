"""What a user has chosen to see of the usage: a time range, filters, the groups of the table."""

from __future__ import annotations

import csv
import datetime as dt
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, QueryDict
from django.urls import reverse
from django.utils import timezone

from inference_site.accounts.models import ApiKey, Project
from inference_site.admin_pages.labels import milliseconds, money
from inference_site.alarms.models import Alarm
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.model_labels import cost_label
from inference_site.console.charts import Chart, Series, chart
from inference_site.console.tiles import LEAST, SLOWEST, short, summed, tiles_now, tiles_of
from inference_site.usage.csv_export import usage_rows
from inference_site.usage.histograms import percentile
from inference_site.usage.models import Measure, Period
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

CUSTOM = "custom"
GROUPS = {"model": "Model", "project_id": "Project", "api_key_id": "API key"}
_FIELD_FORMAT = "%Y-%m-%dT%H:%M"
"""That of an input of the type ``datetime-local``."""
_LONGEST = dt.timedelta(days=730)
_OF_MINUTES, _OF_HOURS = dt.timedelta(hours=6), dt.timedelta(days=7)
"""The longest ranges with a bucket for each minute and for each hour."""
_MINUTES_KEPT, _HOURS_KEPT = dt.timedelta(days=2), dt.timedelta(days=35)
_TICKS = {Period.MINUTE: "%H:%M", Period.HOUR: "%m-%d %H:%M", Period.DAY: "%Y-%m-%d"}
_FULL = {Period.MINUTE: "%Y-%m-%d %H:%M", Period.HOUR: "%Y-%m-%d %H:%M", Period.DAY: "%Y-%m-%d"}
_A_DAY = dt.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Range:
    """A time range to choose: its length, and the period of its buckets."""

    id: str
    label: str
    span: dt.timedelta
    period: Period


RANGES = (
    Range("1h", "1 hour", dt.timedelta(hours=1), Period.MINUTE),
    Range("24h", "24 hours", _A_DAY, Period.HOUR),
    Range("7d", "7 days", dt.timedelta(days=7), Period.HOUR),
    Range("30d", "30 days", dt.timedelta(days=30), Period.DAY),
)


@dataclass(frozen=True, slots=True)
class Choice:
    """The buckets to read, with the filters; ``range`` is the id of a range, or ``CUSTOM``."""

    range: str
    group: str
    span: Span

    @property
    def is_custom(self) -> bool:
        """Whether the user gave the start and the end."""
        return self.range == CUSTOM

    @property
    def project(self) -> int | None:
        """The project that is chosen."""
        return self.span.projects[0] if self.span.projects else None

    @property
    def api_key(self) -> int | None:
        """The key that is chosen."""
        return self.span.api_keys[0] if self.span.api_keys else None

    @property
    def model(self) -> str | None:
        """The model that is chosen."""
        return self.span.models[0] if self.span.models else None

    @property
    def start_field(self) -> str:
        """The start as a field of the form has it."""
        return f"{self.span.start:{_FIELD_FORMAT}}"

    @property
    def end_field(self) -> str:
        """The end as a field of the form has it."""
        return f"{self.span.end:{_FIELD_FORMAT}}"

    def ticks(self) -> list[str]:
        """Return the label of each bucket for the axis."""
        period = self.span.period
        is_short = self.span.end - self.span.start <= _A_DAY
        format_ = "%H:%M" if period == Period.HOUR and is_short else _TICKS[period]
        return [start.strftime(format_) for start in self.span.starts()]

    def times(self) -> list[str]:
        """Return the time of each bucket."""
        return [start.strftime(_FULL[self.span.period]) for start in self.span.starts()]


def chosen(query: QueryDict, now: dt.datetime) -> Choice:
    """Return the choice in a query string; missing and invalid values become the defaults."""
    group, given = str(query.get("by", "")), query.get("range")
    found = next((one for one in RANGES if one.id == given), RANGES[1])
    period, start, end = _until_now(found, now) if given != CUSTOM else _custom(query, now)
    project, key = _number(query, "project"), _number(query, "key")
    model = query.get("model", "").replace("\0", "")
    return Choice(
        range=CUSTOM if given == CUSTOM else found.id,
        group=group if group in GROUPS else "model",
        span=Span(
            period,
            start,
            end,
            projects=None if project is None else [project],
            api_keys=None if key is None else [key],
            models=[model] if model else None,
        ),
    )


def _until_now(range_: Range, now: dt.datetime) -> tuple[Period, dt.datetime, dt.datetime]:
    end = floor(now, range_.period) + LENGTH[range_.period]
    return range_.period, end - range_.span, end


def _custom(query: QueryDict, now: dt.datetime) -> tuple[Period, dt.datetime, dt.datetime]:
    """Return whole buckets from ``from`` to ``to``, both in UTC; without them, the last day.

    The period is the finest that is kept for so long and makes a few hundred buckets.
    """
    end = _moment(query, "to") or now
    start = _moment(query, "from") or end - _A_DAY
    start, end = min(start, end), max(start, end)
    start = max(start, end - _LONGEST)
    length, age = end - start, now - start
    if length <= _OF_MINUTES and age <= _MINUTES_KEPT:
        period = Period.MINUTE
    elif length <= _OF_HOURS and age <= _HOURS_KEPT:
        period = Period.HOUR
    else:
        period = Period.DAY
    last = floor(end, period)
    return period, floor(start, period), end if end == last > start else last + LENGTH[period]


def _moment(query: QueryDict, name: str) -> dt.datetime | None:
    try:
        found = dt.datetime.strptime(f"{query.get(name, '')[:16]}+0000", f"{_FIELD_FORMAT}%z")
    except ValueError:
        return None
    # The first and the last years leave no room for a range.
    return found if 2000 <= found.year < 2200 else None


def _number(query: QueryDict, name: str) -> int | None:
    given = query.get(name, "")
    return int(given) if given.isdecimal() and len(given) <= 18 else None


PERMISSION = "usage.view_usagerollup"
_MOST_ALARMS = 10
_MOST_KEYS = 200
_MOST_GROUPS = 50


def home_context(request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the home page."""
    if not request.user.has_perm(PERMISSION):
        return {"may_see_usage": False}
    choice = chosen(request.GET, timezone.now())
    with reading():
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
    with reading():
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
