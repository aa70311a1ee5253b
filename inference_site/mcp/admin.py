"""Admin of registered MCP servers: address, credentials, projects, and the tools that they list."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from unfold.widgets import UnfoldAdminPasswordWidget, UnfoldAdminTextareaWidget

from inference_site.core.admin_pages.base_admin import SiteAdmin, TextField
from inference_site.core.admin_pages.labels import preview, status_label, time_label
from inference_site.mcp.access import (
    NotUsable,
    check_headers,
    check_url,
    credentials_error,
    registered_endpoint,
    seal_headers,
    seal_secret,
    unseal_headers,
)
from inference_site.mcp.connections import user_endpoint
from inference_site.mcp.models import McpConnection, McpServer

HIDDEN = "(hidden)"
"""Shown in place of the value of a header; a form that is sent with it keeps the value."""
UNREADABLE = "(unreadable, because another SECRET_KEY encrypted them)"
"""Shown in place of all headers then; a form that is sent with it keeps what is stored."""
_OAUTH = ("oauth_issuer", "oauth_client_id")
_OF_GRANTS = frozenset({"url", "is_per_user", *_OAUTH})
"""The fields for whose values users have connected; what they authorised ends with a change."""
_CHECK_S = 10.0
_MOST_CHECKED = 20
"""Servers of one action: it asks one after the other."""
_CHECK_BYTES = 4 * 1024 * 1024


class McpServerForm(forms.ModelForm[McpServer]):
    """The form of a server; values of headers are never shown again."""

    secret_headers = TextField(
        label="Headers",
        required=False,
        max_length=20_000,
        widget=UnfoldAdminTextareaWidget(attrs={"rows": 3}),
        help_text="One in a line, such as Authorization: Bearer TOKEN. Stored encrypted.",
    )

    oauth_client_secret = forms.CharField(
        label="Client secret",
        required=False,
        max_length=2_000,
        widget=UnfoldAdminPasswordWidget(attrs={"autocomplete": "new-password"}),
        help_text="Stored encrypted. Leave empty to keep the stored one.",
    )

    class Meta:
        model = McpServer
        fields = (
            *("label", "url", "transport", "description", "is_active", "is_idempotent"),
            *("projects", "is_per_user", "oauth_issuer", "oauth_client_id", "oauth_scope"),
        )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "secret_headers" in self.fields and self.instance.pk:
            self.fields["secret_headers"].initial = self._shown_headers()

    def clean_url(self) -> str:
        """Return the address. Raise ValidationError if no server can be there."""
        url = str(self.cleaned_data["url"])
        try:
            check_url(url)
        except NotUsable as exc:
            raise ValidationError(f"This cannot be the address of a server: {exc}.") from exc
        return url

    def clean(self) -> dict[str, Any] | None:
        """Encrypt the headers; a hidden value is the stored one, if the address is the same."""
        values = super().clean() or self.cleaned_data
        has_moved = "url" in self.changed_data
        sent = str(values.get("secret_headers") or "").strip()
        if not has_moved and sent == UNREADABLE == self._shown_headers():
            self._clean_oauth(values)
            return values
        stored = {} if has_moved else self._stored_headers()
        headers = dict[str, str]()
        for line in sent.splitlines():
            name, colon, value = (part.strip() for part in line.partition(":"))
            if not line.strip():
                continue
            if not colon or not name:
                self.add_error("secret_headers", "A line must be NAME: VALUE.")
                return values
            if value == HIDDEN and name not in stored:
                reason = "the address has changed" if has_moved else "none is stored"
                self.add_error("secret_headers", f"Write the value of {name} again: {reason}.")
                return values
            headers[name] = stored[name] if value == HIDDEN else value
        try:
            check_headers(headers)
        except NotUsable as exc:
            self.add_error("secret_headers", f"They cannot be sent: {exc}.")
            return values
        if values.get("is_per_user") and any(name.lower() == "authorization" for name in headers):
            self.add_error("secret_headers", "Authorization is that of each user here.")
        self.instance.credentials = seal_headers(headers)
        self._clean_oauth(values)
        return values

    def _clean_oauth(self, values: dict[str, Any]) -> None:
        """Encrypt the secret; a stored one is kept if the servers that it is for are the same."""
        issuer, client_id = values.get("oauth_issuer"), values.get("oauth_client_id")
        secret, is_per_user = values.get("oauth_client_secret"), bool(values.get("is_per_user"))
        has_moved = not _OF_GRANTS.isdisjoint(self.changed_data)
        if has_moved:
            self.instance.registration = ""
        if not client_id and (is_per_user or not issuer):
            self.instance.oauth_secret = ""
        if issuer or not (is_per_user or not client_id):
            try:
                check_url(str(issuer or ""))
            except NotUsable as exc:
                self.add_error("oauth_issuer", f"This cannot be an authorization server: {exc}.")
        if issuer and not client_id and not is_per_user:
            self.add_error("oauth_client_id", "It is needed to get tokens.")
        if secret and client_id:
            self.instance.oauth_secret = seal_secret(str(secret))
        elif has_moved and is_per_user:
            self.instance.oauth_secret = ""  # A client of users may have none.
        elif client_id and not is_per_user and (has_moved or not self.instance.oauth_secret):
            self.add_error("oauth_client_secret", "Write it: it is new, or the address is.")

    def _shown_headers(self) -> str:
        try:
            stored = unseal_headers(self.instance.credentials)
        except NotUsable:
            return UNREADABLE
        return "\n".join(f"{name}: {HIDDEN}" for name in stored)

    def _stored_headers(self) -> dict[str, str]:
        try:
            return unseal_headers(self.instance.credentials)
        except NotUsable:
            return {}


@admin.register(McpServer)
class McpServerAdmin(SiteAdmin):
    """Admin of registered servers. Their texts are shown as text, never as markup."""

    form = McpServerForm
    list_display = ("label", "url", "is_active", "health", "tool_count", "checked")
    list_filter = ("is_active",)
    search_fields = ("label", "url")
    autocomplete_fields = ("projects",)
    readonly_fields = ("health", "checked", "listed_tools")
    fieldsets = (
        (None, {"fields": ("label", "url", "transport", "secret_headers", "description")}),
        ("OAuth", {"fields": ("is_per_user", *_OAUTH, "oauth_client_secret", "oauth_scope")}),
        ("Use", {"fields": ("is_active", "projects", "is_idempotent")}),
        ("Tools", {"fields": ("health", "checked", "listed_tools")}),
    )
    actions = ("list_now",)
    how_to_add = "Requests name a registered server by its label, without address or credentials."

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Save a server; what users have authorised for another address is deleted."""
        super().save_model(request, obj, form, change)
        if change and not _OF_GRANTS.isdisjoint(form.changed_data):
            ended, _ = McpConnection.objects.filter(server=obj).delete()
            if ended:
                messages.warning(request, f"{ended} users must connect to it again.")

    @admin.action(description="List the tools of the selected servers now", permissions=["change"])
    def list_now(self, request: HttpRequest, queryset: QuerySet[McpServer]) -> None:
        """List the tools of each server, and say what came of it.

        A server that each user authorises is asked with what this user has authorised.
        """
        # The SDK takes 50 MB; only processes that use it have it.
        from inference_site.mcp import client

        if queryset.count() > _MOST_CHECKED:
            messages.warning(request, f"Only the first {_MOST_CHECKED} servers were asked.")
        for server in queryset[:_MOST_CHECKED]:
            try:
                endpoint = (
                    user_endpoint(server, request.user.pk)
                    if server.is_per_user
                    else registered_endpoint(server)
                )
                tools = client.list_tools(endpoint, client.Limits(_CHECK_S, _CHECK_BYTES))
            except (NotUsable, client.McpError) as exc:
                server.record_check(None, str(exc))
                messages.error(request, f"{server.label}: {exc}")
            else:
                server.record_check(tools)
                messages.success(request, f"{server.label}: {len(tools)} tools.")
            self.log_change(request, server, "Listed the tools.")

    @admin.display(description="health")
    def health(self, server: McpServer) -> SafeString | str:
        if error := credentials_error(server):
            return format_html("{} {}", status_label("failed"), error)
        if server.checked_at is None:
            return "not checked yet"
        if not server.error:
            return status_label("completed")
        return format_html("{} {}", status_label("failed"), server.error)

    @admin.display(description="tools")
    def tool_count(self, server: McpServer) -> int:
        return len(server.tools)

    @admin.display(description="checked", ordering="checked_at")
    def checked(self, server: McpServer) -> SafeString:
        return time_label(server.checked_at)

    @admin.display(description="tools")
    def listed_tools(self, server: McpServer) -> SafeString | str:
        rows = (
            (
                tool["name"],
                ", ".join(tool["input_schema"].get("properties") or ()),
                preview(tool.get("description")),
            )
            for tool in server.tools
        )
        lines = format_html_join("", "<li><b>{}</b> ({}): {}</li>", rows)
        return format_html("<ul>{}</ul>", lines) if server.tools else "—"
