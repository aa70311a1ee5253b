"""Long lists of the admin: newest first, paged by keyset, never counted or scanned to the end.

A page begins below an id (``before``) or above an id (``after``). The list searches windows of
ids, one after the other, until the page is full or ``_TIME_LIMIT_S`` is over; the link to the next
page continues there. So a filter that matches almost nothing answers as fast as any other.
Windows begin small and grow, because a filter may cost microseconds per row or read long texts; one
that would take longer than the time that is left is made smaller.
"""

from __future__ import annotations

import datetime as dt
import time
from dataclasses import dataclass
from typing import Any

from django.db.models import Max, Min, Model, QuerySet

_SMALLEST_WINDOW, _FIRST_WINDOW, _LARGEST_WINDOW = 100, 250, 100_000
_TIME_LIMIT_S = 0.08
_DISORDER = dt.timedelta(minutes=1)
"""Ids and times may differ in order by as much as one transaction lasts."""


@dataclass(frozen=True, slots=True)
class Found:
    """Rows of one page in search order.

    The next page starts at the id ``reached``; None means that there are no more rows.
    """

    rows: list[Any]
    reached: int | None


def look_down(rows: QuerySet[Any], before: int | None, wanted: int) -> Found:
    """Return the newest rows with ids below ``before``, newest first."""
    lowest, highest = _bounds(rows.model)
    top = highest + 1 if before is None else min(before, highest + 1)
    found: list[Any] = []
    windows = _Windows()
    while top > lowest and len(found) <= wanted:
        bottom = max(lowest, top - windows.size)
        window = rows.filter(pk__lt=top, pk__gte=bottom).order_by("-pk")
        found += window[: wanted + 1 - len(found)]
        top = bottom
        if not windows.has_next() and len(found) <= wanted and top > lowest:
            return Found(found, top)
    return _page(found, wanted)


def look_up(rows: QuerySet[Any], after: int, wanted: int) -> Found:
    """Return the oldest rows with ids above ``after``, oldest first."""
    lowest, highest = _bounds(rows.model)
    bottom = max(after, lowest - 1)
    found: list[Any] = []
    windows = _Windows()
    while bottom < highest and len(found) <= wanted:
        top = bottom + windows.size
        window = rows.filter(pk__gt=bottom, pk__lte=top).order_by("pk")
        found += window[: wanted + 1 - len(found)]
        bottom = top
        if not windows.has_next() and len(found) <= wanted and bottom < highest:
            return Found(found, bottom)
    return _page(found, wanted)


def _page(found: list[Any], wanted: int) -> Found:
    return Found(found[:wanted], found[wanted - 1].pk if len(found) > wanted else None)


class _Windows:
    """How many ids each window has, from how long the one before it took."""

    def __init__(self) -> None:
        self.size = _FIRST_WINDOW
        self._began = time.monotonic()
        self._give_up_at = self._began + _TIME_LIMIT_S

    def has_next(self) -> bool:
        """Return whether there is time for another window, after the present one was searched."""
        now = time.monotonic()
        left_s, took_s = self._give_up_at - now, now - self._began
        fitting = int(self.size * left_s / took_s) if took_s else _LARGEST_WINDOW
        self.size = min(4 * self.size, max(fitting, _SMALLEST_WINDOW), _LARGEST_WINDOW)
        self._began = now
        return left_s > 0


def _bounds(model: type[Model]) -> tuple[int, int]:
    ends = model._default_manager.aggregate(low=Min("pk"), high=Max("pk"))
    return (0, -1) if ends["low"] is None else (ends["low"], ends["high"])


def first_since(model: type[Model], field: str, moment: dt.datetime) -> int:
    """Return an id such that all rows below it are older than ``moment``, found by bisection.

    Ids grow with time, so no index on the time is needed.
    """
    wanted = moment - _DISORDER
    low, high = _bounds(model)
    high += 1
    while low < high:
        middle = (low + high) // 2
        at = model._default_manager.filter(pk__gte=middle).order_by("pk")
        row = at.values_list("pk", field).first()
        if row is None or row[1] >= wanted:
            high = middle
        else:
            low = row[0] + 1
    return low
