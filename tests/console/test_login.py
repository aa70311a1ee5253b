"""Logging in to the admin: where a client is, and what is written down of a failure."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from axes.models import AccessFailureLog
from django.test import Client, RequestFactory

from inference_site.console.login import client_address
from inference_site.storage.redis_clients import site_client

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
    site_client().set("logins:192.0.2.1", 29, ex=60)
    form = {"username": "a", "password": "wrong"}
    statuses = [
        here.post("/admin/login/", {**form, "username": f"{name}"}).status_code for name in range(3)
    ]
    assert statuses == [200, 429, 429]
    assert AccessFailureLog.objects.count() == 1  # No other password was looked at.
    assert elsewhere.post("/admin/login/", form).status_code == 200
    assert 0 < site_client().ttl("logins:192.0.2.2") <= 60
