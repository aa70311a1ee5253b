"""What a user has chosen to see of the usage: a time range, filters, the groups of the table."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from django.http import QueryDict

from inference_site.usage.models import Period
from inference_site.usage.queries import PERIOD_LENGTH, Span, floor

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
    end = floor(now, range_.period) + PERIOD_LENGTH[range_.period]
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
    return (
        period,
        floor(start, period),
        end if end == last > start else last + PERIOD_LENGTH[period],
    )


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
