"""Who saves a page that is older than what is stored is told so, and takes nothing back."""

from __future__ import annotations

from collections.abc import Callable
from html import unescape
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.db.models import Model
from django.test import Client

from inference_site.accounts.models import ApiKey, Budget, Project
from inference_site.catalogue.model_store.models import StoredModel
from inference_site.console.alarms.models import Rule
from inference_site.core.site_settings.models import SiteSettings
from inference_site.mcp.models import McpServer
from inference_site.outbox.models import Endpoint

pytestmark = [pytest.mark.django_db, pytest.mark.redis]
TOLD = "This was changed meanwhile"
REASON = f"{TOLD} by ben at "


@pytest.fixture
def ada() -> Client:
    return _browser_of("ada")


@pytest.fixture
def ben() -> Client:
    return _browser_of("ben")


def _browser_of(name: str) -> Client:
    browser = Client()
    browser.force_login(get_user_model().objects.create_superuser(name, f"{name}@example.org"))
    return browser


def filled(page: Any) -> dict[str, Any]:
    """The form of a page as a browser sends it."""
    inline = [one.formset for one in page.context.get("inline_admin_formsets", ())]
    form = page.context["adminform"].form if "adminform" in page.context else page.context["form"]
    forms = [form, *(one.management_form for one in inline), *(f for one in inline for f in one)]
    values = {
        field.html_name: field.value() for one in forms for field in one if not field.field.disabled
    }
    states: dict[str, str] = page.context["shown_states"]
    for name, state in states.items():
        assert f'<input type="hidden" name="{name}" value="{state}">' in page.content.decode()
    kept = {name: given for name, given in values.items() if given is not None}
    return {name: given for name, given in kept.items() if given is not False} | states


def text_of(page: Any) -> str:
    return unescape(page.content.decode())


def _project(project: Project, _: ApiKey) -> Model:
    return project


ROWS: dict[str, tuple[Callable[[Project, ApiKey], Model], str, object]] = {
    "accounts/project": (_project, "requests_per_minute", 7),
    "accounts/apikey": (lambda _, key: key, "name", "renamed"),
    "accounts/budget": (
        lambda project, _: Budget.objects.create(
            project=project, unit="cost", every="month", amount=5
        ),
        *("amount", "6"),
    ),
    "alarms/rule": (lambda *_: Rule.objects.create(kind="queue_wait", bound=3), "bound", 4.0),
    "outbox/endpoint": (
        lambda *_: Endpoint.objects.create(way="email", address="a@example.org"),
        *("address", "b@example.org"),
    ),
    "mcp_servers/mcpserver": (
        lambda *_: McpServer.objects.create(label="tools", url="https://mcp.example.org/"),
        *("description", "changed"),
    ),
    "model_store/storedmodel": (
        lambda *_: StoredModel.objects.create(model_id="own", entry={"engine": "scripted"}),
        *("slots", 3),
    ),
    "auth/group": (lambda *_: Group.objects.get(name="viewer"), "name", "reader"),
    "auth/user": (
        lambda *_: get_user_model().objects.create_user("cid", is_staff=True),
        *("first_name", "Cid"),
    ),
}
"""By model: a row, a field of its form, and another value."""


@pytest.mark.parametrize("model", ROWS)
def test_the_form_of_a_page_that_is_older_than_the_row_is_refused(
    ada: Client, ben: Client, api_key: tuple[ApiKey, str], model: str
) -> None:
    make, field, value = ROWS[model]
    address = f"/admin/{model}/{make(api_key[0].project, api_key[0]).pk}/change/"
    opened = filled(ada.get(address))
    assert ben.post(address, filled(ben.get(address)) | {field: value}).status_code == 302
    for _ in range(2):  # Sending it again changes nothing.
        refused = ada.post(address, opened)
        assert REASON in text_of(refused)
        opened = filled(refused)
    newer = filled(ada.get(address))
    assert newer[field] == value
    assert ada.post(address, newer).status_code == 302


def test_a_budget_that_was_changed_meanwhile_is_not_taken_back_by_the_page_of_its_project(
    ada: Client, ben: Client, project: Project
) -> None:
    budget = Budget.objects.create(project=project, unit="cost", every="month", amount=5)
    address = f"/admin/accounts/project/{project.pk}/change/"
    opened = filled(ada.get(address))
    changes = {"budgets-0-amount": "6"}
    assert ben.post(address, filled(ben.get(address)) | changes).status_code == 302
    assert REASON in text_of(ada.post(address, opened | {"budgets-0-every": "day"}))
    budget.refresh_from_db()
    assert budget.amount == 6
    assert budget.every == "month"
    Budget.objects.filter(pk=budget.pk).update(amount=7)  # By no form.
    opened = filled(ada.get(address))
    Budget.objects.filter(pk=budget.pk).update(amount=8)
    assert f"{TOLD}. Open the page again" in text_of(ada.post(address, opened))


def test_settings_that_were_changed_meanwhile_are_not_taken_back(ada: Client, ben: Client) -> None:
    address = "/admin/settings/"
    opened = filled(ada.get(address))
    changes = {"responses_days": "30", "usage_tags": "team"}
    assert ben.post(address, filled(ben.get(address)) | changes).status_code == 302
    assert REASON in text_of(ada.post(address, opened | {"files_days": "5"}))
    stored = SiteSettings.objects.get()
    assert (stored.responses_days, stored.files_days) == (30, None)
    newer = filled(ada.get(address)) | {"files_days": "5", "usage_tags": "team"}
    assert ada.post(address, newer).status_code == 302
    stored.refresh_from_db()
    assert (stored.responses_days, stored.files_days) == (30, 5)


@pytest.mark.parametrize("action", ["test", "rotate", "delete_selected"])
def test_an_action_on_what_was_deleted_meanwhile_says_that_nothing_was_done(
    ada: Client, action: str
) -> None:
    """It said that a test was on its way, and showed a page of secrets without any."""
    gone = Endpoint.objects.create(way="email", address="a@example.org")
    form = {"action": action, "index": "0", "_selected_action": [gone.pk]}
    gone.delete()
    text = text_of(ada.post("/admin/outbox/endpoint/", form, follow=True))
    assert "Nothing was done: what was chosen is not in the list any more." in text
    assert "on its way" not in text


def test_a_form_with_an_error_is_sent_again_when_it_is_corrected(
    ada: Client, project: Project
) -> None:
    address = f"/admin/accounts/project/{project.pk}/change/"
    wrong = ada.post(address, filled(ada.get(address)) | {"requests_per_minute": "-1"})
    assert TOLD not in text_of(wrong)
    assert ada.post(address, filled(wrong) | {"requests_per_minute": "1"}).status_code == 302


@pytest.mark.parametrize("state", ["", "x", "-", "9" * 30 + "-x", "²-x", "-1-x"])
def test_a_state_that_no_page_has_is_no_error_of_the_server(
    ada: Client, project: Project, state: str
) -> None:
    address = f"/admin/accounts/project/{project.pk}/change/"
    answer = ada.post(address, filled(ada.get(address)) | {"shown": state})
    assert answer.status_code in (200, 302)
