"""Presets of the playground: whose they are, who sees them, and how many there may be."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.test import Client

from inference_site.console.playground import views
from inference_site.console.playground.models import Preset

ADDRESS = "/admin/playground/presets"
BRIEF = {"kind": "instructions", "name": "Brief", "content": "Answer in one line."}


def browser_of(name: str) -> Client:
    browser = Client()
    browser.force_login(get_user_model().objects.create_user(name, is_staff=True))
    return browser


def save(browser: Client, **fields: Any) -> Any:
    return browser.post(ADDRESS, {**BRIEF, **fields}, content_type="application/json")


def names(browser: Client) -> list[str]:
    return [preset["name"] for preset in browser.get(ADDRESS).json()["data"]]


pytestmark = pytest.mark.django_db


def test_a_preset_is_of_its_user_until_it_is_shared() -> None:
    alice, bob = browser_of("alice"), browser_of("bob")
    assert save(alice).status_code == 200
    assert names(alice) == ["Brief"]
    assert names(bob) == []
    assert save(alice, is_shared=True, content="Be brief.").status_code == 200
    (seen,) = bob.get(ADDRESS).json()["data"]
    assert (seen["owner"], seen["may_delete"]) == ("alice", False)
    assert bob.get(f"{ADDRESS}/{seen['id']}").json()["content"] == "Be brief."
    assert save(alice).status_code == 200  # Shared no more.
    assert bob.get(f"{ADDRESS}/{seen['id']}").status_code == 404


def test_presets_of_two_users_may_have_one_name() -> None:
    alice, bob = browser_of("alice"), browser_of("bob")
    for browser in (alice, bob):
        assert save(browser, is_shared=True).status_code == 200
    assert names(alice) == ["Brief", "Brief"]
    assert save(alice, kind="tools", content="[]").status_code == 200
    assert Preset.objects.count() == 3


def test_only_its_owner_deletes_a_preset_and_who_may_delete_any_a_shared_one() -> None:
    alice, bob = browser_of("alice"), browser_of("bob")
    own, shared = save(alice).json(), save(alice, name="Other", is_shared=True).json()
    for preset in (own, shared):
        assert bob.delete(f"{ADDRESS}/{preset['id']}").status_code == 404
    permission = Permission.objects.get(codename="delete_preset")
    get_user_model().objects.get(username="bob").user_permissions.add(permission)
    assert bob.delete(f"{ADDRESS}/{own['id']}").status_code == 404
    assert bob.delete(f"{ADDRESS}/{shared['id']}").status_code == 200
    assert alice.delete(f"{ADDRESS}/{own['id']}").json() == {"id": own["id"], "deleted": True}
    assert not Preset.objects.exists()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"kind": "secret"}, "kind"),
        ({"name": ""}, "name"),
        ({"name": "x" * 61}, "name"),
        ({"name": "a\0b"}, "name"),
        ({"content": ""}, "content"),
        ({"content": "x" * 50_001}, "content"),
        ({"is_shared": "yes"}, "is_shared"),
    ],
)
def test_a_bad_preset_is_refused_with_the_name_of_its_field(
    fields: dict[str, Any], param: str
) -> None:
    refused = save(browser_of("alice"), **fields)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


def test_a_user_has_a_bounded_number_of_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "MAX_PRESETS", 2)
    alice = browser_of("alice")
    for name in ("one", "two", "two"):
        assert save(alice, name=name).status_code == 200
    refused = save(alice, name="three")
    assert refused.status_code == 409
    assert "delete one first" in refused.json()["error"]["message"]
    assert names(alice) == ["one", "two"]
