"""The home page: usage in a time range, as tiles, charts, a table and CSV.

The server draws charts as SVG, each with a title, a description and a table.
"""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from django.contrib.auth.decorators import permission_required
from django.http import HttpRequest, QueryDict
from django.http.response import HttpResponseBase
from django.utils import timezone
from django.utils.html import format_html_join
from django.utils.safestring import SafeString

from inference_site.accounts.models import END_USER, TAG
from inference_site.catalogue.catalogue import catalogue
from inference_site.console.downloads import download, log_export
from inference_site.console.request_filters import key_within, offered_keys, project_form
from inference_site.console.tiles import (
    LOWEST,
    SLOWEST,
    VIEW_REQUESTS,
    linked,
    refused_tile,
    short,
    sum_of,
    tiles_now,
    usage_before,
    usage_tiles,
)
from inference_site.console.usage_table import (
    COLUMNS,
    UsageTable,
    dimension_label,
    dimensions,
    downloaded,
    downloaded_columns,
)
from inference_site.core.admin_pages.base_admin import SPANS, id_of
from inference_site.core.admin_pages.labels import milliseconds
from inference_site.core.site_settings.models import LONGEST_TAG, site_settings
from inference_site.runs.usage.models import (
    LONGEST_VALUE,
    Measure,
    Period,
    UsageRollup,
    percentile,
)
from inference_site.runs.usage.queries import (
    PERIOD_LENGTH,
    Histograms,
    Span,
    Usage,
    floor,
    histograms,
    usage_by,
    without_table_scans,
)

WIDTH, HEIGHT = 720, 230
LEFT, BOTTOM, TOP = 84, 32, 14
_PLOT_WIDTH, _PLOT_HEIGHT = WIDTH - LEFT, HEIGHT - BOTTOM - TOP
_MAX_LABELS = 6

Format = Callable[[float], str]
PERMISSION = "usage.view_usagerollup"
CUSTOM = "custom"
_FIELD_FORMAT = "%Y-%m-%dT%H:%M"
"""Format of an input of the type ``datetime-local``."""
_A_DAY = dt.timedelta(days=1)
_MAX_RANGE = dt.timedelta(days=730)
_MAX_RANGE_OF = {Period.MINUTE: dt.timedelta(hours=6), Period.HOUR: dt.timedelta(days=7)}
"""The longest ranges with a bucket for each minute and for each hour."""
_KEPT_FOR = {Period.MINUTE: dt.timedelta(days=2), Period.HOUR: dt.timedelta(days=35)}
_TICK_FORMAT = {Period.MINUTE: "%H:%M", Period.HOUR: "%m-%d %H:%M", Period.DAY: "%Y-%m-%d"}
_TIME_FORMAT = {
    Period.MINUTE: "%Y-%m-%d %H:%M",
    Period.HOUR: "%Y-%m-%d %H:%M",
    Period.DAY: "%Y-%m-%d",
}


@dataclass(frozen=True, slots=True)
class Series:
    """One value for each time bucket; None where nothing was measured."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Bar:
    """One rectangle of a stacked bar; ``series`` is the number of its series."""

    series: int
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class SeriesPath:
    """The SVG path of one series."""

    series: int
    path: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A label on an axis; ``position`` is its coordinate along the axis."""

    position: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """The shapes that the template draws, in a view box of ``WIDTH`` by ``HEIGHT``.

    Each entry of ``rows`` is the label of a bucket and its values as text.
    """

    id: str
    title: str
    description: str
    names: Sequence[str]
    bars: Sequence[Bar]
    lines: Sequence[SeriesPath]
    y_ticks: Sequence[Tick]
    x_ticks: Sequence[Tick]
    rows: Sequence[tuple[str, Sequence[str]]]
    is_empty: bool

    @property
    def areas(self) -> list[SeriesPath]:
        """The bars of each series as one path; a week of hours has hundreds of bars."""
        paths: dict[int, list[str]] = {}
        for bar in self.bars:
            rectangle = f"M{bar.x} {bar.y}h{bar.width}v{bar.height}h-{bar.width}z"
            paths.setdefault(bar.series, []).append(rectangle)
        return [SeriesPath(number, "".join(parts)) for number, parts in sorted(paths.items())]

    @property
    def table_rows(self) -> SafeString:
        """The rows as HTML; a template would take as long for them as for the rest of the page."""
        return format_html_join(
            "\n",
            '<tr><th scope="row">{}</th>{}</tr>',
            (
                (
                    label,
                    format_html_join("", '<td class="num">{}</td>', ((value,) for value in values)),
                )
                for label, values in self.rows
            ),
        )


def chart(
    id_: str,
    title: str,
    labels: Sequence[str],
    series: Sequence[Series],
    shape: Literal["bars", "lines"],
    text: Format,
    ticks: Sequence[str] | None = None,
) -> Chart:
    """Return a chart of the series as stacked bars or as lines; ``text`` formats a value.

    ``ticks`` are short labels for the axis, one for each of ``labels``.
    """
    by_bucket = list(zip(*(one.values for one in series), strict=True))
    if shape == "bars":
        heights: list[float] = [sum(value or 0 for value in values) for values in by_bucket]
    else:
        heights = [value for values in by_bucket for value in values if value is not None]
    top = _axis_top(max(heights, default=0))
    names = ticks or labels
    every = max(1, math.ceil(len(names) / _MAX_LABELS))
    return Chart(
        id=id_,
        title=title,
        description=_description(series, labels, text),
        names=[one.name for one in series],
        bars=_stacked_bars(series, len(labels), top) if shape == "bars" else (),
        lines=[
            SeriesPath(number, _line(one.values, top))
            for number, one in enumerate(series)
            if shape == "lines"
        ],
        y_ticks=[Tick(_y(top * part / 4, top), text(top * part / 4)) for part in (0, 2, 4)],
        x_ticks=[
            Tick(_x(bucket, len(names)), names[bucket])
            for bucket in range(every // 2, len(names), every)
        ],
        rows=[
            (label, ["—" if value is None else text(value) for value in values])
            for label, values in zip(labels, by_bucket, strict=True)
        ],
        is_empty=not any(value for values in by_bucket for value in values),
    )


def _axis_top(highest: float) -> float:
    """Return the smallest round number that is at least the highest value."""
    if highest <= 0:
        return 1
    unit: float = 10 ** math.floor(math.log10(highest))
    return next(unit * step for step in (1, 2, 4, 5, 8, 10) if unit * step >= highest)


def _y(value: float, top: float) -> float:
    return round(TOP + _PLOT_HEIGHT * (1 - value / top), 1)


def _x(bucket: int, buckets: int) -> float:
    """Return the middle of a bucket."""
    return round(LEFT + (bucket + 0.5) * _PLOT_WIDTH / buckets, 1)


def _stacked_bars(series: Sequence[Series], buckets: int, top: float) -> list[Bar]:
    step = _PLOT_WIDTH / max(1, buckets)
    gap = min(2.0, step * 0.15)
    bars: list[Bar] = []
    for bucket in range(buckets):
        below = 0.0
        x = round(LEFT + bucket * step + gap / 2, 1)
        for number, one in enumerate(series):
            value = one.values[bucket] or 0
            if value:
                upper, lower = _y(below + value, top), _y(below, top)
                bars.append(Bar(number, x, upper, round(step - gap, 1), round(lower - upper, 1)))
                below += value
    return bars


def _line(values: Sequence[float | None], top: float) -> str:
    """Return an SVG path with gaps for missing values; a value between two gaps is a dash."""
    parts, is_drawing = [], False
    for bucket, value in enumerate(values):
        if value is None:
            is_drawing = False
            continue
        x, y = _x(bucket, len(values)), _y(value, top)
        parts.append(f"L{x} {y}" if is_drawing else f"M{x - 2} {y}L{x + 2} {y}")
        is_drawing = True
    return "".join(parts)


def _description(series: Sequence[Series], labels: Sequence[str], text: Format) -> str:
    """Return the text alternative: the highest value of each series, and its time."""
    sentences = []
    for one in series:
        found = [(value, label) for value, label in zip(one.values, labels, strict=True) if value]
        if found:
            highest, label = max(found)
            sentences.append(f"{one.name}: at most {text(highest)}, at {label}")
    return "; ".join(sentences) or "No data in this time range."


@dataclass(frozen=True, slots=True)
class Range:
    """A time range that the page offers: its length, and the period of its buckets."""

    id: str
    label: str
    length: dt.timedelta
    period: Period


RANGES = (
    Range("1h", "1 hour", dt.timedelta(hours=1), Period.MINUTE),
    Range("24h", "24 hours", _A_DAY, Period.HOUR),
    Range("7d", "7 days", dt.timedelta(days=7), Period.HOUR),
    Range("30d", "30 days", dt.timedelta(days=30), Period.DAY),
)


FILTER_NAMES = ("range", "from", "to", "project", "key", "model", "by", "user", "tag")
"""Query parameters of the filters."""


@dataclass(frozen=True, slots=True)
class UsageFilters:
    """The filters of the page; ``range`` is the id of a range or ``CUSTOM``, ``group`` a key of
    ``COLUMNS`` or a dimension. ``note`` says what cannot be shown together."""

    range: str
    group: str
    span: Span
    note: str = ""

    @property
    def user(self) -> str:
        """The chosen end user."""
        return (self.span.value or "") if self.span.dimension == END_USER else ""

    @property
    def tag(self) -> str:
        """The chosen tag, as ``name=value``."""
        dimension = self.span.dimension or END_USER
        return "" if dimension == END_USER else f"{dimension[len(TAG) :]}={self.span.value}"

    @property
    def is_custom(self) -> bool:
        """Whether the user gave the start and the end."""
        return self.range == CUSTOM

    @property
    def project(self) -> int | None:
        """The chosen project."""
        return self.span.projects[0] if self.span.projects else None

    @property
    def api_key(self) -> int | None:
        """The chosen API key."""
        return self.span.api_keys[0] if self.span.api_keys else None

    @property
    def model(self) -> str | None:
        """The chosen model."""
        return self.span.models[0] if self.span.models else None

    @property
    def start_field(self) -> str:
        """The start as the value of a form field."""
        return f"{self.span.start:{_FIELD_FORMAT}}"

    @property
    def end_field(self) -> str:
        """The end as the value of a form field."""
        return f"{self.span.end:{_FIELD_FORMAT}}"


def may_see_values(user: Any) -> bool:
    """Return whether a user may see end users and tags, as in the list of requests."""
    return bool(user.has_perm(VIEW_REQUESTS))


def filters_of(query: QueryDict, now: dt.datetime, *, has_dimensions: bool = True) -> UsageFilters:
    """Return the filters in a query string; missing and invalid values become the defaults.

    Usage is kept by end user or by one tag, not by two of them: the first of end user, tag and
    group that is given counts.
    """
    range_id = query.get("range")
    if range_id == CUSTOM:
        period, start, end = _custom_range(query, now)
    else:
        chosen = next((one for one in RANGES if one.id == range_id), RANGES[1])
        range_id, period = chosen.id, chosen.period
        end = floor(now, period) + PERIOD_LENGTH[period]
        start = end - chosen.length
    project, key = (id_of(query.get(name, "")) for name in ("project", "key"))
    key = key_within(project, key)
    model = query.get("model", "")
    group, dimension, value, note = query.get("by", ""), None, None, ""
    if has_dimensions:
        dimension, value = _dimension_of(query)
        if dimension == END_USER and query.get("tag", ""):
            note = "Usage of an end user is not kept by tag: the filter by tag does not apply."
        if _is_dimension(group) and dimension not in (None, group):
            note = f"Usage of one {dimension_label(str(dimension)).lower()} is not kept by another."
            group = ""
    is_group = group in COLUMNS or (has_dimensions and _is_dimension(group))
    return UsageFilters(
        range=range_id,
        group=group if is_group else "model",
        note=note,
        span=Span(
            period,
            start,
            end,
            projects=None if project is None else [project],
            api_keys=None if key is None else [key],
            models=[model] if model else None,
            dimension=dimension,
            value=value,
        ),
    )


def _dimension_of(query: QueryDict) -> tuple[str | None, str | None]:
    """Return the dimension and value of the filter by end user or by tag, if there is one."""
    user, tag = (query.get(name, "").strip() for name in ("user", "tag"))
    if user:
        return END_USER, user[:LONGEST_VALUE]
    key, _, value = tag.partition("=")
    is_tag = 0 < len(key) <= LONGEST_TAG and value
    return (TAG + key, value[:LONGEST_VALUE]) if is_tag else (None, None)


def _is_dimension(group: str) -> bool:
    is_tag = group.startswith(TAG) and len(group) <= len(TAG) + LONGEST_TAG
    return group == END_USER or is_tag


def _custom_range(query: QueryDict, now: dt.datetime) -> tuple[Period, dt.datetime, dt.datetime]:
    """Return whole buckets from ``from`` to ``to``, both in UTC; without them, the last day.

    The period is the finest that is still kept and makes a few hundred buckets.
    """
    end = _time_field(query, "to") or now
    start = _time_field(query, "from") or end - _A_DAY
    start, end = min(start, end), max(start, end)
    start = max(start, end - _MAX_RANGE)
    length, age = end - start, now - start
    for period in (Period.MINUTE, Period.HOUR):
        if length <= _MAX_RANGE_OF[period] and age <= _KEPT_FOR[period]:
            break
    else:
        period = Period.DAY
    last = floor(end, period)
    if end != last or last <= start:
        end = last + PERIOD_LENGTH[period]
    return period, floor(start, period), end


def _time_field(query: QueryDict, name: str) -> dt.datetime | None:
    try:
        found = dt.datetime.strptime(f"{query.get(name, '')[:16]}+0000", f"{_FIELD_FORMAT}%z")
    except ValueError:
        return None
    # A range at the first or last years of the calendar would overflow.
    return found if 2000 <= found.year < 2200 else None


def home_context(request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the home page."""
    if not request.user.has_perm(PERMISSION):
        return {"may_see_usage": False}
    may_see = may_see_values(request.user)
    filters = filters_of(request.GET, timezone.now(), has_dimensions=may_see)
    if not UsageRollup.objects.exists():
        # On a site without any request the page shows how to send the first one.
        listed = (spec.id for spec in catalogue().models.values() if spec.is_listed)
        return {
            "may_see_usage": True,
            "filters": filters,
            "tiles": tiles_now(),
            "first_steps": True,
            "first_model": next(listed, "MODEL"),
            "chat_address": request.build_absolute_uri("/v1/chat/completions"),
            "may_add_key": request.user.has_perm("accounts.add_apikey"),
            "may_add_model": request.user.has_perm("model_store.add_storedmodel"),
        }
    with without_table_scans():
        usage = usage_by(filters.span)
        # Latencies are not kept by dimension, and refused requests have no end user.
        is_whole = filters.span.dimension is None
        latencies = histograms(filters.span) if is_whole else None
        refused = refused_tile(filters.span) if is_whole else None
        since = filters.range if filters.range in SPANS else ""
        table = UsageTable(filters.span, filters.group, since, request.user)
        before = usage_before(filters.span)
    buckets = [usage.get((start, ()), Usage()) for start in filters.span.starts()]
    models, group = filters.span.models or (), filters.group
    tiles = usage_tiles(sum_of(buckets), latencies, models, before=before, refused=refused)
    return {
        "may_see_usage": True,
        "may_see_values": may_see,
        "has_tags": bool(filters.tag or site_settings().usage_tags),
        "filters": filters,
        "ranges": RANGES,
        "groups": [
            (id_, label)
            for id_, label in (COLUMNS | dimensions(group if group not in COLUMNS else "")).items()
            if may_see or id_ in COLUMNS
        ],
        "project_form": project_form(request, filters.project),
        "keys": offered_keys(filters.project, filters.api_key),
        "models": list(catalogue().models),
        "tiles": linked([*tiles, *tiles_now()], request.user, filters.span, since),
        "charts": _charts(filters.span, buckets, latencies),
        "table": table,
    }


@permission_required(PERMISSION, raise_exception=True)
def usage_download(request: HttpRequest, form: str) -> HttpResponseBase:
    """Download the usage of the home page by bucket, project, key and model, and by the end user or
    tag of its filter or table."""
    filters = filters_of(request.GET, timezone.now(), has_dimensions=may_see_values(request.user))
    log_export(request, "Usage", form, FILTER_NAMES)
    columns = downloaded_columns(filters.group, filters.span)
    rows = downloaded(filters.group, filters.span)
    return download(f"usage-{filters.range}", form, columns, rows)


def _charts(span: Span, buckets: Sequence[Usage], latencies: Histograms | None) -> list[Chart]:
    starts, period = list(span.starts()), span.period
    times = [start.strftime(_TIME_FORMAT[period]) for start in starts]
    is_one_day = period == Period.HOUR and span.end - span.start <= _A_DAY
    tick_format = "%H:%M" if is_one_day else _TICK_FORMAT[period]
    ticks = [start.strftime(tick_format) for start in starts]
    requests = [
        Series("completed", [usage.completed for usage in buckets]),
        Series("cancelled", [usage.cancelled for usage in buckets]),
        Series("failed", [usage.failed for usage in buckets]),
    ]
    tokens = [
        Series("input", [usage.input_tokens - usage.cached_tokens for usage in buckets]),
        Series("cached input", [usage.cached_tokens for usage in buckets]),
        Series("output", [usage.output_tokens for usage in buckets]),
    ]
    counts = [
        chart("requests", "Requests", times, requests, "bars", short, ticks),
        chart("tokens", "Tokens", times, tokens, "bars", short, ticks),
    ]
    if latencies is None:
        return counts
    ttft = _percentiles(latencies[Measure.TTFT], starts, SLOWEST)
    speed = _percentiles(latencies[Measure.SPEED], starts, LOWEST)
    ms, speed_title = milliseconds, "Tokens per second of one answer"
    return [
        *counts,
        chart("ttft", "Time to first token", times, ttft, "lines", ms, ticks),
        chart("speed", speed_title, times, speed, "lines", short, ticks),
    ]


def _percentiles(
    counts: Mapping[dt.datetime, Counter[int]],
    starts: Sequence[dt.datetime],
    fractions: Mapping[str, float],
) -> list[Series]:
    return [
        Series(name, [percentile(counts.get(start, {}), fraction) for start in starts])
        for name, fraction in fractions.items()
    ]
