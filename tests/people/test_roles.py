"""The three roles, and that nobody gives or takes over more than they have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Group, Permission, User
from django.test import Client

Member = Callable[..., tuple[User, Client]]
VIEWED = [
    *("/admin/", "/admin/queue/", "/admin/fleet/", "/admin/requests/", "/admin/alarms/alarm/"),
    *("/admin/generations/generation/", "/admin/responses_api/storedresponse/"),
    *("/admin/accounts/project/", "/admin/accounts/apikey/", "/admin/accounts/budget/"),
]
ACTED_ON = ["/admin/", "/admin/queue/", "/admin/fleet/", "/admin/generations/generation/"]
"""Of these an operator sees more than a viewer; an administrator sees all, as a superuser does."""
OPERATED = ["/admin/settings/", "/admin/alarms/recipient/add/", "/admin/model_store/pull/add/"]
ADMINISTERED = [
    *("/admin/auth/user/", "/admin/auth/user/add/", "/admin/admin/logentry/"),
    *("/admin/accounts/apikey/add/", "/admin/accounts/project/add/", "/admin/auth/group/add/"),
]


@pytest.mark.parametrize(
    ("role", "open_to_it", "closed_to_it"),
    [
        ("viewer", VIEWED, OPERATED + ADMINISTERED),
        ("operator", ACTED_ON + OPERATED, ADMINISTERED),
        ("administrator", ADMINISTERED, []),
    ],
)
def test_a_role_opens_its_pages_and_no_others(
    member: Member, role: str, open_to_it: list[str], closed_to_it: list[str]
) -> None:
    _, browser = member("ada", role)
    assert {page: browser.get(page).status_code for page in open_to_it} == dict.fromkeys(
        open_to_it, 200
    )
    assert {page: browser.get(page).status_code for page in closed_to_it} == dict.fromkeys(
        closed_to_it, 403
    )


def test_each_role_has_what_the_one_below_it_has() -> None:
    roles = [Group.objects.get(name=name) for name in ("viewer", "operator", "administrator")]
    viewer, operator, administrator = ({*role.permissions.all()} for role in roles)
    assert viewer < operator < administrator


def test_only_administrators_read_content_and_make_keys() -> None:
    for name in ("responses_api.view_content", "accounts.add_apikey"):
        app, codename = name.split(".")
        roles = Group.objects.filter(
            permissions__codename=codename, permissions__content_type__app_label=app
        )
        assert [role.name for role in roles] == ["administrator"]


def test_an_administrator_has_every_permission() -> None:
    """Another permission needs a migration that gives it to the roles."""
    missing = Permission.objects.exclude(group__name="administrator")
    assert [str(permission) for permission in missing] == []


def change(user: User, **fields: Any) -> dict[str, Any]:
    """The form of the page of a user."""
    kept = {"username": user.username, "email": user.email, "is_active": "on", "is_staff": "on"}
    return {**kept, "groups": [group.pk for group in user.groups.all()], **fields}


def test_an_administrator_makes_nobody_a_superuser_and_changes_no_superuser(
    member: Member,
) -> None:
    root = User.objects.create_superuser("root", "root@example.org", "a right password")
    ada, browser = member("ada", "administrator")
    browser.post(f"/admin/auth/user/{ada.pk}/change/", change(ada, is_superuser="on"))
    ada.refresh_from_db()
    assert not ada.is_superuser
    new = {"password1": "another one 7", "password2": "another one 7"}
    assert browser.post(f"/admin/auth/user/{root.pk}/password/", new).status_code == 403
    page = f"/admin/auth/user/{root.pk}/change/"
    assert browser.post(page, change(root, email="a@b.org")).status_code == 403
    link = {"action": "make_links", "_selected_action": [root.pk]}
    text = browser.post("/admin/auth/user/", link, follow=True).content.decode()
    assert "more permissions than you" in text
    assert "/admin/reset/" not in text


def test_who_manages_users_gives_no_role_that_goes_beyond_their_own(
    member: Member, staff: Callable[..., Client]
) -> None:
    browser = staff("auth.view_user", "auth.add_user", "auth.change_user", "auth.change_group")
    administrator, viewer = (Group.objects.get(name=n) for n in ("administrator", "viewer"))
    form = {"username": "eve", "email": "", "groups": [administrator.pk]}
    assert (
        b"is not one of the available choices"
        in browser.post("/admin/auth/user/add/", form).content
    )
    ada, _ = member("ada", "administrator")
    assert browser.post(f"/admin/auth/user/{ada.pk}/change/", change(ada)).status_code == 403
    page = f"/admin/auth/group/{viewer.pk}/change/"
    assert browser.post(page, {"name": "viewer", "permissions": []}).status_code == 403
    assert not User.objects.filter(username="eve").exists()


def test_who_has_come_in_is_deactivated_and_not_deleted(member: Member) -> None:
    """The audit log refers to its users, and would lose what they did."""
    _, browser = member("ada", "administrator")
    bob, _ = member("bob", "viewer")
    delete = f"/admin/auth/user/{bob.pk}/delete/"
    assert browser.post(delete, {"post": "yes"}).status_code == 403
    many = {"action": "delete_selected", "_selected_action": [bob.pk], "post": "yes"}
    browser.post("/admin/auth/user/", many)
    assert User.objects.filter(pk=bob.pk).exists()
    User.objects.filter(pk=bob.pk).update(last_login=None)
    assert browser.post(delete, {"post": "yes"}).status_code == 302
    assert not User.objects.filter(pk=bob.pk).exists()
