"""Bases of every ``ModelAdmin``: for rows that users edit, and for logs that programs write."""

from __future__ import annotations

import datetime as dt
from typing import Any, ClassVar

from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils import timezone
from unfold.admin import ModelAdmin
from unfold.views import ChangeList

from inference_site.core.admin_pages.audit import form_changes, formset_changes
from inference_site.core.admin_pages.bubbles import may_see_content
from inference_site.core.admin_pages.keyset import first_id_since, keyset_page
from inference_site.core.admin_pages.labels import preview, time_label

_BEFORE, _AFTER = "before", "after"
_LOOKUPS = ("", "__exact", "__isnull", "__isempty", "__id__exact")
"""Suffixes that Django's list filters add to the name of their field."""


class SiteAdmin(ModelAdmin):
    """Base of the admin of every model; an empty list shows ``how_to_add``."""

    how_to_add = ""

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Return whether a query parameter belongs to a filter of the list.

        Django allows every lookup of the model's own fields. With ``field__startswith`` a user
        could guess a field letter by letter that no page shows to them, with
        ``json__key__startswith`` a part of a JSON field.
        """
        filters: Any = self.list_filter if request is None else self.get_list_filter(request)
        allowed: set[str] = set()
        for one in filters:
            if hasattr(one, "parameter_name"):  # A SimpleListFilter.
                allowed.add(one.parameter_name)
            else:
                path = one if isinstance(one, str) else one[0]
                allowed |= {f"{path}{suffix}" for suffix in _LOOKUPS}
        return lookup in allowed

    def construct_change_message(
        self, request: HttpRequest, form: Any, formsets: Any, add: bool = False
    ) -> Any:
        """Return the text for the audit log: old and new values, without secrets."""
        if add:
            return super().construct_change_message(request, form, formsets, add)
        changes = form_changes(form)
        for formset in formsets or ():
            changes += formset_changes(formset)
        return "; ".join(changes) or "No changes."

    def secrets_page(self, request: HttpRequest, secrets: list[tuple[str, str]]) -> HttpResponse:
        """Return a page that shows secrets by name, as the answer of the POST that made them.

        A message would carry them in a cookie, or in the session, to the page after a redirect.
        """
        options = self.opts
        context = {
            **self.admin_site.each_context(request),
            "title": "Shown once",
            "secrets": secrets,
            "back": reverse(f"admin:{options.app_label}_{options.model_name}_changelist"),
        }
        return TemplateResponse(request, "console/secrets.html", context)


class KeysetPaginator(Paginator[Any]):
    """Names the template of the page links; the change list finds the rows itself."""

    template_name = "admin_pages/keyset_pages.html"


class KeysetChangeList(ChangeList):
    """One page of a keyset list; ``older`` and ``newer`` are the addresses of its neighbours."""

    older: str | None = None
    newer: str | None = None
    is_cut_short = False

    def get_filters_params(self, params: Any = None) -> dict[str, Any]:
        found: dict[str, Any] = super().get_filters_params(params)
        return {key: value for key, value in found.items() if key not in (_BEFORE, _AFTER)}

    def get_results(self, request: HttpRequest) -> None:
        """Find the rows of the page, and where the next and previous pages begin."""
        self.paginator = KeysetPaginator([], self.list_per_page)
        rows = self.queryset.order_by()
        before, after = _cursor(request, _BEFORE), _cursor(request, _AFTER)
        if after is not None:
            found = keyset_page(rows, self.list_per_page, after=after)
            self.newer = self._link(_AFTER, found.reached)
            self.older = self._link(_BEFORE, after + 1)
            found.rows.reverse()
        else:
            found = keyset_page(rows, self.list_per_page, before=before)
            self.older = self._link(_BEFORE, found.reached)
            self.newer = self._link(_AFTER, None if before is None else before - 1)
        self.is_cut_short = found.reached is not None and len(found.rows) < self.list_per_page
        self.result_list = found.rows
        self.result_count = self.full_result_count = len(found.rows)
        self.show_full_result_count = self.show_admin_actions = False
        self.can_show_all = self.multi_page = False

    def _link(self, parameter: str, id_: int | None) -> str | None:
        if id_ is None:
            return None
        other = _AFTER if parameter == _BEFORE else _BEFORE
        return str(self.get_query_string({parameter: id_, other: None}))


def _cursor(request: HttpRequest, name: str) -> int | None:
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
    show_facets = admin.ShowFacets.NEVER  # Django counts the rows of each facet.

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> Any:
        return KeysetChangeList

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    @admin.display(description="time (UTC)")
    def time(self, row: Any) -> str:
        return time_label(row.created_at)


class PreviewAdmin(KeysetAdmin):
    """A list with previews of prompts and answers after its first two columns.

    Its rows are annotated with ``asked`` and ``answered``.
    """

    previews: tuple[str, ...] = ("input", "output")

    def get_list_display(self, request: HttpRequest) -> tuple[Any, ...]:
        """Add the previews for users who may see content."""
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


class SinceFilter(admin.SimpleListFilter):
    """Filter by age, of rows whose ids grow with the time in ``field``."""

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
        first = first_id_since(queryset.model, self.field, moment)
        return queryset.filter(pk__gte=first, **{f"{self.field}__gte": moment})


class KeyFilter(admin.SimpleListFilter):
    """Filter by API key: offers the keys of the chosen project, since all keys are too many."""

    title, parameter_name = "API key", "api_key"
    keys_of: type[Model] | None = None
    """The model with the field ``api_key``, if it is not the listed model."""
    _MAX_KEYS = 100

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        project, chosen = request.GET.get("project__id__exact", ""), self.value() or ""
        field: Any = (self.keys_of or model_admin.model)._meta.get_field("api_key")
        keys = field.related_model._default_manager
        if project.isdecimal():
            keys = keys.filter(project=project)
        else:
            keys = keys.filter(pk=chosen if chosen.isdecimal() else None)
        return [(str(key.pk), key.name) for key in keys[: self._MAX_KEYS]]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value() or ""
        return queryset.filter(api_key=value) if value.isdecimal() else queryset
