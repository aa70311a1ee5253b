"""Guessing the password of the admin, over HTTP from several addresses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from tests.served_stack import ServedStack

ATTACKER, CROWD, HOME = "127.0.0.2", "127.0.0.3", "127.0.0.1"


@contextmanager
def browser(stack: ServedStack, address: str) -> Iterator[httpx.Client]:
    """A browser whose connections come from this address."""
    transport = httpx.HTTPTransport(local_address=address)
    with httpx.Client(base_url=stack.url, transport=transport, timeout=60) as opened:
        yield opened


def log_in(who: httpx.Client, user: str, password: str, **headers: str) -> httpx.Response:
    token = re.search(r'csrfmiddlewaretoken" value="([^"]+)', who.get("/admin/login/").text)
    assert token
    form = {"username": user, "password": password, "csrfmiddlewaretoken": token[1]}
    return who.post("/admin/login/", data=form, headers=headers)


@pytest.fixture(scope="module")
def password(stack: ServedStack) -> str:
    """The password of the user ``admin``."""
    found = re.search(r"password: (\S+)", stack.text())
    assert found
    return found[1]


def test_tries_at_once_are_no_more_than_one_after_the_other(stack: ServedStack) -> None:
    def guess(number: int) -> int:
        with browser(stack, CROWD) as one:
            return log_in(one, "admin", f"wrong {number}").status_code

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(guess, range(12))) <= {200, 429}
    [(counted,)] = stack.sql(
        "SELECT count(*) FROM axes_accessfailurelog WHERE ip_address = %s", CROWD
    )
    assert 1 <= counted <= 10


def test_wrong_passwords_lock_a_user_out_for_their_address_only(
    stack: ServedStack, password: str
) -> None:
    with browser(stack, ATTACKER) as attacker:
        tries = [log_in(attacker, "admin", f"wrong {number}").status_code for number in range(12)]
        assert tries == [200] * 9 + [429] * 3
        for headers in ({}, {"X-Forwarded-For": HOME}, {"User-Agent": "another"}):
            refused = log_in(attacker, "admin", password, **headers)
            assert refused.status_code == 429
            assert "Too many wrong passwords for this user from your address" in refused.text
        assert log_in(attacker, "somebody else", "wrong").status_code == 200
    with browser(stack, HOME) as home:
        assert log_in(home, "admin", password).status_code == 302
        failures = home.get("/admin/axes/accessfailurelog/?q=admin").text
        assert failures.count(ATTACKER) == 10
    log = (stack.data_dir / "log" / "web.log").read_text()
    assert f"Locking out user 'admin' from {ATTACKER} after repeated login failures" in log
    assert "wrong 3" not in log
