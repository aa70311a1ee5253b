"""Keyset pages of large tables: newest first, by id, without counting or sorting the table.

A page begins below an id (``before``) or above one (``after``). A search reads windows of ids, one
after the other, until the page is full or ``_TIME_LIMIT_S`` is over; the next page continues there.
So a filter that matches few rows answers as fast as any other. The first window is small and
windows grow, because a filter may cost microseconds for a row or read long texts. A window that
would take longer than the time that remains is made smaller.
"""

from __future__ import annotations

import datetime as dt
import time
from dataclasses import dataclass
from typing import Any

from django.db.models import Max, Min, Model, QuerySet

_SMALLEST_WINDOW, _FIRST_WINDOW, _LARGEST_WINDOW = 100, 250, 100_000
_TIME_LIMIT_S = 0.08
_MAX_DISORDER = dt.timedelta(minutes=1)
"""Longest transaction that is allowed for: a row with a lower id may have a later time."""


@dataclass(frozen=True, slots=True)
class KeysetPage:
    """Rows of one page, in the order of the search.

    ``reached`` is the id at which the next page starts, None if there are no more rows.
    """

    rows: list[Any]
    reached: int | None


def keyset_page(
    rows: QuerySet[Any], limit: int, *, before: int | None = None, after: int | None = None
) -> KeysetPage:
    """Return at most ``limit`` rows: the newest below ``before``, or the oldest above ``after``.

    The rows above ``after`` are oldest first, all others newest first. Without a cursor the page
    begins at the newest row.
    """
    lowest, highest = _id_bounds(rows.model)
    is_upward = after is not None
    # The ids that are not searched yet are those from ``low`` to ``high``, both inclusive.
    low = lowest if after is None else max(after + 1, lowest)
    high = highest if before is None else min(before - 1, highest)
    found: list[Any] = []
    windows = _Windows()
    while low <= high and len(found) <= limit:
        first, last = (
            (low, min(high, low + windows.size - 1))
            if is_upward
            else (max(low, high - windows.size + 1), high)
        )
        window = rows.filter(pk__gte=first, pk__lte=last).order_by("pk" if is_upward else "-pk")
        found += window[: limit + 1 - len(found)]
        low, high = (last + 1, high) if is_upward else (low, first - 1)
        if not windows.has_next() and len(found) <= limit and low <= high:
            return KeysetPage(found, last if is_upward else first)
    return KeysetPage(found[:limit], found[limit - 1].pk if len(found) > limit else None)


class _Windows:
    """The number of ids in each window, from the time that the previous window took."""

    def __init__(self) -> None:
        self.size = _FIRST_WINDOW
        self._began = time.monotonic()
        self._deadline = self._began + _TIME_LIMIT_S

    def has_next(self) -> bool:
        """Return whether there is time for another window; call it after each search."""
        now = time.monotonic()
        left_s, took_s = self._deadline - now, now - self._began
        fitting = int(self.size * left_s / took_s) if took_s else _LARGEST_WINDOW
        self.size = min(4 * self.size, max(fitting, _SMALLEST_WINDOW), _LARGEST_WINDOW)
        self._began = now
        return left_s > 0


def _id_bounds(model: type[Model]) -> tuple[int, int]:
    """Return the lowest and the highest id of a table; (0, -1) if it is empty."""
    bounds = model._default_manager.aggregate(low=Min("pk"), high=Max("pk"))
    return (0, -1) if bounds["low"] is None else (bounds["low"], bounds["high"])


def first_id_since(model: type[Model], field: str, moment: dt.datetime) -> int:
    """Return an id below which all rows are older than ``moment``.

    Ids grow with time, so a bisection of the ids needs no index on the time.
    """
    earliest = moment - _MAX_DISORDER
    low, high = _id_bounds(model)
    high += 1
    while low < high:
        middle = (low + high) // 2
        following = model._default_manager.filter(pk__gte=middle).order_by("pk")
        row = following.values_list("pk", field).first()
        if row is None or row[1] >= earliest:
            high = middle
        else:
            low = row[0] + 1
    return low
