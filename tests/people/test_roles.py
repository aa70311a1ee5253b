"""The three roles, and that nobody gives or takes over more than they have."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from django.apps import apps
from django.contrib.auth.models import Group, Permission, User
from django.test import Client

from inference_site.accounts.models import ApiKey
from inference_site.catalogue.model_store.models import Pull
from inference_site.console.playground.models import Preset
from responses_api.models import PromptTemplate

Member = Callable[..., tuple[User, Client]]
VIEWED = [
    *("/admin/", "/admin/queue/", "/admin/fleet/", "/admin/requests/", "/admin/alarms/alarm/"),
    *("/admin/generations/generation/", "/admin/responses_api/storedresponse/"),
    *("/admin/accounts/project/", "/admin/accounts/apikey/", "/admin/accounts/budget/"),
    *("/admin/model_store/storedmodel/", "/admin/model_store/pull/"),
]
ACTED_ON = ["/admin/", "/admin/queue/", "/admin/fleet/", "/admin/generations/generation/"]
"""Of these an operator sees more than a viewer; an administrator sees all, as a superuser does."""
OPERATED = ["/admin/settings/", "/admin/outbox/endpoint/add/", "/admin/model_store/pull/add/"]
ADMINISTERED = [
    *("/admin/auth/user/", "/admin/auth/user/add/", "/admin/admin/logentry/"),
    *("/admin/accounts/apikey/add/", "/admin/accounts/project/add/", "/admin/auth/group/add/"),
]

LEFT_TO_ADMINISTRATORS = {
    "accounts.apikey": "add change delete",
    "accounts.budget": "add change delete",
    "accounts.project": "add change delete",
    "admin.logentry": "add change delete view",
    "alarms.alarm": "add delete",  # Beat alone writes them,
    "outbox.message": "add change delete",  # and these.
    "auth.group": "add change delete view",
    "auth.user": "add change delete view",
    "batches.batch": "add delete",  # The API's.
    "axes.accessfailurelog": "add change delete view",
    "completions.storedcompletion": "add change delete",
    "files.storedfile": "add change delete view",
    "files.upload": "add change delete view",  # No page shows them.
    "generations.generation": "add delete",
    "kept_content.keptcontent": "add change delete view",  # ``view_content`` opens it.
    "model_store.adapter": "add change delete view",  # The API's, with its scope.
    "model_store.pull": "change delete",
    "people.identity": "add change delete view",
    "playground.preset": "add change view",  # Staff need none for their own.
    "request_log.savedfilter": "add change delete view",  # As before.
    "responses_api.conversation": "add change delete",
    "responses_api.promptversion": "add change delete",  # Saving a prompt adds one.
    "responses_api.storedresponse": "add delete content",
    "site_settings.sitesettings": "add change delete",
    "usage.usagerollup": "add change delete",
    "vector_stores.vectorstore": "add change delete",  # The API's.
    # No page shows them by themselves.
    "accounts.budgetspend": "add change delete view",
    "accounts.keysecret": "add change delete view",
    "request_log.refusal": "add change delete view",
    "responses_api.item": "add change delete view",
    "usage.latencyhistogram": "add change delete view",
    "usage.latencyrollup": "add change delete view",
}
"""What neither viewers nor operators have, on purpose: by model, the actions."""
FOREIGN = {"auth.permission", "axes", "contenttypes", "sessions"}
"""Models without a page of the console."""


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


def test_pages_name_users_without_links_to_pages_that_only_administrators_open(
    member: Member, api_key: tuple[ApiKey, str]
) -> None:
    bob, _ = member("bob", "administrator")
    key, _ = api_key
    ApiKey.objects.filter(pk=key.pk).update(owner=bob)
    pull = Pull.objects.create(reference="owner/name", requested_by=bob)
    template = PromptTemplate.objects.create(project=key.project, name="greeting")
    template.versions.create(number=1, created_by=bob)
    _, browser = member("ada", "operator")
    for row in (key, pull, template):
        page = f"/admin/{row._meta.label_lower.replace('.', '/')}/{row.pk}/change/"
        text = browser.get(page).content.decode()
        assert "bob" in text, row
        assert f"/admin/auth/user/{bob.pk}/" not in text, row


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


def test_every_permission_is_of_a_role_or_is_left_to_administrators_on_purpose() -> None:
    left: dict[str, set[str]] = {}
    unnamed = Permission.objects.exclude(group__name__in=("viewer", "operator"))
    for permission in unnamed.select_related("content_type"):
        type_ = permission.content_type
        model = f"{type_.app_label}.{type_.model}"
        if not FOREIGN & {model, type_.app_label} or model in LEFT_TO_ADMINISTRATORS:
            action = permission.codename.removesuffix(f"_{type_.model}").removeprefix("view_")
            left.setdefault(model, set()).add(action)
    assert left == {model: set(of.split()) for model, of in LEFT_TO_ADMINISTRATORS.items()}


def test_roles_of_before_get_the_permissions_of_newer_apps_unless_they_were_changed() -> None:
    preset = Permission.objects.get(codename="delete_preset")
    migration = import_module("inference_site.console.people.migrations.0003_rights_of_presets")
    newer = Permission.objects.filter(content_type__app_label__in=("playground", "kept_content"))
    roles = {role.name: role for role in Group.objects.all()}
    for role in roles.values():
        role.permissions.remove(*newer)
    migration.give(apps, None)
    assert preset in roles["operator"].permissions.all()
    assert preset not in roles["viewer"].permissions.all()
    assert not newer.exclude(group=roles["administrator"]).exists()
    for role in roles.values():
        role.permissions.remove(*newer, Permission.objects.get(codename="delete_rule"))
    migration.give(apps, None)
    assert not newer.filter(group__isnull=False).exists()


@pytest.mark.parametrize(
    ("number", "codename"),
    [("0010_rights_of_own_keys", "make_own_key"), ("0011_rights_of_alarms", "change_alarm")],
)
def test_operators_of_before_get_a_new_permission_unless_their_role_was_changed(
    number: str, codename: str
) -> None:
    migration = import_module(f"inference_site.console.people.migrations.{number}")
    permission = Permission.objects.get(codename=codename)
    operator, viewer = (Group.objects.get(name=name) for name in ("operator", "viewer"))
    operator.permissions.remove(permission)
    migration.give(apps, None)
    assert permission in operator.permissions.all()
    assert permission not in viewer.permissions.all()
    operator.permissions.remove(permission, Permission.objects.get(codename="delete_rule"))
    migration.give(apps, None)
    assert permission not in operator.permissions.all()


def test_who_deletes_a_preset_that_another_shares(member: Member) -> None:
    owner, _ = member("bob", "viewer")
    for role, status in (("viewer", 404), ("operator", 200), ("administrator", 200)):
        preset = Preset.objects.create(
            user=owner, kind="tools", name=role, content="[]", is_shared=True
        )
        _, browser = member(f"ada-{role}", role)
        answer = browser.delete(f"/admin/playground/presets/{preset.pk}")
        assert answer.status_code == status, role


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


def test_a_role_is_shown_in_words_and_keeps_permissions_of_tables_without_a_page(
    member: Member,
) -> None:
    """The page has a row for each record; the list says what each role may do."""
    _, browser = member("ada", "administrator")
    operator = Group.objects.get(name="operator")
    hidden = Permission.objects.get(codename="view_session")
    operator.permissions.add(hidden)
    shown = browser.get("/admin/auth/group/").content.decode()
    assert "<b>See</b> API keys, Alarms" in shown
    assert "<b>See prompts and answers</b> Responses" in shown
    page = browser.get(f"/admin/auth/group/{operator.pk}/change/").content.decode()
    assert "<legend>API keys</legend>" in page
    assert page.index("<legend>Users</legend>") < page.index("Tables without a page of their own")
    assert "See sessions" in page
    kept = {"name": "operator", "permissions": [*operator.permissions.values_list("pk", flat=True)]}
    assert browser.post(f"/admin/auth/group/{operator.pk}/change/", kept).status_code == 302
    assert hidden in operator.permissions.all()


@pytest.mark.parametrize("kind", ["group", "user"])
def test_nobody_gives_a_permission_that_they_do_not_have(
    staff: Callable[..., Client], kind: str
) -> None:
    browser = staff("auth.view_group", "auth.add_group", "auth.view_user", "auth.change_user")
    own, foreign = (Permission.objects.get(codename=name) for name in ("view_group", "add_project"))
    bob = User.objects.create_user("bob", is_staff=True)
    if kind == "group":
        page, field, form = "/admin/auth/group/add/", "permissions", {"name": "new"}
    else:
        page, field = f"/admin/auth/user/{bob.pk}/change/", "user_permissions"
        form = change(bob)
    refused = browser.post(page, {**form, field: [own.pk, foreign.pk]})
    assert b"is not one of the available choices" in refused.content
    assert browser.post(page, {**form, field: [own.pk]}).status_code == 302
    of = Group.objects.get(name="new").permissions if kind == "group" else bob.user_permissions
    assert list(of.all()) == [own]
