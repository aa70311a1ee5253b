"""Admin of responses: find them, read them, watch, stop and repeat them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

import redis.exceptions
from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ERROR_FLAG
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404
from django.urls import URLPattern, path, reverse
from django.utils.safestring import SafeString
from django.views.decorators.http import require_POST

from inference_site.admin_pages.bubbles import may_see_content, pretty
from inference_site.admin_pages.keyset import KeyFilter, SinceFilter
from inference_site.admin_pages.labels import status_label, time_label
from inference_site.admin_pages.previews import PreviewAdmin
from inference_site.catalogue.model_labels import cost_label, model_link
from inference_site.errors.exceptions import api_error
from inference_site.generations.admin import ModelFilter
from inference_site.generations.cancellation import stop
from inference_site.generations.models import Generation
from inference_site.generations.queue import new_id
from responses_api.admin.export import export
from responses_api.admin.listed import StatusFilter, status_of, with_run
from responses_api.admin.requests import curl, run_again
from responses_api.admin.tree import tree
from responses_api.admin.turns import MOST_TURNS, turns
from responses_api.models import ENDED, StoredResponse
from responses_api.previews import with_previews
from responses_api.search import SearchTooBroad, search_time

_TOO_BROAD = "Too much would have to be searched: choose a project, or give more words."


class KeyOfResponseFilter(KeyFilter):
    """The keys of the chosen project; which one a response was asked with, its generation knows."""

    keys_of = Generation

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value() or ""
        if not value.isdecimal():
            return queryset
        asked = Generation.objects.filter(api_key=int(value))
        return queryset.filter(public_id__in=asked.values("public_id"))


@admin.register(StoredResponse)
class StoredResponseAdmin(PreviewAdmin):
    """Responses, also those that are deleted and that others build on."""

    list_display = (
        "short_id",
        "time",
        "project",
        "model",
        "shown_status",
        "tokens",
        "shown_metadata",
    )
    list_filter = (StatusFilter, ModelFilter, SinceFilter, "project", KeyOfResponseFilter)
    list_select_related = ("project",)
    search_fields = ("public_id",)  # Shows the box; get_search_results does the search.
    search_help_text = "Search by exact ID, by key=value of the metadata, or by words"
    change_form_template = "responses_api/admin/response.html"
    change_list_template = "responses_api/admin/responses.html"
    fields = ("public_id",)

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """Return the page; a search of words takes the time that a page has, and no more."""
        try:
            return self._found(request)
        except SearchTooBroad:
            messages.warning(request, _TOO_BROAD)
            request.GET = QueryDict("q=resp_none")  # Finds nothing.
            return super().get_changelist_instance(request)

    def _found(self, request: HttpRequest) -> Any:
        if not request.GET.get("q"):
            return super().get_changelist_instance(request)
        with search_time():
            return super().get_changelist_instance(request)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Add what the generations say, and previews for those who may see content."""
        rows = with_run(super().get_queryset(request))
        return with_previews(rows) if may_see_content(request) else rows

    def get_search_results(
        self, request: HttpRequest, queryset: Any, search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Look for an id, for metadata, or, with the permission, for words of the items."""
        term = search_term.strip().replace("\0", "")
        if not term:
            return queryset, False
        if term.startswith("resp_"):
            return queryset.filter(public_id=term), False
        if term.startswith("conv_"):
            return queryset.filter(conversation__public_id=term), False
        name, is_pair, value = term.partition("=")
        if is_pair and name and " " not in name:
            return queryset.filter(metadata__contains={name: value}), False
        if not may_see_content(request):
            messages.warning(request, "You do not have permission to search prompts and answers.")
            return queryset.none(), False
        project = request.GET.get("project__id__exact", "")
        return queryset.mentioning(term, int(project) if project.isdecimal() else None), False

    def get_urls(self) -> list[URLPattern]:
        """Add what is done with responses."""
        wrap, name = self.admin_site.admin_view, "responses_api_storedresponse_"
        own = [
            path("export/", wrap(self.export_view), name=f"{name}export"),
            path("<int:pk>/stop/", wrap(require_POST(self.stop_view)), name=f"{name}stop"),
            path("<int:pk>/again/", wrap(require_POST(self.again_view)), name=f"{name}again"),
        ]
        return own + list(super().get_urls())

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show the response in its conversation."""
        context = dict(extra_context or {})
        stored = self.get_object(request, object_id)
        if stored is not None:
            context |= self._context(request, stored)
        return super().change_view(request, object_id, form_url, context)

    def _context(self, request: HttpRequest, stored: StoredResponse) -> dict[str, Any]:
        generation = (
            Generation.objects.select_related("project", "api_key")
            .filter(public_id=stored.public_id)
            .first()
        )
        context: dict[str, Any] = {
            "stored": stored,
            # A template would look for a name "items" among the metadata.
            "metadata": list(stored.metadata.items()),
            "generation": generation,
            "model": model_link(stored.model),
            "cost": cost_label(generation.model, generation.cost) if generation else "—",
            "status": status_label(status_of(stored, generation.status if generation else None)),
            "tree": tree(stored),
            "has_ended": stored.status in ENDED,
            "may_see": may_see_content(request),
            "may_change": self._may_act(request),
        }
        if context["may_see"]:
            found = turns(stored)
            context |= {
                "turns": found,
                "earlier": found[0].response.previous_id if found[0].response else None,
                "most_turns": MOST_TURNS,
                "curl": curl(stored, f"{request.scheme}://{request.get_host()}"),
                "request_json": pretty(stored.request),
                "error": stored.error,
            }
        return context

    def _may_act(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("responses_api.change_storedresponse"))

    def stop_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Have a response stopped."""
        stored = self._acted_on(request, pk)
        generation = get_object_or_404(Generation, public_id=stored.public_id)
        try:
            stopped = stop(generation)
        except redis.exceptions.RedisError:
            messages.error(request, "The response was not stopped: Redis is not reachable.")
        else:
            if stopped:
                self.log_change(request, stored, "Stopped.")
                messages.success(request, f"Stopping {stored.public_id}…")
            else:
                messages.info(request, "The response had already ended.")
        return self._back(pk)

    def again_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Have the same asked again, in the background."""
        stored = self._acted_on(request, pk)
        try:
            new = run_again(stored, new_id("req_"))
        except Exception as exc:
            error = api_error(exc)
            if error.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                raise  # A fault that nobody foresaw.
            messages.error(request, f"It could not be run again: {error.message}")
            return self._back(pk)
        self.log_change(request, stored, f"Run again as {new}.")
        return self._back(StoredResponse.objects.get(public_id=new).pk)

    def export_view(self, request: HttpRequest) -> HttpResponseBase:
        """Download what the list shows, all pages of it."""
        if not (self.has_view_permission(request) and may_see_content(request)):
            raise PermissionDenied
        address = reverse("admin:responses_api_storedresponse_changelist")
        try:
            found = self._found(request)
        except SearchTooBroad:
            messages.warning(request, _TOO_BROAD)
            kept = request.GET.copy()
            kept.pop("q")
            return HttpResponseRedirect(f"{address}?{kept.urlencode()}")
        except IncorrectLookupParameters:
            return HttpResponseRedirect(f"{address}?{ERROR_FLAG}=1")  # As the list itself does.
        self._note_export(request, found.get_filters_params())
        return export(found.queryset)

    def _note_export(self, request: HttpRequest, filters: dict[str, Any]) -> None:
        """Note who took what with them; not the words, which may be of what was said."""
        chosen = [urlencode(filters, doseq=True)] if filters else []
        chosen += ["a search"] if request.GET.get("q") else []
        LogEntry.objects.create(
            user_id=int(request.user.pk or 0),
            content_type=ContentType.objects.get_for_model(StoredResponse),
            object_repr="Responses",
            action_flag=CHANGE,
            change_message=f"Exported: {', '.join(chosen) or 'all'}.",
        )

    def _acted_on(self, request: HttpRequest, pk: int) -> StoredResponse:
        if not self._may_act(request):
            raise PermissionDenied
        rows = StoredResponse.objects.select_related("previous", "conversation")
        return get_object_or_404(rows, pk=pk)

    def _back(self, pk: int) -> HttpResponse:
        return HttpResponseRedirect(
            reverse("admin:responses_api_storedresponse_change", args=(pk,))
        )

    @admin.display(description="ID")
    def short_id(self, stored: StoredResponse) -> str:
        return f"{stored.public_id[:13]}…"

    @admin.display(description="time (UTC)")
    def time(self, stored: StoredResponse) -> SafeString:
        return time_label(stored.created_at)

    @admin.display(description="status")
    def shown_status(self, stored: StoredResponse) -> SafeString:
        return status_label(status_of(stored, getattr(stored, "run", None)))

    @admin.display(description="tokens in / out")
    def tokens(self, stored: StoredResponse) -> str:
        usage = stored.usage
        return f"{usage['input_tokens']:,} / {usage['output_tokens']:,}" if usage else "—"
