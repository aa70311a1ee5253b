"""Users with roles, and a mail server, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from django.contrib.auth.models import Group, User
from django.test import Client

from inference_site.core.storage.redis import site_client
from tests.ports import free_port


@pytest.fixture(autouse=True)
def _no_tries(db: None) -> Iterator[None]:
    _forget_tries()
    yield
    _forget_tries()


def _forget_tries() -> None:
    for key in site_client().scan_iter("limit:*"):
        site_client().delete(key)


@pytest.fixture
def member() -> Callable[..., tuple[User, Client]]:
    """Makes a user with these roles, and the browser in which they are logged in."""

    def make(name: str, *roles: str, **fields: Any) -> tuple[User, Client]:
        user = User.objects.create_user(name, password="a right password", is_staff=True, **fields)
        user.groups.set(Group.objects.filter(name__in=roles))
        browser = Client()
        browser.force_login(user)
        return user, browser

    return make


class Mailbox:
    """What a mail server was sent."""

    def __init__(self) -> None:
        self.mails: list[Any] = []

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        self.mails.append(envelope)
        return "250 OK"


@pytest.fixture
def mailbox(settings: Any) -> Iterator[Mailbox]:
    """A real mail server that the site is set to use."""
    box = Mailbox()
    server = Controller(box, hostname="127.0.0.1", port=free_port())
    server.start()
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", server.port
    yield box
    server.stop()
