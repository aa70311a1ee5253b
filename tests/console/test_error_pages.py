"""The pages for 403, 404 and an expired form, and the login without an address to go on to."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import unquote, urlencode

import pytest
from django.contrib.auth import get_user_model
from django.template.loader import render_to_string
from django.test import Client
from django.utils import timezone

from inference_site.accounts.models import Project


def test_a_page_that_there_is_not_is_a_page_of_the_console(admin: Client) -> None:
    for address in ("/admin/nothing/", "/admin/fleet/models/none/"):
        answer = admin.get(address)
        text = answer.content.decode()
        assert answer.status_code == 404, address
        assert "Page not found" in text
        assert "Models and workers" in text, "the menu is there"


def test_a_page_without_permission_is_a_page_of_the_console(staff: Callable[..., Client]) -> None:
    answer = staff().get("/admin/fleet/")
    assert answer.status_code == 403
    assert "An administrator can give it" in answer.content.decode()


@pytest.mark.django_db
def test_a_form_that_has_expired_says_so() -> None:
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(get_user_model().objects.create_superuser("admin", ""))
    answer = browser.post("/admin/fleet/action/", {"action": "load"})
    assert answer.status_code == 403
    assert "The form has expired" in answer.content.decode()


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("referer", "page"),
    [
        ("http://testserver/admin/queue/?model=demo", "/admin/queue/?model=demo"),
        ("http://elsewhere.example/admin/queue/", "/admin/"),
        ("", "/admin/"),
    ],
)
def test_a_form_that_is_sent_after_the_session_has_ended_leads_back_to_its_page(
    referer: str, page: str
) -> None:
    """The address that it is sent to answers no GET: after the login it would be an empty page."""
    form = {"action": "stop", "chosen": "1"}
    answer = Client().post("/admin/queue/stop/", form, headers={"referer": referer}, follow=True)
    login = f"/admin/login/?{urlencode({'next': page})}"
    assert unquote(answer.redirect_chain[0][0]) == unquote(login)
    assert "nothing was done" in answer.content.decode()


def test_a_request_under_another_name_is_told_of_the_setting() -> None:
    answer = Client().get("/admin/", headers={"host": "evil.example"})
    assert answer.status_code == 400
    assert "ALLOWED_HOSTS" in answer.content.decode()
    assert "console/plain.css" in answer.content.decode()


@pytest.mark.django_db
@pytest.mark.parametrize("is_staff", [False, True])
def test_a_form_of_an_address_that_the_site_does_not_know_is_told_of_the_setting(
    is_staff: bool,
) -> None:
    browser = Client(enforce_csrf_checks=True)
    if is_staff:
        browser.force_login(get_user_model().objects.create_superuser("admin", ""))
    form = {"username": "admin", "password": "x"}
    answer = browser.post("/admin/login/", form, headers={"origin": "https://ai.example.org"})
    assert answer.status_code == 403
    assert "CSRF_TRUSTED_ORIGINS" in answer.content.decode()


@pytest.mark.parametrize("name", ["400", "403", "403_csrf", "403_origin", "404", "500"])
def test_error_pages_need_nothing_but_their_template(name: str) -> None:
    text = render_to_string(f"{name}.html")
    assert '<html lang="en">' in text
    assert 'href="/admin/"' in text


def test_what_nobody_has_changed_says_so(admin: Client, project: Project) -> None:
    answer = admin.get(f"/admin/accounts/project/{project.pk}/history/")
    assert "Nobody has changed this in the console." in answer.content.decode()


@pytest.mark.django_db
def test_a_failed_login_is_told_once() -> None:
    form = {"username": "nobody", "password": "wrong"}
    answer = Client().post("/admin/login/", form, headers={"user-agent": "x"})
    assert answer.content.decode().count("errornote") == 1


@pytest.mark.django_db
def test_strangers_are_shown_nothing_of_the_console() -> None:
    answer = Client().get("/nothing")
    assert answer.status_code == 404
    assert "Models and workers" not in answer.content.decode()


@pytest.mark.django_db
@pytest.mark.parametrize("method", ["get", "post"])
def test_a_client_that_leaves_out_v1_is_told_where_the_api_is(method: str) -> None:
    browser = Client(enforce_csrf_checks=True)
    answer = getattr(browser, method)("/chat/completions", headers={"accept": "application/json"})
    assert answer.status_code == 404
    told = f"Invalid URL ({method.upper()} /chat/completions). The API is below /v1."
    assert answer.json()["error"]["message"] == told


@pytest.mark.django_db
def test_a_login_without_an_address_goes_to_the_console() -> None:
    get_user_model().objects.create_superuser(
        "admin", "", "a long password", last_login=timezone.now()
    )
    form = {"username": "admin", "password": "a long password"}
    answer = Client().post("/admin/login/", form, headers={"user-agent": "x"})
    assert (answer.status_code, answer.get("Location")) == (302, "/admin/")
