"""Admin of users, groups and the audit log."""

from __future__ import annotations

from axes.models import AccessFailureLog
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.admin import GroupAdmin, UserAdmin
from django.contrib.auth.models import Group, User
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm

from inference_site.admin_pages.keyset import KeysetAdmin
from inference_site.admin_pages.site_admin import SiteAdmin
from inference_site.console.model_pages import admin as model_pages

REGISTERED_HERE = (model_pages,)
"""Modules that register more admins when they are imported."""

admin.site.unregister(User)
admin.site.unregister(Group)


@admin.register(User)
class StaffAdmin(UserAdmin[User], SiteAdmin):  # type: ignore[misc]  # The theme types its own.
    """Users that may log in to the console."""

    form = UserChangeForm
    add_form = UserCreationForm
    change_password_form = AdminPasswordChangeForm


@admin.register(Group)
class RoleAdmin(GroupAdmin, SiteAdmin):  # type: ignore[misc]  # As above.
    """Groups: sets of permissions that several users share."""


@admin.register(AccessFailureLog)
class LoginFailureAdmin(KeysetAdmin):
    """Logins that failed, read-only; those of locked users too, up to the one that locked them."""

    list_display = ("time", "username", "ip_address", "locked_out", "user_agent")
    list_filter = ("locked_out",)
    search_fields = ("username__exact", "ip_address")
    search_help_text = "Search by the user name or the address"

    @admin.display(description="time (UTC)")
    def time(self, failure: AccessFailureLog) -> str:
        return f"{failure.attempt_time:%Y-%m-%d %H:%M:%S}"


@admin.register(LogEntry)
class AuditAdmin(KeysetAdmin):
    """The audit log, read-only: every action in the admin, with its user."""

    list_display = ("time", "user", "action", "content_type", "target", "change")
    list_filter = ("action_flag", "user")
    list_select_related = ("user", "content_type")
    search_fields = ("object_id__exact",)
    search_help_text = "Search by the primary key of the changed object"

    @admin.display(description="time (UTC)")
    def time(self, entry: LogEntry) -> str:
        return f"{entry.action_time:%Y-%m-%d %H:%M:%S}"

    @admin.display(description="action")
    def action(self, entry: LogEntry) -> str:
        return entry.get_action_flag_display()

    @admin.display(description="object")
    def target(self, entry: LogEntry) -> SafeString | str:
        address = None if entry.is_deletion() else entry.get_admin_url()
        return (
            format_html('<a href="{}">{}</a>', address, entry.object_repr)
            if address
            else (entry.object_repr)
        )

    @admin.display(description="change")
    def change(self, entry: LogEntry) -> str:
        return entry.get_change_message()
