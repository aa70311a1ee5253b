"""Who may use the playground, and to whom it is accounted."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
import redis.exceptions
from django.contrib.auth import get_user_model
from django.test import Client

from inference_site.accounts.keys import create_key, revoke_key
from inference_site.accounts.models import ApiKey, KeySecret, Project
from inference_site.catalogue import catalogue
from inference_site.catalogue.models_file import Route, Target
from inference_site.console import fleet_page
from inference_site.console.playground import views
from inference_site.console.playground.views import playground_caller
from inference_site.runs.models import Generation, Status
from tests.responses_api.chains import Chain

PAGE = "/admin/playground/"
ADDRESS = "/console/playground/responses"


def key_of(name: str) -> ApiKey:
    """The key of a new member of the staff."""
    user = get_user_model().objects.create_user(name, is_staff=True)
    caller = playground_caller(user)
    assert caller is not None
    return ApiKey.objects.get(pk=caller.api_key_id)


def browser_of(key: ApiKey) -> Client:
    browser = Client()
    assert key.user is not None
    browser.force_login(key.user)
    return browser


def ask(browser: Client, **body: Any) -> Any:
    body = {"model": "demo", "input": "hi", **body}
    return browser.post(ADDRESS, body, content_type="application/json")


@pytest.mark.django_db
def test_a_user_has_one_playground_key_without_a_secret() -> None:
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


@pytest.mark.django_db
def test_a_tenant_named_playground_is_not_used_by_the_playground() -> None:
    tenant = Project.objects.create(name="playground")
    create_key(tenant, "alice")
    key = key_of("alice")
    assert key.project != tenant
    assert key.project.name == "playground-2"
    assert key_of("bob").project == key.project


@pytest.mark.django_db
def test_a_new_user_with_a_former_name_gets_another_key() -> None:
    first = key_of("alice")
    get_user_model().objects.all().delete()
    assert key_of("alice").pk != first.pk


def test_a_playground_key_is_not_rotated(admin: Client) -> None:
    key = key_of("alice")
    chosen = {"action": "rotate", "_selected_action": [key.pk]}
    text = admin.post("/admin/accounts/apikey/", chosen, follow=True).content.decode()
    assert "Playground keys have no secret" in text
    assert not KeySecret.objects.exists()


@pytest.mark.django_db
def test_only_own_responses_can_be_continued() -> None:
    alice, bob = key_of("alice"), key_of("bob")
    answer = Chain(alice).turn("a secret")
    refused = ask(browser_of(bob), previous_response_id=answer.public_id)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "previous_response_not_found"
    own = ask(browser_of(alice), previous_response_id=answer.public_id)
    assert own.json()["error"]["code"] == "no_worker"


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": [{"id": "msg_1"}]}, "input"),
        ({"previous_response_id": 1}, "previous_response_id"),
    ],
)
def test_conversations_and_item_references_are_refused(body: dict[str, Any], param: str) -> None:
    refused = ask(browser_of(key_of("alice")), **body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


@pytest.mark.django_db
def test_only_own_responses_can_be_stopped() -> None:
    alice, bob = key_of("alice"), key_of("bob")
    waiting = Chain(alice).accept("a")
    stop = f"{ADDRESS}/{waiting.public_id}/stop"
    assert browser_of(bob).post(stop).status_code == 404
    assert Generation.objects.get().status == Status.QUEUED
    assert browser_of(alice).post(stop).json() == {"stopped": True}
    assert Generation.objects.get().status == Status.CANCELLED


@pytest.mark.django_db
def test_the_page_lists_the_models_that_the_key_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    demo = catalogue.demo_specs()[0]
    others = dataclasses.replace(demo, id="of-others", projects=("other",))
    second = dataclasses.replace(demo, id="second")
    specs = catalogue.Catalogue([demo, second, others])
    monkeypatch.setattr(views, "catalogue", lambda: specs)
    key = key_of("alice")
    text = browser_of(key).get(PAGE).content.decode()
    assert '<option value="demo">' in text
    assert '<option value="second">' in text
    assert "of-others" not in text
    ApiKey.objects.update(allowed_models=["second"])
    text = browser_of(key).get(PAGE).content.decode()
    assert '<option value="demo">' not in text
    assert '<option value="second">' in text


@pytest.mark.django_db
def test_routes_are_shown_and_can_be_chosen(
    staff: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = catalogue.demo_specs()[0]
    route = Route("chat", (Target(demo, 2048, 80.0),), (Target(demo, 2048),), 10.0)
    specs = catalogue.Catalogue([demo], routes=[route])
    monkeypatch.setattr(views, "catalogue", lambda: specs)
    monkeypatch.setattr(fleet_page, "catalogue", lambda: specs)
    text = browser_of(key_of("alice")).get(PAGE).content.decode()
    assert '<option value="chat">chat (route)</option>' in text
    shown = staff("generations.view_generation").get("/admin/fleet/").content.decode()
    assert '<th scope="row">chat</th>' in shown
    assert "demo</a> weight 80" in shown


def test_the_page_says_why_no_model_can_answer(
    staff: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise redis.exceptions.ConnectionError

    with monkeypatch.context() as patch:
        patch.setattr(views, "live_workers", fail)
        response = (browser := staff()).get(PAGE)
    assert response.status_code == 200
    assert "Redis is not reachable" in response.content.decode()
    revoke_key(ApiKey.objects.get())
    response = browser.get(PAGE)
    assert response.status_code == 200
    assert "was revoked" in response.content.decode()


def test_the_page_is_for_staff_only(staff: Callable[..., Client]) -> None:
    assert staff().get(PAGE).status_code == 200
    assert Client().get(PAGE)["Location"] == f"/admin/login/?next={PAGE}"
    customer = get_user_model().objects.create_user("customer")
    browser = Client()
    browser.force_login(customer)
    assert browser.get(PAGE).status_code == 302


def test_the_short_address_leads_to_the_page(staff: Callable[..., Client]) -> None:
    assert staff().get("/playground?open=resp_1")["Location"] == f"{PAGE}?open=resp_1"


def test_the_page_runs_no_script_but_files_of_the_site(staff: Callable[..., Client]) -> None:
    answer = staff().get(PAGE)
    (scripts,) = re.findall(r"script-src ([^;]*)", answer["Content-Security-Policy"])
    assert scripts == "'self' 'unsafe-eval'"  # As on all pages of the admin.


@pytest.mark.django_db
def test_only_own_responses_can_be_read_with_what_they_took() -> None:
    alice, bob = key_of("alice"), key_of("bob")
    answer = Chain(alice).turn("a secret", "an answer")
    address = f"{PAGE}responses/{answer.public_id}"
    assert browser_of(bob).get(address).status_code == 404
    found = browser_of(alice).get(address).json()
    assert found["response"]["output"][0]["content"][0]["text"] == "an answer"
    assert found["run"]["cost"] == "no price set"
    Generation.objects.update(cost=Decimal("0.25"))
    assert browser_of(alice).get(address).json()["run"]["cost"] == "0.25 USD"


def test_logging_out_has_the_browser_forget_the_conversations(admin: Client) -> None:
    page = admin.post("/admin/logout/").content.decode()
    assert "playground/forget.js" in page
    assert "You are logged out" in page
    assert "quality time" not in page


def test_the_page_says_whose_conversations_it_may_show(admin: Client) -> None:
    user = get_user_model().objects.get()
    assert f'data-user="{user.pk}"' in admin.get(PAGE).content.decode()
