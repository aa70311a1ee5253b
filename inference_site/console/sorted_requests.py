"""Pages of requests that are sorted by something else than their time.

No index has durations or costs: it would cost every request some time at its end. Instead the
newest ``MAX_SORTED`` requests that match are read, only their ids and values, and sorted here. The
page says how many it has compared, and has a link to sort those before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import F, Max, Model, QuerySet, Value

from inference_site.console.request_filters import LogFilters
from inference_site.core.admin_pages.base_admin import KeysetPage, keyset_page
from inference_site.runs.models import Generation
from inference_site.runs.request_log.models import Refusal

MAX_SORTED = 5_000
"""How many requests are compared: their ids and values are read in about 50 ms."""
_VALUES: dict[str, Any] = {
    "time": F("pk"),
    "duration": F("finished_at") - F("created_at"),
    "ttft": F("first_token_at") - F("created_at"),
    "queue": F("claimed_at") - F("created_at"),
    "tokens": F("input_tokens") + F("output_tokens"),
    "cost": F("cost"),
}
_VALUES_OF_REFUSALS: dict[str, Any] = {"time": F("pk"), "duration": F("duration_ms")}
_FACETS = ("status", "error_code", "api_key_id", "model")


@dataclass(frozen=True, slots=True)
class SortedPage:
    """One page of a sorted list.

    ``compared`` has the values of all that were sorted, newest first, for the facets. ``top`` is
    the cursor of this list, ``older`` that of the requests before the compared ones, None at the
    end of the log. Rows without a value, such as a duration before the end, come last.
    """

    shown: Sequence[Any]
    compared: Sequence[Any]
    top: str
    older: str | None
    has_next: bool


def sorted_page(filters: LogFilters, size: int) -> SortedPage:
    """Return a page of the accepted requests, or of the refused ones if the status is of these."""
    column, is_descending = filters.sort.removeprefix("-"), filters.sort.startswith("-")
    model: type[Model] = Refusal if filters.is_of_refusals else Generation
    rows: QuerySet[Any] | None = filters.generations()
    value, number = _VALUES[column], Value(1) if model is Generation else F("count")
    if model is Refusal:
        rows, value = filters.refusals(), _VALUES_OF_REFUSALS.get(column, F("pk"))
    before = None if filters.before is None else filters.before[model is Refusal]
    if before is None:
        before = (model._default_manager.aggregate(top=Max("pk"))["top"] or 0) + 1
    found = KeysetPage([], None)
    if rows is not None:
        named = rows.annotate(sorted_by=value, requests=number)
        named = named.values_list("pk", "sorted_by", "requests", *_FACETS, named=True)
        found = keyset_page(named, MAX_SORTED, before=before)
    known = [row for row in found.rows if row.sorted_by is not None]
    known.sort(key=lambda row: row.sorted_by, reverse=is_descending)
    ordered = [*known, *(row for row in found.rows if row.sorted_by is None)]
    first = (filters.page - 1) * size
    ids = [row.pk for row in ordered[first : first + size]]
    read = model._default_manager.in_bulk(ids)
    return SortedPage(
        shown=[read[id_] for id_ in ids if id_ in read],
        compared=found.rows,
        top=_cursor(model, before),
        older=None if found.reached is None else _cursor(model, found.reached),
        has_next=len(ordered) > first + size,
    )


def _cursor(model: type[Model], id_: int) -> str:
    return f"0-{id_}" if model is Refusal else f"{id_}-0"
