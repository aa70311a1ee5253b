"""The table of the usage page and its download: by model, project, key, end user or tag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from django.urls import reverse
from django.utils.http import urlencode

from inference_site.accounts.models import END_USER, TAG, ApiKey, Project
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.model_labels import cost_label
from inference_site.console.downloads import Rows
from inference_site.console.tiles import may_list, requests_filter, sum_of
from inference_site.core.admin_pages.labels import money
from inference_site.core.site_settings.models import site_settings
from inference_site.runs.usage.models import OTHERS
from inference_site.runs.usage.queries import (
    PERIOD_LENGTH,
    USAGE_COLUMNS,
    Span,
    Usage,
    largest_groups,
    total_by,
    usage_by,
    usage_records,
    without_table_scans,
)

COLUMNS = {"model": "Model", "project_id": "Project", "api_key_id": "API key"}
"""Groups that every roll-up has; the others are dimensions."""
MAX_ROWS = 50
_ROUTES = {
    "project_id": "admin:accounts_project_change",
    "api_key_id": "admin:accounts_apikey_change",
}
"""The page of a project or key."""
_FILTERS = {"model": "model", "project_id": "project", "api_key_id": "key"}
"""The filter of the list of requests for each group."""
_KEY = ("project_id", "api_key_id", "model")


def dimension_label(dimension: str) -> str:
    """Return the heading of a dimension."""
    return "End user" if dimension == END_USER else f"Tag {dimension.removeprefix(TAG)}"


def dimensions(chosen: str = "") -> dict[str, str]:
    """Return the label of each dimension that is counted, and of the ``chosen`` one."""
    counted = [END_USER, *(TAG + key for key in site_settings().usage_tags)]
    if chosen and chosen not in counted:
        counted.append(chosen)
    return {dimension: dimension_label(dimension) for dimension in counted}


@dataclass(frozen=True, slots=True)
class TableRow:
    """The usage of one group, with the addresses of its page and of its requests, or ""."""

    name: str
    page: str
    requests: str
    usage: Usage
    cost: str
    is_rest: bool = False


class UsageTable:
    """The groups with the most tokens, largest first; then the rest, and the sum of all.

    ``since`` is the value of the requests' filter for the length of the span; "" without one.
    """

    def __init__(self, span: Span, group: str, since: str, user: Any) -> None:
        self._span, self._group, self._since, self._user = span, group, since, user
        self.label = COLUMNS.get(group) or dimension_label(group)
        self.rows = self._of_column() if group in COLUMNS else self._of_dimension()
        self.total = sum_of(row.usage for row in self.rows)
        self.total_cost = money(self.total.cost)

    def _of_column(self) -> list[TableRow]:
        shown = largest_groups(self._span, self._group, MAX_ROWS)
        rest = Usage()
        if len(shown) == MAX_ROWS:
            rest = sum_of(total_by(self._span).values()).without(sum_of(shown.values()))
        names: dict[Any, str] = {}
        if self._group == "project_id":
            names = dict(Project.objects.filter(pk__in=shown).values_list("pk", "name"))
        elif self._group == "api_key_id":
            keys = ApiKey.objects.filter(pk__in=shown).select_related("project")
            names = {key.pk: f"{key.project.name}: {key.name}" for key in keys}
        rows = []
        for key, usage in shown.items():
            page = ""
            if route := _ROUTES.get(self._group):
                page = reverse(route, args=[key])
            elif key in catalogue().models:
                page = reverse("admin:model", args=[key])
            cost = cost_label(key, usage.cost) if self._group == "model" else money(usage.cost)
            requests = self._requests({_FILTERS[self._group]: key})
            rows.append(TableRow(names.get(key, str(key)), page, requests, usage, cost))
        return rows + _rest("Others", rest)

    def _of_dimension(self) -> list[TableRow]:
        span = replace(self._span, dimension=self._group)
        shown = largest_groups(span, "value", MAX_ROWS)
        of_all_values = sum_of(total_by(span).values())
        rows = []
        for value, usage in shown.items():
            found = requests_filter(replace(span, value=value))
            requests = "" if found is None else self._requests(found)
            rows.append(TableRow(value, "", requests, usage, money(usage.cost)))
        rows += _rest("Others", of_all_values.without(sum_of(shown.values())))
        if span.value is None:
            # Read last: what is accounted meanwhile has no value, rather than less than none.
            everything = sum_of(total_by(self._span).values())
            none = "end user" if self._group == END_USER else self._group.removeprefix(TAG)
            rows += _rest(f"No {none}", everything.without(of_all_values))
        return rows

    def _requests(self, chosen: Mapping[str, Any]) -> str:
        """Return the address of the requests of this span that match further filters."""
        found = requests_filter(self._span)
        query = {**(found or {}), **chosen, **({"since": self._since} if self._since else {})}
        if found is None or not may_list(self._user, query):
            return ""
        return f"{reverse('admin:requests')}?{urlencode(query)}"


def _rest(name: str, usage: Usage) -> list[TableRow]:
    """Return the row of what has no row of its own; none without requests."""
    if usage.requests <= 0:
        return []
    return [TableRow(name, "", "", usage, money(usage.cost), is_rest=True)]


def downloaded_columns(group: str, span: Span) -> tuple[str, ...]:
    """Return the columns of a download; with an end user or a tag also which and whether others."""
    has_dimension = group not in COLUMNS or span.dimension is not None
    return USAGE_COLUMNS + (("dimension", "part", "value") if has_dimension else ())


def downloaded(group: str, span: Span) -> Iterator[Rows]:
    """Yield the rows of each bucket: by project, key and model, and by value of a dimension.

    ``part`` is "value", "others" or "none": the rows of a bucket add up to all of its usage.
    """
    dimension = span.dimension if group in COLUMNS else group
    for start in span.starts():
        bucket = replace(span, start=start, end=start + PERIOD_LENGTH[span.period])
        # The transaction ends before the yield: another thread may read the next bucket.
        with without_table_scans():
            whole = {} if span.value is not None else usage_by(bucket, *_KEY)
            by_value = {}
            if dimension is not None:
                by_value = usage_by(replace(bucket, dimension=dimension), *_KEY, "value")
        if dimension is None:
            yield list(usage_records(whole))
            continue
        for (_, (*key, _)), usage in by_value.items():
            if (start, tuple(key)) in whole:
                whole[start, tuple(key)] = whole[start, tuple(key)].without(usage)
        rows: list[dict[str, Any]] = []
        for (_, (*_, value)), record in zip(by_value, usage_records(by_value), strict=True):
            part = "others" if value == OTHERS else "value"
            rows.append(record | {"dimension": dimension, "part": part, "value": value})
        for record in usage_records({k: usage for k, usage in whole.items() if usage.requests > 0}):
            rows.append(record | {"dimension": dimension, "part": "none", "value": ""})
        yield rows
