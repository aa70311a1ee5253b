"""One page of the request log: two tables, merged by time, each paged by its own ids.

The cursor of a page is a pair of ids. So nothing is copied, no row is shown twice or left out, and
no index on the time is needed.
"""

from __future__ import annotations

import datetime as dt
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from django.db.models import Max, Model, QuerySet

from inference_site.admin_pages.keyset import Found, look_down
from inference_site.console.request_log.choice import Choice
from inference_site.generations.models import Generation
from inference_site.request_log.models import Refusal

PAGE = 50
LOOKED_AT = 500
"""Rows of each table that are looked at: the page is the newest of them, facets count them all."""

Entry = Generation | Refusal


@dataclass(frozen=True, slots=True)
class Listed:
    """The rows of a page, newest first, and those that facets count.

    ``older`` is the cursor of the next page; None at the end of the log.
    """

    shown: Sequence[Entry]
    counted: Sequence[Entry]
    older: str | None
    is_cut_short: bool


class _Side:
    """One of the two tables, below an id."""

    def __init__(self, model: type[Model], rows: QuerySet[Any] | None, before: int | None) -> None:
        if before is None:
            before = (model._default_manager.aggregate(top=Max("pk"))["top"] or 0) + 1
        self.before = before
        found = Found([], None) if rows is None else look_down(rows, before, LOOKED_AT)
        self.rows: list[Any] = found.rows
        self.is_cut_short = found.reached is not None and len(found.rows) < LOOKED_AT
        self.has_more = found.reached is not None
        self._reached = found.reached
        self._model = model

    def floor(self) -> dt.datetime | None:
        """Return the time down to which it was searched; None: as far as its rows go."""
        if not self.is_cut_short:
            return None
        at = self._model._default_manager.filter(pk__gte=self._reached).order_by("pk")
        row = at.values_list("created_at", flat=True).first()
        return row if isinstance(row, dt.datetime) else None

    def below(self, shown: Sequence[Any]) -> int:
        """Return the id below which it goes on after these rows."""
        own = [row for row in shown if isinstance(row, self._model)]
        if self.is_cut_short and len(own) == len(self.rows) and self._reached is not None:
            return self._reached
        return own[-1].pk if own else self.before


def listed(choice: Choice) -> Listed:
    """Return the page of a choice that is not one of words."""
    generations, refusals = choice.before or (None, None)
    sides = (
        _Side(Generation, choice.generations(), generations),
        _Side(Refusal, choice.refusals(), refusals),
    )
    # What is older than a table was searched for may not come before what it still has.
    floors = [floor for side in sides if (floor := side.floor()) is not None]
    floor = max(floors, default=dt.datetime.min.replace(tzinfo=dt.UTC))
    merged: list[Any] = list(
        takewhile(
            lambda row: row.created_at >= floor,
            heapq.merge(*(side.rows for side in sides), key=_time, reverse=True),
        )
    )
    shown = merged[:PAGE]
    has_older = len(merged) > PAGE or any(side.has_more for side in sides)
    cursor = "-".join(str(side.below(shown)) for side in sides)
    is_cut_short = len(shown) < PAGE and any(side.is_cut_short for side in sides)
    return Listed(shown, merged, cursor if has_older else None, is_cut_short)


def _time(row: Any) -> dt.datetime:
    at: dt.datetime = row.created_at
    return at
