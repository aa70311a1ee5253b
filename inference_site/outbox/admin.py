"""Admin of endpoints, and the log of messages with their answers."""

from __future__ import annotations

from typing import Any

import orjson
from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.views.decorators.http import require_POST
from unfold.widgets import UnfoldAdminCheckboxSelectMultipleWidget

from inference_site.core.admin_pages.base_admin import (
    KeysetAdmin,
    RelatedFilter,
    SinceFilter,
    SiteAdmin,
)
from inference_site.core.admin_pages.labels import may_see_content, pretty, status_label, time_label
from inference_site.outbox.models import (
    APPROVAL_EVENT,
    EVENTS,
    GIVEN_UP_AFTER,
    TEST_EVENT,
    Endpoint,
    Message,
    send,
    sends_mail,
)


class EndpointForm(forms.ModelForm[Endpoint]):
    """The form of an endpoint, with a checkbox for each event."""

    event_types = forms.MultipleChoiceField(
        choices=[(name, name) for name in EVENTS],
        required=False,
        label="Events",
        help_text="None chosen: all.",
        widget=UnfoldAdminCheckboxSelectMultipleWidget,
    )


class MailNote(SiteAdmin):
    """Base of the pages that offer mail: they say at once if there is no mail server."""

    list_before_template: Any = "outbox/mail_note.html"
    change_form_outer_before_template: Any = "outbox/mail_note.html"

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        context = {**(extra_context or {}), "lacks_mail": not sends_mail()}
        return super().changelist_view(request, context)

    def render_change_form(self, request: HttpRequest, context: Any, *args: Any, **kw: Any) -> Any:
        context["lacks_mail"] = not sends_mail()
        return super().render_change_form(request, context, *args, **kw)


@admin.register(Endpoint)
class EndpointAdmin(MailNote):
    """Endpoints. Users who may change one see its webhook secret."""

    form = EndpointForm
    list_display = ("address", "way", "owner", "events", "state", "is_enabled")
    list_filter = ("way", ("project", RelatedFilter))
    list_select_related = ("project",)
    search_fields = ("address",)
    autocomplete_fields = ("project",)
    actions = ("test", "rotate")
    deleted_logs = frozenset({"message"})
    how_to_add = (
        "An endpoint is told when responses and batches end or ask for an approval, or of alarms."
    )

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Hide the secret from users who may only view."""
        fields = ("way", "address", "project", "event_types", "only_if_named", "is_enabled")
        may_change = self.has_change_permission(request, obj)
        return (*fields, "with_arguments", "secret") if may_change else (*fields, "with_arguments")

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Let only users who may see content have it sent."""
        shown = super().get_readonly_fields(request, obj)
        return shown if may_see_content(request) else (*shown, "with_arguments")

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Save it; content that a user may not see does not go where they have it sent."""
        moved = not {"way", "address", "project"}.isdisjoint(form.changed_data)
        if moved and not may_see_content(request):
            obj.with_arguments = False
        super().save_model(request, obj, form, change)

    @admin.action(description="Send a test event", permissions=["change"])
    def test(self, request: HttpRequest, queryset: QuerySet[Endpoint]) -> None:
        """Send an event that says that it is a test; its row in the log has the answer."""
        endpoints = list(queryset)
        send(endpoints, TEST_EVENT, "test", {"text": "This is a test of the endpoint."})
        Endpoint.objects.filter(pk__in=[one.pk for one in endpoints]).update(rests_until=None)
        for endpoint in endpoints:
            self.log_change(request, endpoint, "Sent a test event.")
        messages.success(request, "The test is on its way; Messages has the answer in a moment.")

    @admin.action(description="Give it a new secret", permissions=["change"])
    def rotate(self, request: HttpRequest, queryset: QuerySet[Endpoint]) -> HttpResponse:
        """Rotate the secrets; webhooks are signed with the old ones too, for a day."""
        made = []
        for endpoint in queryset:
            made.append((f"The new secret of {endpoint}", endpoint.rotate()))
            self.log_change(request, endpoint, "Rotated the secret.")
        return self.secrets_page(request, made)

    @admin.display(description="of", ordering="project")
    def owner(self, endpoint: Endpoint) -> str:
        if endpoint.project is not None:
            return str(endpoint.project)
        return "rules that name it" if endpoint.only_if_named else "the site's alarms"

    @admin.display(description="events")
    def events(self, endpoint: Endpoint) -> str:
        return ", ".join(endpoint.event_types) or "all"

    @admin.display(description="state")
    def state(self, endpoint: Endpoint) -> SafeString:
        return status_label("failed" if endpoint.failures else "active")


class MessageStateFilter(admin.SimpleListFilter):
    """Filter by what has become of a message."""

    title, parameter_name = "state", "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("delivered", "Delivered"), ("waiting", "Waiting"), ("given_up", "Given up")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        match self.value():
            case "delivered":
                return queryset.exclude(delivered_at=None)
            case "waiting":
                return queryset.exclude(next_at=None)
            case "given_up":
                return queryset.filter(next_at=None, delivered_at=None)
        return queryset


@admin.register(Message)
class MessageAdmin(KeysetAdmin):
    """The outbox: each message with its endpoint, its attempts, the answer and the last error."""

    list_display = (
        *("time", "endpoint", "event_type", "object_id", "state", "attempts"),
        *("answer_status", "delivered", "error"),
    )
    list_filter = (MessageStateFilter, SinceFilter, "event_type", ("endpoint", RelatedFilter))
    list_select_related = ("endpoint",)
    fields = (
        *("public_id", "endpoint", "event_type", "object_id", "time", "attempts"),
        *("delivered", "answer_status", "error", "shown_body"),
    )
    change_form_template = "outbox/message.html"

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Hide a body that may have content from users who may not see that."""
        has_content = obj is not None and obj.event_type == APPROVAL_EVENT
        hides = has_content and not may_see_content(request)
        return self.fields[:-1] if hides else self.fields

    def get_urls(self) -> list[URLPattern]:
        """Add the button of the page."""
        view = self.admin_site.admin_view(require_POST(self.send_again))
        return [path("<int:pk>/again/", view, name="outbox_message_again"), *super().get_urls()]

    def send_again(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Send a message once more, with the same id, and try for as long as a new one."""
        if not request.user.has_perm("outbox.change_endpoint"):
            raise PermissionDenied
        message = get_object_or_404(Message, pk=pk)
        Message.objects.filter(pk=pk).update(
            next_at=Now(), give_up_at=Now() + GIVEN_UP_AFTER, delivered_at=None
        )
        Endpoint.objects.filter(pk=message.endpoint_id).update(rests_until=None)
        self.log_change(request, message, "Sent it again.")
        messages.success(request, "The message is sent again.")
        return HttpResponseRedirect(reverse("admin:outbox_message_change", args=[pk]))

    @admin.display(description="state")
    def state(self, message: Message) -> SafeString:
        if message.delivered_at is not None:
            return status_label("completed")
        return status_label("queued" if message.next_at else "failed")

    @admin.display(description="body")
    def shown_body(self, message: Message) -> SafeString:
        return format_html('<p class="long-text">{}</p>', pretty(orjson.loads(message.body)))

    @admin.display(description="delivered")
    def delivered(self, message: Message) -> str:
        return time_label(message.delivered_at)
