"""What users have authorised at MCP servers, as values that are stored encrypted.

A grant has all that a refresh needs, so it outlives a new registration of the site's client. No
value shows a secret when it is printed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from inference_site.mcp.access import seal_secret, unseal_secret

ClientMethod = Literal["none", "client_secret_basic", "client_secret_post"]
"""How a client proves who it is at the token endpoint (RFC 7591, section 2)."""


@dataclass(frozen=True, slots=True)
class AuthorizationServer:
    """Where users agree and tokens are given.

    ``names_issuer``: it says who it is when it sends a user back (RFC 9207).
    """

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    revocation_endpoint: str = ""
    names_issuer: bool = False


@dataclass(frozen=True, slots=True)
class SiteClient:
    """The client that the site is at an authorization server.

    Its secret ends at ``secret_expires_at``, in Unix seconds; 0: never.
    """

    issuer: str
    redirect_uri: str
    client_id: str
    client_secret: str = field(default="", repr=False)
    method: ClientMethod = "none"
    secret_expires_at: int = 0


@dataclass(frozen=True, slots=True)
class Attempt:
    """An authorization that a user has begun, and that the user's return must match.

    ``verifier`` is the secret of PKCE (RFC 7636); ``began_at`` is in Unix seconds.
    """

    user_id: int
    server_id: int
    server_url: str
    authorization_server: AuthorizationServer
    client: SiteClient
    resource: str
    scope: str
    verifier: str = field(repr=False)
    began_at: float


@dataclass(frozen=True, slots=True)
class Grant:
    """The tokens of one user for one server; ``expires_at`` is in Unix seconds, 0: unknown."""

    authorization_server: AuthorizationServer
    client: SiteClient
    resource: str
    scope: str
    access_token: str = field(repr=False)
    refresh_token: str = field(default="", repr=False)
    expires_at: float = 0


def seal(value: SiteClient | Attempt | Grant) -> str:
    """Return a value, encrypted."""
    return seal_secret(orjson.dumps(value).decode())


def unseal_client(sealed: str) -> SiteClient:
    """Return an encrypted client. Raise NotUsable if another ``SECRET_KEY`` encrypted it."""
    return SiteClient(**orjson.loads(unseal_secret(sealed)))


def unseal_attempt(sealed: str) -> Attempt:
    """Return an encrypted attempt. Raise NotUsable if another ``SECRET_KEY`` encrypted it."""
    return Attempt(**_nested(sealed))


def unseal_grant(sealed: str) -> Grant:
    """Return an encrypted grant. Raise NotUsable if another ``SECRET_KEY`` encrypted it."""
    return Grant(**_nested(sealed))


def _nested(sealed: str) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(unseal_secret(sealed))
    found["authorization_server"] = AuthorizationServer(**found["authorization_server"])
    found["client"] = SiteClient(**found["client"])
    return found
