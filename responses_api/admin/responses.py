"""Admin of responses: search, read, watch, stop, repeat and export them; and of conversations."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

import orjson
import redis.exceptions
from asgiref.sync import sync_to_async
from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ERROR_FLAG
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.db.models import Prefetch, QuerySet
from django.http import (
    HttpRequest,
    HttpResponse,
    HttpResponseRedirect,
    QueryDict,
    StreamingHttpResponse,
)
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404
from django.urls import URLPattern, path, reverse
from django.utils.safestring import SafeString
from django.views.decorators.http import require_GET, require_POST

from inference_site.accounts.keys import caller_of_key
from inference_site.cases.judging import text_of
from inference_site.cases.models import SavedAnswer
from inference_site.cases.sources import OF_CLIENT, CaseSourceAdmin
from inference_site.catalogue.model_labels import cost_label, model_link
from inference_site.core.admin_pages.base_admin import (
    KeyFilter,
    PreviewAdmin,
    RelatedFilter,
    SinceFilter,
    id_of,
    keyset_page,
)
from inference_site.core.admin_pages.labels import (
    may_see_content,
    pretty,
    preview,
    status_label,
    time_label,
)
from inference_site.core.errors.api_errors import ConflictError
from inference_site.core.errors.exceptions import api_error
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.gateway.feedback_admin import RatingFilter
from inference_site.gateway.submission.submit import submit
from inference_site.runs.admin import ModelFilter
from inference_site.runs.cancellation import stop
from inference_site.runs.models import Generation
from inference_site.runs.queue import new_id
from responses_api.admin.thread import MAX_ITEMS, MAX_TURNS, BubbleMaker, site_calls, tree, turns
from responses_api.annotations import (
    in_status,
    status_of,
    with_generation_status,
    with_last_message,
    with_latest_response,
    with_previews,
)
from responses_api.context import input_of
from responses_api.creation import create
from responses_api.mcp_approvals import waiting_questions
from responses_api.models import ENDED, Conversation, Item, ResponseStatus, StoredResponse
from responses_api.search import SearchTooBroad, search_timeout
from responses_api.stored_responses import current_responses
from responses_api.wire.requests import ResponseRequest

NOT_REPEATED = ("background", "stream", "stream_options")
"""Request fields that do not apply when an operator runs a response again."""
_EXPORT_BATCH = 100
_TOO_BROAD = "Too much would have to be searched: choose a project, or give more words."


class StatusFilter(admin.SimpleListFilter):
    """Filters by the status that the list shows."""

    title = parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(status.value, status.replace("_", " ")) for status in ResponseStatus]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value() or ""
        return in_status(queryset, ResponseStatus(chosen)) if chosen in ResponseStatus else queryset


class KeyOfResponseFilter(KeyFilter):
    """Filters by a key of the chosen project; the generation of a response has its key."""

    keys_of = Generation

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        if self.chosen_key is None:
            return queryset
        generations = Generation.objects.filter(api_key=self.chosen_key)
        return queryset.filter(public_id__in=generations.values("public_id"))


@admin.register(StoredResponse)
class StoredResponseAdmin(CaseSourceAdmin):
    """Responses, with deleted ones that other responses build on."""

    case_endpoint = "/v1/responses"
    list_display = (
        "short_id",
        "time",
        "project",
        "model",
        "shown_status",
        "tokens",
        "shown_rating",
        "shown_metadata",
    )
    list_filter = (
        *(StatusFilter, RatingFilter, ModelFilter, SinceFilter),
        *(("project", RelatedFilter), KeyOfResponseFilter),
    )
    list_select_related = ("project",)
    search_fields = ("public_id",)  # Shows the search box; get_search_results searches.
    search_help_text = "Search by exact ID, by key=value of the metadata, or by words"
    change_form_template = "responses_api/admin/response.html"
    change_list_template = "responses_api/admin/responses.html"
    fields = ("public_id",)

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """Return the list, which is empty if the search for words takes too long."""
        try:
            return self._search(request)
        except SearchTooBroad:
            messages.warning(request, _TOO_BROAD)
            request.GET = QueryDict("q=resp_none")  # Finds nothing.
            return super().get_changelist_instance(request)

    def _search(self, request: HttpRequest) -> Any:
        if not request.GET.get("q"):
            return super().get_changelist_instance(request)
        with search_timeout():
            return super().get_changelist_instance(request)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Add the statuses of generations, and previews for users who may see content."""
        rows = with_generation_status(super().get_queryset(request))
        return with_previews(rows) if may_see_content(request) else rows

    def get_search_results(
        self, request: HttpRequest, queryset: Any, search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search for an id, for metadata, or, with the permission, for words of the items."""
        term = search_term.strip()
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
        project = id_of(request.GET.get("project__id__exact", ""))
        return queryset.mentioning(term, project), False

    def get_urls(self) -> list[URLPattern]:
        """Add the export and the actions."""
        wrap, name = self.admin_site.admin_view, "responses_api_storedresponse_"
        own = [
            path("export/", wrap(require_GET(self.export_view)), name=f"{name}export"),
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
        """Show the response in its thread."""
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
            # In a template, "metadata.items" would look up the key "items".
            "metadata": list(stored.metadata.items()),
            "generation": generation,
            "model": model_link(stored.model),
            "cost": cost_label(generation.model, generation.cost) if generation else "—",
            "status": status_label(status_of(stored, generation.status if generation else None)),
            "tree": tree(stored),
            "has_ended": stored.status in ENDED,
            "site_calls": site_calls(stored, with_content=may_see_content(request)),
            "may_see": may_see_content(request),
            "may_change": self._may_act(request),
        }
        if context["may_see"]:
            shown = turns(stored)
            context |= self.feedback_context(request, stored)
            context |= self.case_context(request, stored)
            context |= {
                "turns": shown,
                "earlier": shown[0].response.previous_id if shown[0].response else None,
                "most_turns": MAX_TURNS,
                "curl": curl_command(stored, f"{request.scheme}://{request.get_host()}"),
                "request_json": pretty(stored.request),
                "error": stored.error,
                "questions": waiting_questions(stored),
            }
        return context

    def saved_answer(self, stored: StoredResponse) -> SavedAnswer:
        """Return the request with the history that it had, and the text of the answer."""
        fields = {k: value for k, value in stored.request.items() if k not in OF_CLIENT}
        history = [item.data for item in input_of(stored)]
        outputs = stored.items.filter(is_output=True).order_by("position")
        answer = {"output": [item.data for item in outputs]}
        return SavedAnswer(stored.public_id, {**fields, "input": history}, text_of(answer))

    def _may_act(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("responses_api.change_storedresponse"))

    def stop_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Stop a response."""
        stored = self._get_to_act(request, pk)
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
        return self._redirect(pk)

    def again_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Run a response again, in the background."""
        stored = self._get_to_act(request, pk)
        try:
            new = run_again(stored, new_id("req_"))
        except Exception as exc:
            error = api_error(exc)
            if error.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                raise  # An unexpected error.
            messages.error(request, f"It could not be run again: {error.message}")
            return self._redirect(pk)
        self.log_change(request, stored, f"Run again as {new}.")
        return self._redirect(StoredResponse.objects.get(public_id=new).pk)

    def export_view(self, request: HttpRequest) -> HttpResponseBase:
        """Download the responses of the list, all pages."""
        if not (self.has_view_permission(request) and may_see_content(request)):
            raise PermissionDenied
        address = reverse("admin:responses_api_storedresponse_changelist")
        try:
            changelist = self._search(request)
        except SearchTooBroad:
            messages.warning(request, _TOO_BROAD)
            query = request.GET.copy()
            query.pop("q")
            return HttpResponseRedirect(f"{address}?{query.urlencode()}")
        except IncorrectLookupParameters:
            return HttpResponseRedirect(f"{address}?{ERROR_FLAG}=1")  # As the list itself does.
        filters = changelist.get_filters_params()
        chosen = [urlencode(filters, doseq=True)] if filters else []
        if request.GET.get("q"):
            chosen.append("a search")  # Without its words, which may be content.
        LogEntry.objects.create(
            user_id=int(request.user.pk or 0),
            content_type=ContentType.objects.get_for_model(StoredResponse),
            object_repr="Responses",
            action_flag=CHANGE,
            change_message=f"Exported: {', '.join(chosen) or 'all'}.",
        )
        return export(changelist.queryset)

    def _get_to_act(self, request: HttpRequest, pk: int) -> StoredResponse:
        if not self._may_act(request):
            raise PermissionDenied
        rows = StoredResponse.objects.select_related("previous", "conversation")
        return get_object_or_404(rows, pk=pk)

    def _redirect(self, pk: int) -> HttpResponse:
        return HttpResponseRedirect(
            reverse("admin:responses_api_storedresponse_change", args=(pk,))
        )

    @admin.display(description="ID")
    def short_id(self, stored: StoredResponse) -> str:
        return f"{stored.public_id[:13]}…"

    @admin.display(description="status")
    def shown_status(self, stored: StoredResponse) -> SafeString:
        return status_label(status_of(stored, getattr(stored, "generation_status", None)))

    @admin.display(description="tokens in / out")
    def tokens(self, stored: StoredResponse) -> str:
        usage = stored.usage
        return f"{usage['input_tokens']:,} / {usage['output_tokens']:,}" if usage else "—"


def request_body(stored: StoredResponse) -> dict[str, Any]:
    """Return the request body of a response."""
    items = stored.items.filter(is_output=False).order_by("position")
    body = {**stored.request, "input": [item.data for item in items]}
    if stored.previous is not None:
        body["previous_response_id"] = stored.previous.public_id
    if stored.conversation is not None:
        body["conversation"] = stored.conversation.public_id
    if stored.metadata:
        body["metadata"] = stored.metadata
    return body


def curl_command(stored: StoredResponse, origin: str) -> str:
    """Return the request as a shell command, with the key in ``$API_KEY``."""
    return (
        f"curl {origin}/v1/responses \\\n"
        '  -H "Authorization: Bearer $API_KEY" \\\n'
        "  -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(pretty(request_body(stored)))}"
    )


def run_again(stored: StoredResponse, request_id: str) -> str:
    """Submit the request again, as a background response with the same key; return its id.

    It has the same context, but is not added to a conversation. Raise ApiError.
    """
    body = {k: value for k, value in request_body(stored).items() if k not in NOT_REPEATED}
    if body.pop("conversation", None) is not None:
        body["input"] = [item.data for item in input_of(stored)]
    return submit_as(stored, body, request_id)


def submit_as(stored: StoredResponse, body: dict[str, Any], request_id: str) -> str:
    """Submit a request in the background with the key of a response; return the new id.

    Raise ApiError.
    """
    generation = Generation.objects.filter(public_id=stored.public_id).first()
    if generation is None:
        raise ConflictError(
            "The usage log does not have the response any more, so its key is not known."
        )
    caller = caller_of_key(generation.api_key_id)
    if caller is None:
        raise ConflictError("The key of the response is not accepted any more.")
    body = {**body, "background": True, "store": True}
    creation = create(caller, ResponseRequest.model_validate(body))
    submit(creation.submission, request_id)
    return str(creation.response["id"])


def export(rows: QuerySet[StoredResponse]) -> StreamingHttpResponse:
    """Return the responses as a JSONL download, newest first. They are read in batches."""
    answer = StreamingHttpResponse(_export_lines(rows), content_type="application/x-ndjson")
    answer["Content-Disposition"] = 'attachment; filename="responses.jsonl"'
    return answer


async def _export_lines(rows: QuerySet[StoredResponse]) -> AsyncIterator[bytes]:
    before: int | None = None
    read = sync_to_async(_read_batch, thread_sensitive=False)
    while True:
        lines, before = await read(rows, before)
        yield lines
        if before is None:
            return


def _read_batch(rows: QuerySet[StoredResponse], before: int | None) -> tuple[bytes, int | None]:
    """Return the next lines, and the key below which the batch after them begins.

    Raise SearchTooBroad.
    """
    inputs = Prefetch(
        "items", Item.objects.filter(is_output=False).order_by("position"), to_attr="inputs"
    )
    rows = rows.select_related("previous", "conversation").prefetch_related(inputs)
    with release_connection_after():
        with search_timeout():
            found = keyset_page(rows, _EXPORT_BATCH, before=before)
        responses = current_responses(found.rows)
    lines = b""
    for row, response in zip(found.rows, responses, strict=True):
        items = [{"id": item.public_id, **item.data} for item in row.inputs]
        entry = {**response.model_dump(), "input": items, "feedback": row.feedback}
        lines += orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)
    return lines, found.reached


@admin.register(Conversation)
class ConversationAdmin(PreviewAdmin):
    """Conversations, with deleted ones whose items responses use."""

    list_display = (
        *("short_id", "time", "project", "shown_metadata", "items", "responses", "latest"),
    )
    previews = ("last_message",)
    list_filter = (SinceFilter, ("project", RelatedFilter))
    list_select_related = ("project",)
    change_form_template = "responses_api/admin/conversation.html"
    fields = ("public_id", "project", "metadata", "created_at", "deleted_at")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Add the latest response, and the last message for users who may see content."""
        rows = with_latest_response(super().get_queryset(request))
        return with_last_message(rows) if may_see_content(request) else rows

    @admin.display(description="ID")
    def short_id(self, conversation: Conversation) -> str:
        return f"{conversation.public_id[:13]}…"

    @admin.display(description="items")
    def items(self, conversation: Conversation) -> str:
        return f"{conversation.next_position:,}"

    @admin.display(description="responses")
    def responses(self, conversation: Any) -> str:
        return f"{conversation.response_count or 0:,}"

    @admin.display(description="latest response")
    def latest(self, conversation: Any) -> SafeString:
        return time_label(conversation.latest_at)

    @admin.display(description="last message")
    def last_message(self, conversation: Any) -> str:
        return preview(conversation.said)

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show the items below the position ``before``, or the newest."""
        before = id_of(request.GET.get("before", ""))
        found: list[Item] = []
        if may_see_content(request) and (pk := id_of(object_id)) is not None:
            rows = Item.objects.filter(conversation__pk=pk)
            if before is not None:
                rows = rows.filter(conversation_position__lt=before)
            found = list(reversed(rows.order_by("-conversation_position")[:MAX_ITEMS]))
        first = found[0].conversation_position if found else 0
        context = {
            "may_see": may_see_content(request),
            "bubbles": BubbleMaker(found).bubbles(found),
            "earlier": first or None,
            "is_newest": before is None,
        }
        return super().change_view(
            request, object_id, form_url, {**(extra_context or {}), **context}
        )
