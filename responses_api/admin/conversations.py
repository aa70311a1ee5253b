"""Admin of conversations: their items as bubbles, the newest page first."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.safestring import SafeString

from inference_site.core.admin_pages.base_admin import PreviewAdmin, SinceFilter
from inference_site.core.admin_pages.labels import may_see_content, preview, time_label
from responses_api.admin.thread import MAX_ITEMS, BubbleMaker
from responses_api.annotations import with_last_message, with_latest_response
from responses_api.models import Conversation, Item


@admin.register(Conversation)
class ConversationAdmin(PreviewAdmin):
    """Conversations, with deleted ones whose items responses use."""

    list_display = (
        *("short_id", "time", "project", "shown_metadata", "items", "responses", "latest"),
    )
    previews = ("last_message",)
    list_filter = (SinceFilter, "project")
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
        before = request.GET.get("before", "")
        rows = Item.objects.filter(conversation__pk=object_id) if object_id.isdecimal() else None
        found: list[Item] = []
        if rows is not None and may_see_content(request):
            if before.isdecimal():
                rows = rows.filter(conversation_position__lt=before)
            found = list(reversed(rows.order_by("-conversation_position")[:MAX_ITEMS]))
        first = found[0].conversation_position if found else 0
        context = {
            "may_see": may_see_content(request),
            "bubbles": BubbleMaker(found).bubbles(found),
            "earlier": first or None,
            "is_newest": not before,
        }
        return super().change_view(
            request, object_id, form_url, {**(extra_context or {}), **context}
        )
