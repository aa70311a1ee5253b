"""Bases of every ``ModelAdmin``."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from unfold.admin import ModelAdmin
from unfold.views import ChangeList

from inference_site.admin_pages.audit import form_changes, formset_changes
from inference_site.admin_pages.bubbles import may_see_content
from inference_site.admin_pages.keyset import first_since, look_down, look_up
from inference_site.admin_pages.labels import preview

BEFORE, AFTER = "before", "after"
_PARAMETERS = ("", "__exact", "__isnull", "__isempty", "__id__exact")
"""What Django's filters append to the name of their field."""


class SiteAdmin(ModelAdmin):
    """Base of the admin of every model; ``how_to_add`` is what an empty list says."""

    how_to_add = ""

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Return whether a parameter of the address belongs to a filter of the list.

        Django allows every lookup of the model's own fields. With ``field__startswith`` a user
        reads a field letter by letter, and with ``json__key__startswith`` what is in it, although
        no page shows it to them.
        """
        filters = self.list_filter if request is None else self.get_list_filter(request)
        return lookup in _declared(filters)

    def construct_change_message(
        self, request: HttpRequest, form: Any, formsets: Any, add: bool = False
    ) -> Any:
        """Return what the audit log says of a change: old and new values, without secrets."""
        if add:
            return super().construct_change_message(request, form, formsets, add)
        told = form_changes(form)
        for formset in formsets or ():
            told += formset_changes(formset)
        return "; ".join(told) or "No changes."


def _declared(filters: Sequence[Any]) -> Iterator[str]:
    """Yield the parameters of these filters."""
    for one in filters:
        if hasattr(one, "parameter_name"):  # A SimpleListFilter.
            yield one.parameter_name
        else:
            path = one if isinstance(one, str) else one[0]
            yield from (f"{path}{ending}" for ending in _PARAMETERS)


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


class PreviewAdmin(KeysetAdmin):
    """A list with ``previews`` after its first two columns; its rows have the texts."""

    previews: tuple[str, ...] = ("input", "output")

    def get_list_display(self, request: HttpRequest) -> tuple[Any, ...]:
        """Show previews to those who may see content."""
        shown = tuple(self.list_display)
        return (*shown[:2], *self.previews, *shown[2:]) if may_see_content(request) else shown

    @admin.display(description="input")
    def input(self, stored: Any) -> str:
        return preview(stored.asked)

    @admin.display(description="output")
    def output(self, stored: Any) -> str:
        return preview(stored.answered)

    @admin.display(description="metadata")
    def shown_metadata(self, stored: Any) -> str:
        return preview(", ".join(f"{name}={value}" for name, value in stored.metadata.items()))
