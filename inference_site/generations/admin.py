"""Admin of generations: the queue and the usage log."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString

from inference_site.admin_pages.keyset import KeyFilter, KeysetAdmin, SinceFilter
from inference_site.catalogue.catalogue import catalogue
from inference_site.generations.models import Generation

_OWN_IDS = ("chatcmpl-", "cmpl-", "resp_", "embd-", "tok-")


class ModelFilter(admin.SimpleListFilter):
    """The models of the catalogue; the values of the column would have to be searched for."""

    title = parameter_name = "model"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(id_, id_) for id_ in catalogue().models]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset if self.value() is None else queryset.filter(model=self.value())


def status_label(status: str) -> SafeString:
    """Return a status as lists show it."""
    return format_html('<span class="status status-{}">{}</span>', status, status.replace("_", " "))


def time_label(moment: dt.datetime) -> SafeString:
    """Return a moment as lists show it."""
    return format_html('<span class="nowrap">{}</span>', f"{moment:%Y-%m-%d %H:%M:%S}")


def milliseconds(value: float | None) -> str:
    """Return a time as lists show it."""
    return "—" if value is None else f"{value:,.0f} ms"


@admin.register(Generation)
class GenerationAdmin(KeysetAdmin):
    """One row for every request that was accepted."""

    list_display = (
        "short_id",
        "time",
        "project",
        "key",
        "model",
        "shown_status",
        "tokens",
        "queue_wait",
        "time_to_first_token",
        "speed",
    )
    list_filter = ("status", ModelFilter, SinceFilter, "project", KeyFilter)
    list_select_related = ("project", "api_key")
    search_fields = ("public_id",)  # Shows the box; get_search_results does the search.
    search_help_text = "A whole generation id or request id"
    fieldsets = (
        (None, {"fields": ("public_id", "shown_status", "finish_reason", "error_code")}),
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
            {
                "fields": (
                    "input_tokens",
                    "cached_tokens",
                    "output_tokens",
                    "reasoning_tokens",
                    "cost",
                )
            },
        ),
    )

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Generation], search_term: str
    ) -> tuple[QuerySet[Generation], bool]:
        """Look the whole id up in the one index it can be in."""
        term = search_term.strip()
        if not term:
            return queryset, False
        column = "public_id" if term.startswith(_OWN_IDS) else "request_id"
        return queryset.filter(**{column: term}), False

    @admin.display(description="id")
    def short_id(self, generation: Generation) -> str:
        return f"{generation.public_id.replace('_', '-').rpartition('-')[2][:8]}…"

    @admin.display(description="time (UTC)")
    def time(self, generation: Generation) -> SafeString:
        return time_label(generation.created_at)

    @admin.display(description="status")
    def shown_status(self, generation: Generation) -> SafeString:
        return status_label(generation.status)

    @admin.display(description="tokens in / cached / out")
    def tokens(self, generation: Generation) -> str:
        counts = (generation.input_tokens, generation.cached_tokens, generation.output_tokens)
        return " / ".join(f"{count:,}" for count in counts)

    @admin.display(description="key")
    def key(self, generation: Generation) -> str:
        return generation.api_key.name

    @admin.display(description="queue wait")
    def queue_wait(self, generation: Generation) -> str:
        return milliseconds(generation.queue_ms)

    @admin.display(description="first token")
    def time_to_first_token(self, generation: Generation) -> str:
        return milliseconds(generation.ttft_ms)

    @admin.display(description="tokens/s")
    def speed(self, generation: Generation) -> str:
        return "—" if generation.tokens_per_s is None else f"{generation.tokens_per_s:.0f}"
