"""Rows of tables whose ids grow with their time of creation: found and deleted by age."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, cast

from django.db.models import Max, Min, Model, QuerySet

_MAX_DISORDER = dt.timedelta(minutes=1)
"""Longest transaction that is allowed for: a row with a lower id may have a later time."""


def id_bounds(model: type[Model]) -> tuple[int, int]:
    """Return the lowest and the highest id of a table; (0, -1) if it is empty."""
    bounds = model._default_manager.aggregate(low=Min("pk"), high=Max("pk"))
    return (0, -1) if bounds["low"] is None else (bounds["low"], bounds["high"])


def first_id_since(model: type[Model], field: str, moment: dt.datetime) -> int:
    """Return an id below which all rows are older than ``moment``."""
    return _first_id_at(model, field, moment - _MAX_DISORDER)


# Cached because all projects with the same retention have the same limit.
@lru_cache(maxsize=64)
def _first_id_at(model: type[Model], field: str, moment: dt.datetime) -> int:
    """Return an id from which on rows are not older than ``moment``, but for disorder.

    Ids grow with time, so a bisection of the ids needs no index on the time.
    """
    low, high = id_bounds(model)
    high += 1
    while low < high:
        middle = (low + high) // 2
        following = model._default_manager.filter(pk__gte=middle).order_by("pk")
        row = following.values_list("pk", field).first()
        if row is None or row[1] >= moment:
            high = middle
        else:
            low = row[0] + 1
    return low


def old_ids(
    rows: QuerySet[Any], limit: dt.datetime, until: float, batch: int
) -> Iterator[list[int]]:
    """Yield batches of ids of rows that were created before ``limit``, the lowest first.

    No batch starts after the monotonic time ``until``. Where ids are in disorder, there may be
    younger rows among them.

    Only ids are read, so that PostgreSQL can use an index that begins with the columns by which
    ``rows`` are filtered, and skips the rows of others. The caller checks the time and all other
    conditions when it deletes: each batch in a transaction, so that writers wait for one at most.
    """
    if time.monotonic() >= until:
        return
    after, model = 0, cast(type[Model], rows.model)
    old = rows.filter(pk__lt=_first_id_at(model, "created_at", limit)).order_by("pk")
    while True:
        ids = list(old.filter(pk__gt=after).values_list("pk", flat=True)[:batch])
        if ids:
            yield ids
        if len(ids) < batch or time.monotonic() >= until:
            return
        after = ids[-1]


def delete_older(rows: QuerySet[Any], limit: dt.datetime, until: float, batch: int) -> int:
    """Delete the rows of ``old_ids`` that were created before ``limit``; return how many."""
    found = old_ids(rows, limit, until, batch)
    return sum(rows.filter(pk__in=ids, created_at__lt=limit).delete()[0] for ids in found)


def delete_in_batches(rows: QuerySet[Any], until: float, batch: int) -> int:
    """Delete the rows in their order, a batch in a transaction; return how many.

    No batch starts after the monotonic time ``until``.
    """
    deleted = 0
    while time.monotonic() < until and (ids := list(rows.values_list("pk", flat=True)[:batch])):
        deleted += rows.model._default_manager.filter(pk__in=ids).delete()[0]
    return deleted


_scanned: dict[tuple[type[Model], int], int] = {}
"""The highest id at which ``old_ids_among`` has looked, by model and project."""


def old_ids_among(
    model: type[Model], project: int, limit: dt.datetime, until: float, batch: int
) -> list[int]:
    """Return the ids of rows before ``limit`` among the next ``batch`` rows of a project.

    ``import_project`` stores rows with the times that they had, behind younger ones, where
    ``old_ids`` does not find them. Each call goes on after the rows of the last one, and begins
    again when there are no more; none looks at rows after the monotonic time ``until``.
    """
    if time.monotonic() >= until:
        return []
    after = _scanned.get((model, project), 0)
    rows = model._default_manager.filter(project=project, pk__gt=after).order_by("pk")
    found = list(rows.values_list("pk", "created_at")[:batch])
    _scanned[model, project] = found[-1][0] if len(found) == batch else 0
    return [pk for pk, created_at in found if created_at < limit]
