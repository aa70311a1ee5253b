"""Admin of generations: the queue and the usage log."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

from inference_site.admin_pages.keyset import KeyFilter, KeysetAdmin, SinceFilter
from inference_site.admin_pages.labels import duration, milliseconds, status_label, time_label
from inference_site.catalogue.catalogue import catalogue
from inference_site.generations.models import Generation, Status

_STORED_AS = {
    "resp_": "responses_api_storedresponse",
    "chatcmpl-": "completions_storedcompletion",
}
_OWN_IDS = ("chatcmpl-", "cmpl-", "resp_", "embd-", "tok-")


class ModelFilter(admin.SimpleListFilter):
    """The models of the catalogue; the values of the column would have to be searched for."""

    title = parameter_name = "model"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(id_, id_) for id_ in catalogue().models]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset if self.value() is None else queryset.filter(model=self.value())


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
    search_help_text = "Search by exact generation ID or request ID"
    fieldsets = (
        (None, {"fields": ("public_id", "stored", "shown_status", "finish_reason", "error_code")}),
        ("Caller", {"fields": ("project", "api_key", "request_id", "kind", "model")}),
        (
            "Run",
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
            "Times",
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

    @admin.display(description="ID")
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
        if generation.status == Status.QUEUED:
            waited = timezone.now() - generation.created_at
            return f"{duration(waited.total_seconds())}, still waiting"
        return milliseconds(generation.queue_ms)

    @admin.display(description="content")
    def stored(self, generation: Generation) -> SafeString | str:
        """Link to the stored response or chat completion; it may not be stored, or be deleted."""
        for prefix, page in _STORED_AS.items():
            if generation.public_id.startswith(prefix):
                address = reverse(f"admin:{page}_changelist", query={"q": generation.public_id})
                return format_html('<a href="{}">Look it up</a>', address)
        return "—"

    @admin.display(description="first token")
    def time_to_first_token(self, generation: Generation) -> str:
        return milliseconds(generation.ttft_ms)

    @admin.display(description="tokens/s")
    def speed(self, generation: Generation) -> str:
        return "—" if generation.tokens_per_s is None else f"{generation.tokens_per_s:.0f}"
