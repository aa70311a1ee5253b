"""Where images are fetched from: public addresses, whatever a URL calls them."""

from __future__ import annotations

import ssl
import time
from pathlib import Path
from typing import Any

import httpcore
import pytest
from pytest_django.fixtures import Settings

from inference_site.core import checked_connections, host
from inference_site.core.checked_connections import CheckedBackend, NoPublicAddress
from inference_site.core.domain.addresses import is_listed, is_public
from tests.certificates import write_certificate
from tests.image_server import ImageServer
from tests.images import PNG, data_url, refusal, resolved

NO_PUBLIC_ADDRESS = "The host of the image has no public address."
PUBLIC = "93.184.215.14"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """Host names and what they resolve to: one list of addresses for each time they are asked."""
    table: dict[str, list[list[str]]] = {}
    monkeypatch.setattr(host, "resolve_host", lambda name: table[name].pop(0))
    return table


class NotedBackend(httpcore.NetworkBackend):
    """Connects to nothing, and notes what it was to connect to."""

    def __init__(self, failing: int = 0) -> None:
        self.connected: list[str] = []
        self._failing = failing

    def connect_tcp(self, host: str, *args: Any, **kwargs: Any) -> httpcore.NetworkStream:
        self.connected.append(host)
        if len(self.connected) <= self._failing:
            raise httpcore.ConnectError
        return httpcore.NetworkStream()


def checked(inner: NotedBackend) -> CheckedBackend:
    """A backend with 5 s for each step, to public addresses."""
    return CheckedBackend(lambda: 5.0, allow_private=False, inner=inner)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "0177.0.0.1",
        "017700000001",
        "127.1",
        "127.0.1",
        "0",
        "0.0.0.0",  # noqa: S104  # Not to listen on.
        "localhost",
        "LOCALHOST.",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[0:0:0:0:0:ffff:7f00:1]",
        "[::127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[64:ff9b::127.0.0.1]",
        "[2002:7f00:1::]",
        "①②⑦.⓪.⓪.①",
        "no-such-name.invalid",
    ],
)
def test_no_spelling_of_the_loopback_is_fetched(server: ImageServer, host: str) -> None:
    server.give("/", PNG)
    assert refusal(server.url("/", host)) in {NO_PUBLIC_ADDRESS, "The image's URL is not valid."}
    assert server.asked == []


@pytest.mark.parametrize(
    "address",
    [
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",  # Carrier-grade NAT.
        "100.100.100.200",
        "127.255.255.254",
        "169.254.169.254",
        "168.63.129.16",
        "192.0.0.192",
        "192.0.2.1",
        "198.18.0.1",
        "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "0.1.2.3",
        "::",
        "::1",
        "::a00:1",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "::ffff:0:127.0.0.1",
        "64:ff9b::10.0.0.1",
        "64:ff9b:1::8.8.8.8",  # RFC 8215: for use inside a network.
        "100::1",
        "2001::1",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",  # Teredo.
        "2001:db8::1",
        "3fff::1",
        "2002:a00:1::1",
        "2002:c0a8:101::1",
        "fc00::1",
        "fd00:ec2::254",
        "fe80::1",
        "fe80::1%1",
        "fec0::1",
        "ff02::1",
        "4000::1",
    ],
)
def test_special_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        PUBLIC,
        "8.8.8.8",
        "100.63.255.255",
        "100.128.0.1",
        "172.32.0.1",
        "2606:2800:220:1:248:1893:25c8:1946",
        "::ffff:8.8.8.8",
        "64:ff9b::808:808",
        "2002:808:808::1",
    ],
)
def test_all_others_are(address: str) -> None:
    assert is_public(address)


def test_a_name_for_a_private_address_is_not_fetched(
    server: ImageServer, names: dict[str, list[list[str]]]
) -> None:
    names["images.test"] = [["127.0.0.1"]]
    assert refusal(server.url("/", "images.test")) == NO_PUBLIC_ADDRESS
    assert server.asked == []


@pytest.mark.parametrize("found", [[PUBLIC, "127.0.0.1"], ["::1", PUBLIC]])
def test_one_private_address_among_public_ones_is_too_many(
    names: dict[str, list[list[str]]], found: list[str]
) -> None:
    names["images.test"] = [found]
    inner = NotedBackend()
    with pytest.raises(NoPublicAddress):
        checked(inner).connect_tcp("images.test", 80)
    assert inner.connected == []


def test_the_address_that_was_checked_is_the_one_connected_to(
    names: dict[str, list[list[str]]],
) -> None:
    names["images.test"] = [[PUBLIC], ["127.0.0.1"]]
    inner = NotedBackend()
    backend = checked(inner)
    backend.connect_tcp("images.test", 80)
    assert inner.connected == [PUBLIC]
    with pytest.raises(NoPublicAddress):
        backend.connect_tcp("images.test", 80)
    assert inner.connected == [PUBLIC]


def test_the_next_address_is_tried_when_one_does_not_answer(
    names: dict[str, list[list[str]]],
) -> None:
    names["images.test"] = [["8.8.8.8", PUBLIC]]
    inner = NotedBackend(failing=1)
    checked(inner).connect_tcp("images.test", 80)
    assert inner.connected == ["8.8.8.8", PUBLIC]


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/meta-data/",
        "//169.254.169.254/latest/meta-data/",
        "http://[::ffff:169.254.169.254]/",
        "http://internal.test/",
    ],
)
def test_a_public_host_cannot_redirect_inside(
    server: ImageServer,
    names: dict[str, list[list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    location: str,
) -> None:
    """The test's server passes for public; everything else is judged as it is."""
    monkeypatch.setattr(
        checked_connections, "is_public", lambda ip: ip == "127.0.0.1" or is_public(ip)
    )
    names["images.test"] = [["127.0.0.1"]]
    names["internal.test"] = [["10.0.0.1"]]
    names["169.254.169.254"] = [["169.254.169.254"]]
    names["::ffff:169.254.169.254"] = [["::ffff:169.254.169.254"]]
    server.redirect("/a", location)
    assert refusal(server.url("/a", "images.test")) == NO_PUBLIC_ADDRESS
    assert server.asked == ["/a"]


def test_a_slow_resolver_is_given_up(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.MEDIA_TIMEOUT_S = 0.2

    def slow(host: str) -> list[str]:
        time.sleep(6)
        return [PUBLIC]

    monkeypatch.setattr(host, "resolve_host", slow)
    began = time.monotonic()
    assert "within 0.2 s" in refusal("http://images.test/")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("host", "listed"),
    [
        ("images.org", True),
        ("IMAGES.org.", True),
        ("a.images.org", False),
        ("below.org", True),
        ("a.b.below.org", True),
        ("notbelow.org", False),
        ("below.org.evil.test", False),
    ],
)
def test_a_listed_host_is_exact_or_below(host: str, listed: bool) -> None:
    assert is_listed(host, ["Images.org", ".below.org"]) is listed


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate of ``images.test``, and its key."""
    return write_certificate(tmp_path, "DNS:images.test")


def test_a_certificate_is_checked_for_the_name(
    settings: Settings,
    certificate: Path,
    names: dict[str, list[list[str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings.MEDIA_ALLOW_PRIVATE = True
    names.update({host: [["127.0.0.1"]] * 2 for host in ("images.test", "other.test")})
    with ImageServer(certificate).running() as server:
        server.give("/a", PNG)
        good, bad = (f"https://{name}.test:{server.port}/a" for name in ("images", "other"))
        assert "could not be fetched" in refusal(good)  # Nobody trusts it yet.
        trusting = ssl.create_default_context(cafile=certificate)
        monkeypatch.setattr(checked_connections, "ssl_context", lambda: trusting)
        assert resolved(good) == [data_url(PNG)]
        assert "could not be fetched" in refusal(bad)
