"""Admin of the approvals of MCP calls: what waits, what was answered, and answers by operators.

The page of the response asks; its answer is a request like that of a client, with the answers as
``mcp_approval_response`` items, so that the same code decides which of two answers counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.views.decorators.http import require_POST

from inference_site.core.admin_pages.base_admin import KeysetAdmin, RelatedFilter
from inference_site.core.admin_pages.labels import (
    may_see_content,
    preview,
    status_label,
    time_label,
)
from inference_site.core.errors.api_errors import ConflictError
from inference_site.core.errors.exceptions import api_error
from inference_site.runs.queue import new_id
from responses_api.admin.responses import NOT_REPEATED, submit_as
from responses_api.mcp_approvals import needs_credentials, waiting_questions
from responses_api.models import McpApproval, StoredResponse

_CHOICES = {"approve": True, "refuse": False}


class AnswerFilter(admin.SimpleListFilter):
    """Filter by whether an approval was answered."""

    title, parameter_name = "answer", "answer"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("waiting", "Waiting"), ("answered", "Answered")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        match self.value():
            case "waiting":
                return queryset.filter(answered_at=None)
            case "answered":
                return queryset.exclude(answered_at=None)
        return queryset


@admin.register(McpApproval)
class McpApprovalAdmin(KeysetAdmin):
    """The approvals; those who may see content also see the arguments."""

    list_display = ("asked", "project", "server_label", "name", "response", "answer", "answered_by")
    list_display_links = None  # The list shows all columns.
    list_filter = (AnswerFilter, ("project", RelatedFilter))
    list_select_related = ("project", "item")
    search_fields = ("item__public_id__exact",)

    def get_urls(self) -> list[URLPattern]:
        """Add the answer to the questions of a response."""
        answer = self.admin_site.admin_view(require_POST(self.answer_view))
        name = "responses_api_mcpapproval_answer"
        return [path("of/<int:pk>/answer/", answer, name=name), *super().get_urls()]

    def answer_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Answer all questions of the response that wait, and continue it."""
        may_answer = request.user.has_perm("responses_api.change_storedresponse")
        if not (may_answer and may_see_content(request)):  # Who answers must see the arguments.
            raise PermissionDenied
        stored = get_object_or_404(StoredResponse.objects.select_related("conversation"), pk=pk)
        questions = waiting_questions(stored)
        chosen = {row: request.POST.get(f"answer-{row.pk}", "") for row in questions}
        if not questions:
            messages.error(request, "Its approvals have been answered already.")
        elif not all(value in _CHOICES for value in chosen.values()):
            messages.error(request, "Nothing was answered: approve or refuse each of the calls.")
        else:
            answers = {row.item.public_id: _CHOICES[value] for row, value in chosen.items()}
            try:
                new = answer_and_continue(stored, answers, new_id("req_"))
            except Exception as exc:
                error = api_error(exc)
                if error.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                    raise  # An unexpected error.
                messages.error(request, f"Nothing was answered: {error.message}")
            else:
                words = ", ".join(f"{value} {row}" for row, value in chosen.items())
                self.log_change(request, stored, f"Approvals: {words}; continued as {new}.")
                stored = StoredResponse.objects.get(public_id=new)
        return HttpResponseRedirect(
            reverse("admin:responses_api_storedresponse_change", args=(stored.pk,))
        )

    def get_list_display(self, request: HttpRequest) -> tuple[Any, ...]:
        """Add the arguments for users who may see content."""
        shown = tuple(self.list_display)
        return (*shown[:4], "arguments", *shown[4:]) if may_see_content(request) else shown

    @admin.display(description="asked")
    def asked(self, approval: McpApproval) -> SafeString:
        return time_label(approval.asked_at)

    @admin.display(description="arguments")
    def arguments(self, approval: McpApproval) -> str:
        return preview(approval.item.data.get("arguments"))

    @admin.display(description="response")
    def response(self, approval: McpApproval) -> SafeString | str:
        pk = approval.item.response_id
        if pk is None:
            return "—"
        address = reverse("admin:responses_api_storedresponse_change", args=(pk,))
        words = "Answer" if approval.answered_at is None else "Open"
        return format_html('<a href="{}#approvals">{}</a>', address, words)

    @admin.display(description="answer")
    def answer(self, approval: McpApproval) -> str:
        if approval.answered_at is None:
            return status_label("queued")
        return "approved" if approval.approve else "refused"


def answer_and_continue(
    stored: StoredResponse, answers: Mapping[str, bool], request_id: str
) -> str:
    """Submit a request that continues a response with these answers, by the id of their item.

    It has the key, the fields and the tools of the response. Return the id of the new response.
    Raise ApiError, also if a question was answered in the meantime.
    """
    fields = {k: v for k, v in stored.request.items() if k not in NOT_REPEATED}
    if needs_credentials(fields.get("tools") or ()):
        raise ConflictError(
            "An MCP server of the request was named by its URL, and credentials of requests are "
            "not stored: answer through the API, with the credentials."
        )
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        fields["tool_choice"] = {**choice, "mode": "auto"}
    elif choice != "none":  # A choice that was forced would force the next call, too.
        fields["tool_choice"] = "auto"
    fields["input"] = [
        {"type": "mcp_approval_response", "approval_request_id": id_, "approve": approve}
        for id_, approve in answers.items()
    ]
    if stored.conversation is None:
        fields["previous_response_id"] = stored.public_id
    else:
        fields["conversation"] = stored.conversation.public_id
    return submit_as(stored, fields, request_id)
