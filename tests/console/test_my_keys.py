"""Users make keys of their own, within the limits of a project, and see nothing of others."""

from __future__ import annotations

import datetime as dt
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from django.contrib.auth.models import Group, Permission, User
from django.db import connection
from django.test import Client
from django.utils import timezone

from inference_site.accounts.keys import Limits, create_key, find_caller, revoke_key
from inference_site.accounts.models import ApiKey, Project
from inference_site.catalogue import catalogue
from inference_site.catalogue.models_file import Route, Target
from inference_site.console import key_forms, my_keys

pytestmark = [pytest.mark.django_db, pytest.mark.redis]
PAGE = "/admin/my-keys/"
SECRET = re.compile(r"sk-[A-Za-z0-9_-]{40,}")


@pytest.fixture
def maker(staff: Callable[..., Client], project: Project) -> Client:
    """A user who may make keys in the project."""
    browser = staff("accounts.make_own_key")
    project.members.add(User.objects.get())
    return browser


def form(project: Project, **fields: Any) -> dict[str, Any]:
    return {"project": project.pk, "name": "laptop", **fields}


def make(browser: Client, project: Project, **fields: Any) -> str:
    text = browser.post(PAGE, form(project, **fields)).content.decode()
    (secret,) = SECRET.findall(text)
    return str(secret)


def test_a_key_of_ones_own_only_infers_and_is_shown_once(maker: Client, project: Project) -> None:
    secret = make(maker, project, allowed_models=["demo"], requests_per_minute="5")
    caller = find_caller(secret)
    assert caller is not None
    assert (caller.project_id, [*caller.scopes]) == (project.pk, ["inference"])
    assert [*caller.allowed_models] == ["demo"]
    assert Limits("key", requests_per_minute=5) in caller.limits
    text = maker.get(PAGE).content.decode()
    assert secret not in text
    assert secret[:10] in text
    assert "/v1/chat/completions" in text
    assert 'base_url="http://testserver/v1"' in text
    assert "Works; last used" in text


def test_the_models_of_other_projects_are_not_shown(
    maker: Client, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = catalogue.demo_specs()[0]
    own = replace(demo, id="of-own", projects=("rivals", project.name))
    others = replace(demo, id="of-others", projects=("rivals",))
    routes = [
        Route(name, tuple(Target(spec, 2048, 1.0) for spec in specs))
        for name, specs in (("mixed", (own, others)), ("theirs", (others,)))
    ]
    known = catalogue.Catalogue([demo, own, others], routes=routes)
    monkeypatch.setattr(key_forms, "catalogue", lambda: known)
    text = maker.get(PAGE).content.decode()
    assert f"only for {project.name}<" in text
    assert "route to of-own<" in text
    for hidden in ("of-others", "rivals", "theirs"):
        assert hidden not in text
    assert "not one of the available" in str(
        maker.post(PAGE, form(project, allowed_models=["of-others"])).content
    )
    assert not ApiKey.objects.exists()


def test_a_limit_is_at_most_that_of_the_project_and_a_day_is_to_come(
    maker: Client, project: Project
) -> None:
    Project.objects.filter(pk=project.pk).update(tokens_per_minute=100)
    for wrong in (
        {"tokens_per_minute": "101"},
        {"tokens_per_minute": "0"},
        {"concurrent_runs": "9" * 30},
        {"expires_on": f"{timezone.now():%Y-%m-%d}"},
        {"expires_on": "9999-99-99"},
        {"name": ""},
        {"name": "\0"},
        {"allowed_models": ["no such"]},
        {"scopes": ["admin"], "name": ""},
    ):
        text = maker.post(PAGE, form(project, **wrong)).content.decode()
        assert 'class="reason"' in text, wrong
        for described in re.findall(r'aria-describedby="([^"]+)"', text):
            assert all(f'id="{one}"' in text for one in described.split()), wrong
    assert not ApiKey.objects.exists()
    day = timezone.now() + dt.timedelta(days=2)
    secret = make(maker, project, tokens_per_minute="100", expires_on=f"{day:%Y-%m-%d}")
    key = ApiKey.objects.get(prefix=secret[:10])
    assert key.expires_at == day.replace(hour=0, minute=0, second=0, microsecond=0)


def test_scopes_and_owners_are_not_taken_from_a_form(maker: Client, project: Project) -> None:
    make(maker, project, scopes=["admin", "models:write"], owner="999", user="1")
    key = ApiKey.objects.get()
    assert (key.scopes, key.owner, key.user) == (["inference"], User.objects.get(), None)


def test_a_project_of_others_and_an_inactive_one_are_no_choice(
    maker: Client, project: Project
) -> None:
    other = Project.objects.create(name="other")
    text = maker.post(PAGE, form(other)).content.decode()
    assert "not one of the available choices" in text
    Project.objects.filter(pk=project.pk).update(is_active=False)
    assert "No project lets you make keys." in maker.get(PAGE).content.decode()
    assert maker.post(PAGE, form(project)).status_code == 200
    assert not ApiKey.objects.exists()


def test_keys_of_others_are_neither_shown_nor_changed(
    maker: Client, project: Project, staff: Callable[..., Client]
) -> None:
    _, secret = create_key(project, "foreign-name")
    other = User.objects.create_user("other", is_staff=True)
    _, owned_secret = create_key(project, "owned-name", owner=other)
    text = maker.get(PAGE).content.decode()
    assert "foreign-name" not in text
    assert "owned-name" not in text
    for key in ApiKey.objects.all():
        for action in ("rotate", "revoke", "end-old"):
            assert maker.post(f"{PAGE}{key.pk}/{action}/").status_code == 404
    assert find_caller(secret) is not None
    assert find_caller(owned_secret) is not None


def test_the_buttons_rotate_end_and_revoke_ones_own_key(maker: Client, project: Project) -> None:
    old = make(maker, project)
    key = ApiKey.objects.get()
    (new,) = SECRET.findall(maker.post(f"{PAGE}{key.pk}/rotate/").content.decode())
    page = maker.get(PAGE).content.decode()
    assert "End the old one now" in page
    assert re.search(r"works until <time [^>]*>[-0-9: ]+ UTC</time></dt>", page)
    maker.post(f"{PAGE}{key.pk}/end-old/")
    assert (find_caller(old), find_caller(new) is None) == (None, False)
    assert maker.get(f"{PAGE}{key.pk}/revoke/").status_code == 405
    maker.post(f"{PAGE}{key.pk}/revoke/")
    assert find_caller(new) is None
    for action in ("rotate", "revoke", "end-old"):  # In another tab, whose page is older.
        text = maker.post(f"{PAGE}{key.pk}/{action}/", follow=True).content.decode()
        assert "Nothing was changed: the key has changed meanwhile." in text
        assert SECRET.findall(text) == []


def test_a_key_stops_with_its_user(maker: Client, project: Project) -> None:
    secret = make(maker, project)
    User.objects.update(is_active=False)
    assert find_caller(secret) is None
    User.objects.update(is_active=True)
    assert find_caller(secret) is not None


def test_a_user_has_a_bounded_number_of_keys(
    maker: Client, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(my_keys, "MAX_OWN_KEYS", 2)
    for _ in range(2):
        make(maker, project)
    assert "Revoke one first." in maker.post(PAGE, form(project)).content.decode()
    revoke_key(ApiKey.objects.all()[0])
    make(maker, project)


def test_keys_that_work_are_shown_before_those_that_were_revoked_last(
    maker: Client, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(my_keys, "_MAX_SHOWN", 3)
    user = User.objects.get()
    keys = [create_key(project, f"key-{number}", owner=user)[0] for number in range(5)]
    for number in (4, 1, 2):
        revoke_key(keys[number])
    text = maker.get(PAGE).content.decode()
    assert re.findall(r">(key-[0-9]) <span", text) == ["key-3", "key-0", "key-2"]


@pytest.mark.django_db(transaction=True)
def test_of_two_requests_at_one_moment_one_makes_the_last_key(
    maker: Client, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(my_keys, "MAX_OWN_KEYS", 1)

    def post() -> None:
        maker.post(PAGE, form(project))
        connection.close()

    threads = [threading.Thread(target=post) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ApiKey.objects.count() == 1


def test_read_only_roles_make_no_keys() -> None:
    holders = Group.objects.filter(permissions__codename="make_own_key")
    assert {role.name for role in holders} == {"operator", "administrator"}
    assert Permission.objects.filter(codename="make_own_key").count() == 1
