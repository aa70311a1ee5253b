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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import Max, Min, Model, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from unfold.views import ChangeList

from inference_site.admin_pages.site_admin import SiteAdmin

BEFORE, AFTER = "before", "after"
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


class KeysetPaginator(Paginator[Any]):
    """Names the template of the page links; the change list finds the rows itself."""

    template_name = "console/keyset_pages.html"


class KeysetChangeList(ChangeList):
    """One page of a keyset list."""

    older: str | None = None
    newer: str | None = None
    is_cut_short = False

    def get_filters_params(self, params: Any = None) -> dict[str, Any]:
        found: dict[str, Any] = super().get_filters_params(params)
        return {key: value for key, value in found.items() if key not in (BEFORE, AFTER)}

    def get_results(self, request: HttpRequest) -> None:
        """Find the rows of the page, and where the next and previous pages begin."""
        self.paginator = KeysetPaginator([], self.list_per_page)
        self.result_list = self._find(_number(request, BEFORE), _number(request, AFTER))
        self.result_count = self.full_result_count = len(self.result_list)
        self.show_full_result_count = self.show_admin_actions = False
        self.can_show_all = self.multi_page = False

    def _find(self, before: int | None, after: int | None) -> Sequence[Model]:
        rows = self.queryset.order_by()
        if after is not None:
            found = look_up(rows, after, self.list_per_page)
            self.newer = self._link(AFTER, found.reached)
            self.older = self._link(BEFORE, after + 1)
            found.rows.reverse()
        else:
            found = look_down(rows, before, self.list_per_page)
            self.older = self._link(BEFORE, found.reached)
            self.newer = self._link(AFTER, None if before is None else before - 1)
        self.is_cut_short = found.reached is not None and len(found.rows) < self.list_per_page
        return found.rows

    def _link(self, side: str, place: int | None) -> str | None:
        if place is None:
            return None
        other = AFTER if side == BEFORE else BEFORE
        return str(self.get_query_string({side: place, other: None}))


def _number(request: HttpRequest, name: str) -> int | None:
    given = request.GET.get(name, "")
    return int(given) if given.isdecimal() and len(given) <= 18 else None


class KeysetAdmin(SiteAdmin):
    """Read-only admin of rows that only programs write."""

    list_per_page = 50
    list_fullwidth = True
    ordering = ("-pk",)
    sortable_by = ()
    search_fields: ClassVar[list[str] | tuple[str, ...]] = ("public_id__exact",)
    search_help_text = "Search by exact ID"
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # Facets count.

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> Any:
        return KeysetChangeList

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class SinceFilter(admin.SimpleListFilter):
    """Filter by age: how far back the list goes."""

    title, parameter_name = "time", "since"
    field = "created_at"
    _SPANS = {"1h": dt.timedelta(hours=1), "24h": dt.timedelta(days=1)}
    _SPANS |= {"7d": dt.timedelta(days=7), "30d": dt.timedelta(days=30)}
    _NAMES = {"1h": "Last hour", "24h": "Last 24 hours", "7d": "Last 7 days", "30d": "Last 30 days"}

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return list(self._NAMES.items())

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        span = self._SPANS.get(self.value() or "")
        if span is None:
            return queryset
        moment = timezone.now() - span
        first = first_since(queryset.model, self.field, moment)
        return queryset.filter(pk__gte=first, **{f"{self.field}__gte": moment})


class KeyFilter(admin.SimpleListFilter):
    """Filter by key, among the keys of the chosen project; all projects have too many."""

    title, parameter_name = "API key", "api_key"
    keys_of: type[Model] | None = None
    """The model with the field ``api_key``, if it is not the listed model."""
    _MOST = 100

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        project, chosen = request.GET.get("project__id__exact", ""), self.value() or ""
        field: Any = (self.keys_of or model_admin.model)._meta.get_field("api_key")
        keys = field.related_model._default_manager
        if project.isdecimal():
            keys = keys.filter(project=project)
        else:
            keys = keys.filter(pk=chosen if chosen.isdecimal() else None)
        return [(str(key.pk), key.name) for key in keys[: self._MOST]]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value() or ""
        return queryset.filter(api_key=value) if value.isdecimal() else queryset
