"""Admin of generations: read-only, and never counted, because the table only grows."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar, TypeVar

from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html

from worker.catalog import catalog
from worker.models import Generation


class UncountedPaginator(Paginator[Any]):
    """Pages without COUNT(*).

    A short result is counted by reading it; for a longer one PostgreSQL's estimate of the table
    stands in, so that a filtered list may offer pages that turn out to be empty.
    """

    @cached_property
    def count(self) -> int:
        """How many rows the planner believes the table has, but at least what is really there."""
        from django.db import connection

        assert isinstance(self.object_list, QuerySet)
        table = self.object_list.model._meta.db_table
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT reltuples::bigint FROM pg_class WHERE oid = %s::regclass", [table]
            )
            estimate = cursor.fetchone()[0]
        seen = self.object_list[: self.per_page * 10].values_list("pk", flat=True)
        some = len(seen)
        return some if some < self.per_page * 10 else max(some, int(estimate))


_RowT = TypeVar("_RowT", bound=Model)


class ReadOnlyAdmin(admin.ModelAdmin[_RowT]):
    """Admin of what only programs write: found by its id, newest first, never counted."""

    list_select_related: ClassVar[tuple[str, ...]] = ("project",)
    list_per_page = 50
    ordering = ("-id",)
    sortable_by = ()
    search_fields = ("public_id__exact",)
    search_help_text = "A whole id"
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # Facets count.
    paginator = UncountedPaginator

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class ModelFilter(admin.SimpleListFilter):
    """The models of the catalogue; the values of the column would have to be searched for."""

    title = parameter_name = "model"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(id_, id_) for id_ in catalog().models]

    def queryset(
        self, request: HttpRequest, queryset: QuerySet[Generation]
    ) -> QuerySet[Generation]:
        return queryset if self.value() is None else queryset.filter(model=self.value())


@admin.register(Generation)
class GenerationAdmin(ReadOnlyAdmin[Generation]):
    """The queue and the usage log."""

    list_display = (
        "short_id",
        "time",
        "project",
        "key",
        "model",
        "status",
        "tokens",
        "queue_wait",
        "time_to_first_token",
        "speed",
    )
    list_filter = ("status", ModelFilter, "project", "created_at")
    list_select_related = ("project", "api_key")
    search_fields = ("public_id",)  # Shows the box; get_search_results does the search.
    search_help_text = "A whole generation id or request id"
    fieldsets = (
        (None, {"fields": ("public_id", "status", "finish_reason", "error_code")}),
        ("Who asked", {"fields": ("project", "api_key", "request_id", "kind", "model")}),
        (
            "How",
            {
                "fields": (
                    "service_class",
                    "streamed",
                    "end_user",
                    "ignored_params",
                    "worker",
                    "attempt",
                )
            },
        ),
        (
            "When",
            {"fields": ("time", "queue_wait", "time_to_first_token", "speed", "finished_at")},
        ),
        (
            "Tokens",
            {"fields": ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")},
        ),
    )

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Generation], search_term: str
    ) -> tuple[QuerySet[Generation], bool]:
        """Look the whole id up in the one index it can be in."""
        term = search_term.strip()
        if not term:
            return queryset, False
        is_own = term.startswith(("chatcmpl-", "cmpl-", "resp_", "embd-", "tok-"))
        return queryset.filter(**{"public_id" if is_own else "request_id": term}), False

    @admin.display(description="id")
    def short_id(self, generation: Generation) -> str:
        return f"{generation.public_id.replace('_', '-').rpartition('-')[2][:8]}…"

    @admin.display(description="time (UTC)")
    def time(self, generation: Generation) -> str:
        return format_html(
            '<span style="white-space: nowrap">{}</span>',
            f"{generation.created_at:%Y-%m-%d %H:%M:%S}",
        )

    @admin.display(description="tokens in / cached / out")
    def tokens(self, generation: Generation) -> str:
        counts = (generation.input_tokens, generation.cached_tokens, generation.output_tokens)
        return " / ".join(f"{count:,}" for count in counts)

    @admin.display(description="key")
    def key(self, generation: Generation) -> str:
        return generation.api_key.name

    @admin.display(description="queue wait")
    def queue_wait(self, generation: Generation) -> str:
        return _milliseconds(generation.queue_ms)

    @admin.display(description="first token")
    def time_to_first_token(self, generation: Generation) -> str:
        return _milliseconds(generation.ttft_ms)

    @admin.display(description="tokens/s")
    def speed(self, generation: Generation) -> str:
        return "—" if generation.tokens_per_s is None else f"{generation.tokens_per_s:.0f}"

    def has_delete_permission(self, request: HttpRequest, obj: Generation | None = None) -> bool:
        return False


def _milliseconds(value: float | None) -> str:
    return "—" if value is None else f"{value:,.0f} ms"
