"""Admin of users and roles.

Nobody can grant permissions that they do not have, or manage a user who has more: a password reset
link would let them take over that user.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.widgets import RelatedFieldWidgetWrapper
from django.contrib.auth.admin import GroupAdmin, UserAdmin
from django.contrib.auth.models import Group, Permission, User
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html, format_html_join
from unfold.forms import AdminPasswordChangeForm, UserChangeForm
from unfold.widgets import UnfoldAdminCheckboxSelectMultipleWidget

from inference_site.console.people.password_links import (
    INVITATION,
    is_invited,
    mail_link,
    make_link,
    sends_mail,
)
from inference_site.core.admin_pages.base_admin import API_USER, COMMAND_USER, SiteAdmin
from inference_site.core.admin_pages.labels import status_label, time_label

ACTIONS = {"view": "See", "add": "Add", "change": "Change", "delete": "Delete"}
WITHOUT_PAGE = "Tables without a page of their own"
_OTHER_PAGES = ("site_settings.sitesettings", "usage.usagerollup")
"""Records with a page that is none of Django's admin."""


def action_of(permission: Permission) -> str:
    """Return what a permission lets a user do: ``See``, or the words of its name."""
    action = permission.codename.removesuffix(f"_{permission.content_type.model}")
    words = permission.name.removeprefix("Can ")
    return ACTIONS.get(action) or words[:1].upper() + words[1:]


def record_of(permission: Permission) -> str:
    """Return what a permission is about, in the words of the menu."""
    model = permission.content_type.model_class()
    name = permission.content_type.name if model is None else str(model._meta.verbose_name_plural)
    return name[:1].upper() + name[1:]


def has_page(permission: Permission) -> bool:
    """Return whether some page asks for a permission; most tables of Django itself have none."""
    model = permission.content_type.model_class()
    if model is None:
        return False
    return admin.site.is_registered(model) or model._meta.label_lower in _OTHER_PAGES


def in_words(permissions: Iterable[Permission]) -> list[tuple[str, str]]:
    """Return each action that these permissions allow, with the records that it is allowed on."""
    allowed: dict[str, list[str]] = {action: [] for action in ACTIONS.values()}
    for permission in filter(has_page, permissions):
        allowed.setdefault(action_of(permission), []).append(record_of(permission))
    return [(action, ", ".join(sorted(of))) for action, of in allowed.items() if of]


class _ByRecord(forms.models.ModelChoiceIterator[Permission]):
    """The choices of a field of permissions, in a group for each record; the last has the rest."""

    def __iter__(self) -> Iterator[Any]:
        def place_of(row: Permission) -> tuple[str, int, int]:
            action = action_of(row)
            return record_of(row), first.index(action) if action in first else len(first), row.pk

        first = list(ACTIONS.values())
        rows = sorted(self.queryset.select_related("content_type"), key=place_of)
        for record, permissions in groupby(filter(has_page, rows), record_of):
            yield record, [self.choice(permission) for permission in permissions]
        if rest := [self.choice(row) for row in rows if not has_page(row)]:
            yield WITHOUT_PAGE, rest


class PermissionsWidget(UnfoldAdminCheckboxSelectMultipleWidget):
    """Checkboxes, in a row for each record."""

    template_name = "people/permissions.html"

    def get_context(self, *args: Any) -> dict[str, Any]:
        return {**super().get_context(*args), "without_page": WITHOUT_PAGE}


class PermissionsField(forms.ModelMultipleChoiceField[Permission]):
    """Permissions of a role or a user."""

    iterator = _ByRecord
    widget = PermissionsWidget

    def label_from_instance(self, obj: Any) -> str:
        return action_of(obj) if has_page(obj) else f"{action_of(obj)} {record_of(obj).lower()}"


def permissions_of(user: Any) -> QuerySet[Permission]:
    """Return the user's permissions; unlike Django's, also those of a deactivated user."""
    if user.is_superuser:
        return Permission.objects.all()
    return Permission.objects.filter(Q(user=user) | Q(group__user=user)).distinct()


def grantable_groups(user: Any) -> QuerySet[Group]:
    """Return the roles whose permissions the user has all of."""
    missing = Permission.objects.exclude(pk__in=permissions_of(user).values("pk"))
    return Group.objects.exclude(pk__in=Group.objects.filter(permissions__in=missing).values("pk"))


def may_manage(user: Any, other: User) -> bool:
    """Return whether ``user`` has all permissions of ``other``."""
    if user.is_superuser:
        return True
    missing = permissions_of(other).exclude(pk__in=permissions_of(user).values("pk"))
    return not (other.is_superuser or missing.exists())


admin.site.unregister(User)
admin.site.unregister(Group)


class InvitationForm(forms.ModelForm[User]):
    """The form that adds a user, who then sets a password with a link."""

    class Meta:
        model = User
        fields = ("username", "email", "groups")

    def clean_groups(self) -> Any:
        """Return the roles. Raise ValidationError for none: such a user could not open any page."""
        if not self.cleaned_data["groups"]:
            raise forms.ValidationError("Choose at least one role.")
        return self.cleaned_data["groups"]

    def save(self, commit: bool = True) -> User:
        """Make the user a staff member without a password."""
        self.instance.is_staff = True
        self.instance.set_unusable_password()
        return super().save(commit)


class AccessAdmin(SiteAdmin):
    """What the admins of users and roles share: how they offer permissions and roles."""

    def formfield_for_manytomany(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Offer only permissions that the user can grant."""
        if db_field.related_model is Permission:
            kwargs |= {"form_class": PermissionsField, "widget": PermissionsWidget, "help_text": ""}
            kwargs["queryset"] = permissions_of(request.user)
        return super().formfield_for_manytomany(db_field, request, **kwargs)

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Remove the icons beside the choices, which would add or edit one in a popup."""
        field: Any = super().formfield_for_dbfield(db_field, request, **kwargs)
        if isinstance(getattr(field, "widget", None), RelatedFieldWidgetWrapper):
            field.widget = field.widget.widget
        return field


@admin.register(User)
class StaffAdmin(UserAdmin[User], AccessAdmin):  # type: ignore[misc]  # The theme types its own.
    """Users of the console. The audit log refers to them, so they are deactivated, not deleted."""

    form = UserChangeForm
    add_form = InvitationForm
    add_form_template = "people/invite.html"
    add_fieldsets: Any = ((None, {"fields": ("username", "email", "groups")}),)
    change_password_form = AdminPasswordChangeForm
    list_display = ("username", "email", "roles", "state", "last_login_time")
    list_filter = ("is_active", "groups")
    filter_horizontal = ()
    readonly_fields = ("last_login", "date_joined", "provider_accounts")
    fieldsets = (
        (None, {"fields": ("username", "password", "provider_accounts")}),
        ("Person", {"fields": ("first_name", "last_name", "email")}),
        ("Access", {"fields": ("is_active", "is_staff", "is_superuser", "groups")}),
        ("More permissions", {"fields": ("user_permissions",)}),
        ("Times", {"fields": ("last_login", "date_joined")}),
    )
    actions = ("make_links",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[User]:
        """Return users with their roles, which one query reads; not the users of the audit log."""
        users: QuerySet[User] = super().get_queryset(request)
        return users.exclude(username__in=(API_USER, COMMAND_USER)).prefetch_related("groups")

    @admin.display(description="roles")
    def roles(self, user: User) -> str:
        if user.is_superuser:
            return "superuser"
        return ", ".join(sorted(group.name for group in user.groups.all())) or "—"

    @admin.display(description="state")
    def state(self, user: User) -> str:
        if not user.is_active:
            return status_label("deactivated")
        return status_label("invited" if is_invited(user) else "active")

    @admin.display(description="last login", ordering="last_login")
    def last_login_time(self, user: User) -> str:
        return time_label(user.last_login)

    @admin.display(description="single sign-on")
    def provider_accounts(self, user: User) -> str:
        return ", ".join(map(str, user.identities.all())) or "—"

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Let only superusers make superusers."""
        names = super().get_readonly_fields(request, obj)
        return names if request.user.is_superuser else (*names, "is_superuser")

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        allowed: bool = super().has_change_permission(request, obj)
        return allowed and (obj is None or may_manage(request.user, obj))

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Allow it only for users who have never logged in: nothing refers to them."""
        allowed: bool = super().has_delete_permission(request, obj)
        is_new = obj is not None and obj.last_login is None
        return allowed and is_new and may_manage(request.user, obj)

    def formfield_for_manytomany(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Offer only roles that the user can grant."""
        if db_field.name == "groups":
            kwargs["queryset"] = grantable_groups(request.user).order_by("name")
            kwargs["widget"] = UnfoldAdminCheckboxSelectMultipleWidget
            kwargs |= {"label": "Roles", "help_text": ""}
        return super().formfield_for_manytomany(db_field, request, **kwargs)

    def response_add(self, request: HttpRequest, obj: Any, post_url_continue: Any = None) -> Any:
        """Show the invitation link."""
        text, link, _ = _new_link(request, obj)
        return self.secrets_page(request, [(text, link)])

    @admin.action(description="Make a link to set a password", permissions=["change"])
    def make_links(self, request: HttpRequest, queryset: QuerySet[User]) -> HttpResponse | None:
        """Make each user an invitation link or, after the first login, a reset link."""
        links = []
        for user in queryset:
            if user.is_active and may_manage(request.user, user):
                text, link, kind = _new_link(request, user)
                links.append((text, link))
                self.log_change(request, user, f"Made a link to set a password ({kind}).")
            else:
                why = "has more permissions than you" if user.is_active else "is deactivated"
                messages.error(request, f"No link for {user.username}: the user {why}.")
        return self.secrets_page(request, links) if links else None


def _new_link(request: HttpRequest, user: User) -> tuple[str, str, str]:
    """Make a link for this user and mail it; return what it is, the link, and its kind."""
    link, kind = make_link(request, user)
    name = "The invitation of" if kind is INVITATION else "The reset of the password of"
    days = f"{kind.lifetime.days} day{'s' if kind.lifetime.days > 1 else ''}"
    if user.email and sends_mail():
        mail_link(user, link, kind)
        messages.info(request, f"It is mailed to {user.email} too.")
    return f"{name} {user.username} works once, for {days}", link, kind.kind


@admin.register(Group)
class RoleAdmin(GroupAdmin, AccessAdmin):  # type: ignore[misc]  # As above.
    """Admin of roles: sets of permissions that users share."""

    filter_horizontal = ()
    list_display = ("name", "may", "members")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Group]:
        """Read the permissions and users of all roles in a query each."""
        roles: QuerySet[Group] = super().get_queryset(request)
        return roles.prefetch_related("permissions__content_type").annotate(users=Count("user"))

    @admin.display(description="what it may do")
    def may(self, role: Group) -> str:
        lines = in_words(role.permissions.all())
        # One element: on phones a cell puts what is in it beside its label, each in a column.
        words = format_html_join("", '<p class="long-text"><b>{}</b> {}</p>', lines)
        return format_html("<div>{}</div>", words)

    @admin.display(description="users", ordering="users")
    def members(self, role: Any) -> int:
        users: int = role.users
        return users

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        allowed: bool = super().has_change_permission(request, obj)
        return allowed and _is_within(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        allowed: bool = super().has_delete_permission(request, obj)
        return allowed and _is_within(request, obj)


def _is_within(request: HttpRequest, group: Group | None) -> bool:
    return group is None or grantable_groups(request.user).filter(pk=group.pk).exists()
