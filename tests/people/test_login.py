"""Logging in to the admin: where a client is, and what is written down of a failure."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

import pytest
from axes.models import AccessFailureLog
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client, RequestFactory

from inference_site.console.people.login import LOGINS_PER_ADDRESS
from inference_site.console.people.login_log import client_address
from inference_site.core.storage.redis import site_client

PROXIES = [ipaddress.ip_network(one) for one in ("10.0.0.0/8", "::1/128")]


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("192.0.2.1", "", "192.0.2.1"),
        ("192.0.2.1", "198.51.100.7", "192.0.2.1"),  # No proxy: the client wrote this itself.
        ("10.0.0.1", "198.51.100.7", "198.51.100.7"),
        ("10.0.0.1", "203.0.113.9, 198.51.100.7", "198.51.100.7"),
        ("10.0.0.1", "203.0.113.9, 198.51.100.7 , 10.2.0.1", "198.51.100.7"),
        ("::1", "10.2.0.1", "10.2.0.1"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "unknown", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.7, ,", "10.0.0.1"),
        ("::ffff:10.0.0.1", "198.51.100.7", "198.51.100.7"),
        ("2001:db8:1:2:3:4:5:6", "", "2001:db8:1:2::"),
        ("10.0.0.1", "2001:db8:1:2:ffff::1", "2001:db8:1:2::"),
        ("fe80::1%eth0", "", "fe80::"),
        ("", "198.51.100.7", None),
    ],
)
def test_a_client_is_where_the_last_trusted_proxy_says(
    settings: Any, peer: str, forwarded: str, address: str | None
) -> None:
    settings.TRUSTED_PROXIES = PROXIES
    headers = {"X-Forwarded-For": forwarded} if forwarded else {}
    request = RequestFactory().get("/", headers=headers, REMOTE_ADDR=peer)
    assert client_address(request) == address


def test_an_odd_name_is_one_line_of_the_log(
    admin: Client, caplog: pytest.LogCaptureFixture
) -> None:
    form = {"username": "a\n\u2028ERROR all is lost", "password": "a secret"}
    agent = {"user-agent": "x\0" * 5_000, "accept": "\0"}
    assert Client().post("/admin/login/", form, headers=agent).status_code == 200
    failure = AccessFailureLog.objects.get()
    assert (failure.ip_address, failure.locked_out) == ("127.0.0.1", False)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("axes")]
    assert messages
    assert all(len(message.splitlines()) == 1 for message in messages)
    assert "a secret" not in caplog.text
    assert admin.get("/admin/axes/accessfailurelog/").status_code == 200


@pytest.mark.django_db
def test_an_address_has_so_many_logins_a_minute_whatever_the_names() -> None:
    here, elsewhere = Client(REMOTE_ADDR="192.0.2.1"), Client(REMOTE_ADDR="192.0.2.2")
    for _ in range(29):
        assert LOGINS_PER_ADDRESS.seconds_to_wait("192.0.2.1") == 0
    form = {"username": "a", "password": "wrong"}
    answers = [here.post("/admin/login/", {**form, "username": f"{name}"}) for name in range(3)]
    assert [answer.status_code for answer in answers] == [200, 429, 429]
    assert AccessFailureLog.objects.count() == 1  # No other password was looked at.
    assert elsewhere.post("/admin/login/", form).status_code == 200
    assert 0 < int(answers[1]["Retry-After"]) <= 60


@pytest.mark.django_db
def test_the_first_login_asks_for_a_password_of_ones_own() -> None:
    User.objects.create_superuser("first", password="one that was printed")
    form = {"username": "first", "password": "one that was printed"}
    browser = Client()
    answer = browser.post("/admin/login/?next=/admin/queue/", form)
    assert (answer.status_code, answer["Location"]) == (302, "/admin/password_change/")
    assert "known_browser" in answer.cookies
    assert "Choose a password of your own" in browser.get(answer["Location"]).text
    assert browser.get("/admin/").status_code == 200  # It asks and does not force.
    again = Client().post("/admin/login/", {**form, "next": "/admin/queue/"})
    assert again["Location"] == "/admin/queue/"


FORM = {"username": "ada", "password": "a right password"}
WRONG = {"username": "ada", "password": "wrong"}


def log_in(browser: Client, form: dict[str, str], address: str = "192.0.2.1") -> Any:
    return browser.post("/admin/login/", form, REMOTE_ADDR=address)


def test_a_locked_login_says_until_when(member: Any) -> None:
    member("ada", "viewer")
    answers = [log_in(Client(), WRONG) for _ in range(10)]
    assert [answer.status_code for answer in answers] == [200] * 9 + [429]
    assert 0 < int(answers[-1]["Retry-After"]) <= 900
    refused = log_in(Client(), FORM)
    assert refused.status_code == 429
    assert re.search(rb"Try again in 1?\d min|Try again in \d+ s", refused.content)
    assert log_in(Client(), FORM, "192.0.2.2").status_code == 302  # The colleague comes in.


def test_a_name_that_many_addresses_try_is_open_to_browsers_that_know_its_user(
    member: Any,
) -> None:
    member("ada", "viewer")
    known = Client()
    assert log_in(known, FORM).status_code == 302
    known.post("/admin/logout/")
    assert log_in(Client(), WRONG).status_code == 200
    (name,) = site_client().scan_iter("limit:*/logins-of/*")
    site_client().set(name, 50, ex=600)
    refused = log_in(Client(), FORM, "192.0.2.3")
    assert refused.status_code == 429
    assert 0 < int(refused["Retry-After"]) <= 600
    assert b"a browser in which you have logged in before" in refused.content
    other = log_in(known, {**FORM, "username": "eve"}, "192.0.2.4")
    assert other.status_code == 200  # Names have counts of their own; a cookie is of one user.
    assert log_in(known, FORM, "192.0.2.5").status_code == 302
    assert log_in(Client(), WRONG, "192.0.2.6").status_code == 200  # Counted anew since.


def test_a_cookie_that_the_site_has_not_signed_is_of_no_use(member: Any) -> None:
    member("ada", "viewer")
    known = Client()
    log_in(known, FORM)
    value = known.cookies["known_browser"].value
    log_in(Client(), WRONG)
    (name,) = site_client().scan_iter("limit:*/logins-of/*")
    site_client().set(name, 50, ex=600)
    for forged in (value[:-2] + "xx", value.partition(":")[0], "\0", "é" * 5_000):
        browser = Client()
        browser.cookies["known_browser"] = forged
        assert log_in(browser, FORM).status_code == 429


def test_the_audit_log_has_logins_failures_and_logouts(admin: Client, member: Any) -> None:
    ada, _ = member("ada", "viewer")
    browser = Client()
    log_in(browser, WRONG)
    log_in(browser, {"username": "nobody", "password": "a secret"})
    log_in(browser, FORM)
    browser.post("/admin/logout/", REMOTE_ADDR="192.0.2.1")
    entries = LogEntry.objects.order_by("pk").values_list("user", "action_flag", "change_message")
    assert list(entries) == [
        (ada.pk, 5, "From 192.0.2.1: wrong password."),
        (ada.pk, 4, "By password, from 192.0.2.1."),
        (ada.pk, 6, "From 192.0.2.1."),
    ]
    text = admin.get("/admin/admin/logentry/").content.decode()
    assert all(word in text for word in ("Failed login", "Login", "Logout", "192.0.2.1"))
    only = admin.get("/admin/admin/logentry/", {"done": "5"}).content.decode()
    assert "wrong password" in only
    assert "By password" not in only
    assert admin.get("/admin/admin/logentry/", {"done": "9" * 30}).status_code == 200


def test_who_changes_the_own_password_is_in_the_audit_log(member: Any) -> None:
    ada, browser = member("ada", "viewer")
    new = {"new_password1": "correct horse 7", "new_password2": "correct horse 7"}
    answer = browser.post("/admin/password_change/", {"old_password": FORM["password"], **new})
    assert answer.status_code == 302
    assert LogEntry.objects.get(user=ada).change_message == "Changed the own password."
