"""Admin of generations: read-only, and never counted, because the table only grows."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest

from worker.models import Generation


class UncountedPaginator(Paginator[Any]):
    """Pages without COUNT(*): it claims one page more than it has been asked for so far.

    The count is read from PostgreSQL's own estimate of the table, which costs nothing.
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


@admin.register(Generation)
class GenerationAdmin(admin.ModelAdmin[Generation]):
    """The queue and the usage log."""

    list_display = (
        "public_id",
        "created_at",
        "project",
        "api_key",
        "model",
        "status",
        "input_tokens",
        "cached_tokens",
        "output_tokens",
        "queue_wait",
        "time_to_first_token",
        "speed",
    )
    list_filter = ("status", "model", "project", "created_at")
    list_select_related = ("project", "api_key")
    list_per_page = 50
    ordering = ("-id",)
    search_fields = ("public_id__exact", "request_id__exact")
    search_help_text = "A whole generation id or request id"
    show_full_result_count = False
    paginator = UncountedPaginator

    @admin.display(description="queue wait")
    def queue_wait(self, generation: Generation) -> str:
        return _milliseconds(generation.queue_ms)

    @admin.display(description="first token")
    def time_to_first_token(self, generation: Generation) -> str:
        return _milliseconds(generation.ttft_ms)

    @admin.display(description="tokens/s")
    def speed(self, generation: Generation) -> str:
        return "—" if generation.tokens_per_s is None else f"{generation.tokens_per_s:.0f}"

    def get_readonly_fields(self, request: HttpRequest, obj: Generation | None = None) -> list[str]:
        """Everything."""
        return [field.name for field in Generation._meta.fields]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Generation | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Generation | None = None) -> bool:
        return False


def _milliseconds(value: float | None) -> str:
    return "—" if value is None else f"{value:,.0f} ms"
