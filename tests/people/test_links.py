"""Invitations and resets: links that set a password once."""

from __future__ import annotations

import datetime as dt
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Group, User
from django.db import connections
from django.test import Client, RequestFactory

from inference_site.console.people.password_links import INVITATION, RESET, LinkTokens, make_link
from tests.people.conftest import Mailbox
from tests.waiting import wait_until

Member = Callable[..., tuple[User, Client]]
NEW = {"new_password1": "correct horse 7", "new_password2": "correct horse 7"}


def link_in(text: str) -> str:
    """The path of the link that a page or a mail has."""
    found = re.search(r"http://testserver(/admin/(?:invitation|reset)/[^\s<\"]+)", text)
    assert found, text
    return found.group(1)


def invite(browser: Client, name: str = "grace", email: str = "") -> str:
    """Invite a viewer; return the path of the link."""
    form = {"username": name, "email": email, "groups": [Group.objects.get(name="viewer").pk]}
    page = browser.post("/admin/auth/user/add/", form, follow=True)
    return link_in(page.content.decode())


def use(browser: Client, link: str) -> Any:
    """Open a link and set the password."""
    opened = browser.get(link)
    return browser.post(opened["Location"], NEW) if opened.status_code == 302 else opened


def test_a_colleague_is_invited_with_a_link_that_works_once(admin: Client) -> None:
    link = invite(admin)
    grace = User.objects.get(username="grace")
    assert (grace.is_staff, grace.is_superuser, grace.has_usable_password()) == (True, False, False)
    browser = Client()
    shown = browser.get(link, follow=True)
    assert b"grace" in shown.content
    assert link.encode() not in shown.content
    assert use(browser, link)["Location"] == "/admin/"
    assert browser.get("/admin/queue/").status_code == 200
    assert b"This link does not work" in use(Client(), link).content
    entry = LogEntry.objects.filter(user=grace).latest("pk")
    assert entry.change_message == "By password, from 127.0.0.1."
    assert LogEntry.objects.filter(
        user=grace, change_message="Set a password with a link (invitation)."
    ).exists()
    assert "invitation/" not in str(LogEntry.objects.values_list("change_message"))


def test_a_newer_invitation_ends_the_older(admin: Client) -> None:
    first = invite(admin)
    again = {"action": "make_links", "_selected_action": [User.objects.get(username="grace").pk]}
    second = link_in(admin.post("/admin/auth/user/", again, follow=True).content.decode())
    assert second.startswith("/admin/invitation/")
    assert b"This link does not work" in use(Client(), first).content
    assert use(Client(), second)["Location"] == "/admin/"


def test_an_administrator_makes_a_link_for_who_has_forgotten_the_password(
    admin: Client, member: Member
) -> None:
    ada, browser = member("ada", "viewer")
    again = {"action": "make_links", "_selected_action": [ada.pk]}
    link = link_in(admin.post("/admin/auth/user/", again, follow=True).content.decode())
    assert link.startswith("/admin/reset/")
    assert browser.get("/admin/").status_code == 200  # Until the link is used all is as before.
    assert use(Client(), link)["Location"] == "/admin/"
    assert browser.get("/admin/").status_code == 302  # The new password ends other sessions.
    assert b"This link does not work" in use(Client(), link).content


@pytest.mark.parametrize("kind", [INVITATION, RESET])
def test_a_link_ends_after_its_lifetime_and_is_of_one_kind(
    member: Member, kind: LinkTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada, _ = member("ada")
    token = kind.make_token(ada)
    other = RESET if kind is INVITATION else INVITATION
    assert kind.check_token(ada, token)
    assert not other.check_token(ada, token)
    for age, is_good in ((kind.lifetime, True), (kind.lifetime + dt.timedelta(seconds=2), False)):
        monkeypatch.setattr(kind, "_now", lambda age=age: dt.datetime.now() + age)  # noqa: DTZ005
        assert kind.check_token(ada, token) is is_good


def test_a_changed_link_and_one_of_somebody_deactivated_do_nothing(admin: Client) -> None:
    link = invite(admin)
    for wrong in (link[:-3] + "aa/", link.replace("/invitation/", "/reset/"), "/admin/reset/x/y/"):
        assert b"This link does not work" in Client().get(wrong).content
    User.objects.filter(username="grace").update(is_active=False)
    assert b"This link does not work" in Client().get(link).content


@pytest.mark.django_db(transaction=True)
def test_of_two_who_use_a_link_at_once_one_comes_in(admin: Client) -> None:
    link = invite(admin)
    browsers = [Client(), Client()]
    forms = [browser.get(link)["Location"] for browser in browsers]
    answers: list[int] = []
    both = threading.Barrier(2)

    def set_password(browser: Client, form: str) -> None:
        both.wait()
        answers.append(browser.post(form, NEW).status_code)
        connections.close_all()

    threads = [
        threading.Thread(target=set_password, args=one) for one in zip(browsers, forms, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [200, 302]


def test_an_invitation_made_as_the_password_is_chosen_leaves_it(
    admin: Client, rf: RequestFactory
) -> None:
    link = invite(admin)
    seen_before = User.objects.get(username="grace")
    use(Client(), link)
    assert make_link(rf.get("/"), seen_before)[1] is RESET
    assert User.objects.get(username="grace").check_password(NEW["new_password1"])


def wait_for_mails(mailbox: Mailbox, count: int) -> list[str]:
    wait_until(lambda: len(mailbox.mails) >= count)
    return [mail.content.decode().replace("=\r\n", "") for mail in mailbox.mails]


def test_who_has_forgotten_the_password_is_mailed_a_link(member: Member, mailbox: Mailbox) -> None:
    member("ada", "viewer", email="ada@example.org")
    asker = Client()
    answers = [
        asker.post("/admin/reset/", {"email": email}, follow=True).content.decode()
        for email in ("nobody@example.org", "ADA@example.org")
    ]
    assert all("a link is on its way" in answer for answer in answers)
    (mail,) = wait_for_mails(mailbox, 1)
    assert mailbox.mails[0].rcpt_tos == ["ada@example.org"]
    assert use(Client(), link_in(mail))["Location"] == "/admin/"


def test_a_mailbox_is_not_flooded_and_an_address_does_not_ask_for_ever(
    member: Member, mailbox: Mailbox
) -> None:
    member("ada", "viewer", email="ada@example.org")
    statuses = [
        Client().post("/admin/reset/", {"email": "ada@example.org"}).status_code for _ in range(12)
    ]
    assert statuses == [302] * 10 + [429] * 2
    assert len(wait_for_mails(mailbox, 3)) == 3
    for thread in threading.enumerate():
        if thread.name == "mail":
            thread.join(30)
    assert len(mailbox.mails) == 3


def test_an_invitation_is_mailed_too(admin: Client, mailbox: Mailbox) -> None:
    link = invite(admin, email="grace@example.org")
    (mail,) = wait_for_mails(mailbox, 1)
    assert link_in(mail) == link


@pytest.mark.parametrize("setting", ["EMAIL_HOST", "ALLOWED_HOSTS"])
def test_without_mail_or_a_host_that_is_sure_the_page_says_whom_to_ask(
    member: Member, mailbox: Mailbox, settings: Any, setting: str
) -> None:
    """With ``*`` in ALLOWED_HOSTS, who asks could have the link lead to a host of their own."""
    member("ada", "viewer", email="ada@example.org")
    setattr(settings, setting, "" if setting == "EMAIL_HOST" else ["*"])
    form = {"email": "ada@example.org"}
    page = Client().post(
        "/admin/reset/", form, headers={"host": "evil.example"} if setting != "EMAIL_HOST" else {}
    )
    assert b"Ask an administrator" in page.content
    assert not [thread for thread in threading.enumerate() if thread.name == "mail"]
    assert mailbox.mails == []
