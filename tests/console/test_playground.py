"""Who may use the playground, and to whom it is accounted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.contrib.auth import get_user_model
from django.test import Client

from inference_site.accounts.keys import revoke_key
from inference_site.accounts.models import ApiKey, KeySecret
from inference_site.console.playground import playground_caller


@pytest.mark.django_db
def test_a_user_has_one_key_of_the_playground_that_no_secret_opens() -> None:
    users = get_user_model().objects
    alice, bob = (users.create_user(name, is_staff=True) for name in ("alice", "bob"))
    callers = [playground_caller(user) for user in (alice, alice, bob)]
    first, again, other = callers
    assert first is not None
    assert other is not None
    assert first == again
    assert first.project_id == other.project_id
    assert first.api_key_id != other.api_key_id
    assert first.project_name == "playground"
    assert first.disconnect_grace_s == 0
    assert [key.name for key in ApiKey.objects.order_by("pk")] == ["alice", "bob"]
    assert not KeySecret.objects.exists()


@pytest.mark.django_db
def test_a_revoked_key_closes_the_playground_to_its_user() -> None:
    alice = get_user_model().objects.create_user("alice", is_staff=True)
    assert playground_caller(alice) is not None
    revoke_key(ApiKey.objects.get())
    assert playground_caller(alice) is None
    assert ApiKey.objects.count() == 1


def test_the_page_is_for_the_staff(staff: Callable[..., Client]) -> None:
    assert staff().get("/playground").status_code == 200
    assert Client().get("/playground")["Location"] == "/admin/login/?next=/playground"
    customer = get_user_model().objects.create_user("customer")
    browser = Client()
    browser.force_login(customer)
    assert browser.get("/playground").status_code == 302


def test_the_page_runs_no_script_but_its_own_files(staff: Callable[..., Client]) -> None:
    policy = staff().get("/playground")["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in f"{policy};"
    assert "unsafe" not in policy
