"""Admin of the approvals of MCP calls: what waits, and what was answered, by clients or here."""

from __future__ import annotations

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

from inference_site.core.admin_pages.base_admin import KeysetAdmin
from inference_site.core.admin_pages.labels import (
    may_see_content,
    preview,
    status_label,
    time_label,
)
from inference_site.core.errors.exceptions import api_error
from inference_site.runs.queue import new_id
from responses_api.admin.responses import answer_approval
from responses_api.models import McpApproval, StoredResponse


def _may_answer(request: HttpRequest) -> bool:
    """Return whether the user may act on responses, and sees what is to be approved."""
    return request.user.has_perm("responses_api.change_storedresponse") and may_see_content(request)


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

    list_display = ("asked", "project", "server_label", "name", "answer", "answered_by")
    fields = ("asked", "project", "server_label", "name", "response", "answer", "answered_by")
    change_form_template = "responses_api/admin/approval.html"
    list_filter = (AnswerFilter, "project")
    list_select_related = ("project", "item")
    search_fields = ("item__public_id__exact",)

    def get_list_display(self, request: HttpRequest) -> tuple[Any, ...]:
        """Add the arguments for users who may see content."""
        shown = tuple(self.list_display)
        return (*shown[:4], "arguments", *shown[4:]) if may_see_content(request) else shown

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Add the arguments for users who may see content."""
        shown = tuple(self.fields)
        return (*shown[:4], "all_arguments", *shown[4:]) if may_see_content(request) else shown

    def get_urls(self) -> list[URLPattern]:
        """Add the buttons of the page."""
        view = self.admin_site.admin_view(require_POST(self.answer_view))
        name = "responses_api_mcpapproval_answer"
        return [path("<int:pk>/answer/", view, name=name), *super().get_urls()]

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Offer the answers to users who may give them."""
        context = {**(extra_context or {}), "may_answer": _may_answer(request)}
        return super().change_view(request, object_id, form_url, context)

    def answer_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Approve or refuse a call; the response that asks for it goes on in the background."""
        if not _may_answer(request):
            raise PermissionDenied
        rows = McpApproval.objects.select_related("item__response")
        approval = get_object_or_404(rows, pk=pk)
        approve = request.POST.get("answer") == "approve"
        here = reverse("admin:responses_api_mcpapproval_change", args=[pk])
        try:
            new = answer_approval(approval, approve=approve, request_id=new_id("req_"))
        except Exception as exc:
            error = api_error(exc)
            if error.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                raise  # An unexpected error.
            messages.error(request, f"It could not be answered: {error.message}")
            return HttpResponseRedirect(here)
        verb = "Approved" if approve else "Refused"
        self.log_change(request, approval, f"{verb}; continued as {new}.")
        messages.success(request, f"{verb}. The response goes on.")
        made = StoredResponse.objects.get(public_id=new)
        return HttpResponseRedirect(
            reverse("admin:responses_api_storedresponse_change", args=[made.pk])
        )

    @admin.display(description="response")
    def response(self, approval: McpApproval) -> SafeString | str:
        asking = approval.item.response
        if asking is None:
            return "—"
        address = reverse("admin:responses_api_storedresponse_change", args=[asking.pk])
        return format_html('<a class="link" href="{}">{}</a>', address, asking.public_id)

    @admin.display(description="arguments")
    def all_arguments(self, approval: McpApproval) -> SafeString:
        arguments = approval.item.data.get("arguments", "")
        return format_html('<p class="long-text">{}</p>', arguments)

    @admin.display(description="asked (UTC)")
    def asked(self, approval: McpApproval) -> SafeString:
        return time_label(approval.asked_at)

    @admin.display(description="arguments")
    def arguments(self, approval: McpApproval) -> str:
        return preview(approval.item.data.get("arguments"))

    @admin.display(description="answer")
    def answer(self, approval: McpApproval) -> str:
        if approval.answered_at is None:
            return status_label("queued")
        return "approved" if approval.approve else "refused"
