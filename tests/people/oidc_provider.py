"""A provider of OpenID Connect in a process of its own (oidc-provider-mock, which is Authlib's)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tests.ports import free_port
from tests.waiting import wait_until


@dataclass(frozen=True, slots=True)
class Provider:
    """A provider that runs, with one client, whose secret it checks."""

    issuer: str
    client_id: str
    client_secret: str
    process: subprocess.Popen[bytes]

    def set_user(self, subject: str, **claims: Any) -> None:
        """Set what it says of a person."""
        httpx.put(f"{self.issuer}/users/{subject}", json=claims).raise_for_status()

    def let_in(self, address: str, subject: str) -> str:
        """Log somebody in on its page; return where it sends the browser."""
        answer = httpx.post(address, data={"sub": subject})
        assert answer.status_code == 302, answer.text
        return answer.headers["location"]


@contextmanager
def oidc_provider(redirect_uri: str) -> Iterator[Provider]:
    """Start a provider, and register the client with this address to come back to."""
    port = free_port()
    issuer = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "oidc_provider_mock", "--port", str(port)]
    process = subprocess.Popen([*command, "--require-registration", "--require-nonce"])
    try:
        wait_until(lambda: _answers(issuer, process), 60)
        client = httpx.post(f"{issuer}/oauth2/clients", json={"redirect_uris": [redirect_uri]})
        made = client.raise_for_status().json()
        yield Provider(issuer, made["client_id"], made["client_secret"], process)
    finally:
        process.kill()
        process.wait()


def _answers(issuer: str, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "the provider has ended"
    try:
        return httpx.get(f"{issuer}/.well-known/openid-configuration").is_success
    except httpx.TransportError:
        return False
