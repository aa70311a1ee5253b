"""Admin of generations: the queue and the usage log."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.model_labels import cost_label, model_link
from inference_site.core.admin_pages.base_admin import (
    KeyFilter,
    KeysetAdmin,
    RelatedFilter,
    SinceFilter,
    id_of,
)
from inference_site.core.admin_pages.labels import (
    Bubble,
    duration,
    may_see_content,
    milliseconds,
    status_label,
    text_piece,
)
from inference_site.runs.kept_content.models import KeptContent
from inference_site.runs.kinds import stored_model_of
from inference_site.runs.models import Generation, Status

_OWN_IDS = ("chatcmpl-", "cmpl-", "resp_", "embd-", "tok-")


class ModelFilter(admin.SimpleListFilter):
    """A filter of the catalogue's models; the distinct values of the column are slow to find."""

    title = parameter_name = "model"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(id_, id_) for id_ in catalogue().models]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset if self.value() is None else queryset.filter(model=self.value())


@admin.register(Generation)
class GenerationAdmin(KeysetAdmin):
    """One row for each accepted request."""

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
    list_filter = ("status", ModelFilter, SinceFilter, ("project", RelatedFilter), KeyFilter)
    list_select_related = ("project", "api_key")
    change_form_template = "generations/admin/generation.html"
    search_fields = ("public_id",)  # Shows the box; get_search_results does the search.
    search_help_text = "Search by exact generation ID or request ID"
    fieldsets = (
        (None, {"fields": ("public_id", "stored", "shown_status", "finish_reason", "error_code")}),
        ("Caller", {"fields": ("project", "api_key_page", "request_number", "kind", "model_page")}),
        (
            "Run",
            {
                "fields": (
                    "service_class",
                    "is_streamed",
                    "end_user",
                    "ignored",
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
                    "shown_cost",
                )
            },
        ),
    )

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show the content kept for debugging to users who may see it."""
        context = dict(extra_context or {})
        if may_see_content(request) and (pk := id_of(object_id)) is not None:
            ids = Generation.objects.filter(pk=pk).values("public_id")
            kept = KeptContent.objects.shown().filter(public_id__in=ids).first()
            turns = []
            if kept is not None:
                turns = [*kept.prompt, {"role": "assistant", "content": kept.answer}]
            context["bubbles"] = [
                Bubble("message", turn["role"], [text_piece(turn["content"])]) for turn in turns
            ]
        return super().change_view(request, object_id, form_url, context)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Generation], search_term: str
    ) -> tuple[QuerySet[Generation], bool]:
        """Find the whole id in the one index that can contain it."""
        term = search_term.strip()
        if not term:
            return queryset, False
        column = "public_id" if term.startswith(_OWN_IDS) else "request_id"
        return queryset.filter(**{column: term}), False

    @admin.display(description="ID")
    def short_id(self, generation: Generation) -> str:
        return f"{generation.public_id.replace('_', '-').rpartition('-')[2][:8]}…"

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
        """Link to the stored response or chat completion, if there is one."""
        if (model := stored_model_of(generation.public_id)) is not None:
            rows = model._default_manager.filter(public_id=generation.public_id)
            if (found := rows.values_list("pk").first()) is not None:
                page = f"admin:{model._meta.app_label}_{model._meta.model_name}_change"
                address = reverse(page, args=found)
                return format_html('<a class="link" href="{}">Prompt and answer</a>', address)
        kept = KeptContent.objects.shown().filter(public_id=generation.public_id)
        return "not stored; kept for debugging, below" if kept.exists() else "not stored"

    @admin.display(description="API key")
    def api_key_page(self, generation: Generation) -> SafeString:
        address = reverse("admin:accounts_apikey_change", args=[generation.api_key_id])
        return format_html('<a class="link" href="{}">{}</a>', address, generation.api_key)

    @admin.display(description="request ID")
    def request_number(self, generation: Generation) -> str:
        return generation.request_id

    @admin.display(description="model")
    def model_page(self, generation: Generation) -> SafeString | str:
        return model_link(generation.model)

    @admin.display(description="streamed")
    def is_streamed(self, generation: Generation) -> str:
        return "yes" if generation.streamed else "no"

    @admin.display(description="ignored parameters")
    def ignored(self, generation: Generation) -> str:
        return ", ".join(generation.ignored_params) or "—"

    @admin.display(description="cost")
    def shown_cost(self, generation: Generation) -> str:
        return cost_label(generation.model, generation.cost)

    @admin.display(description="first token")
    def time_to_first_token(self, generation: Generation) -> str:
        return milliseconds(generation.ttft_ms)

    @admin.display(description="tokens/s")
    def speed(self, generation: Generation) -> str:
        return "—" if generation.tokens_per_s is None else f"{generation.tokens_per_s:.0f}"
