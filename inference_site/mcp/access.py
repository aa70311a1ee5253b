"""Which MCP servers a project may use, and where they are.

A request names a registered server by its label, or any server by its URL. A URL must have a host
of ``MCP_ALLOWED_HOSTS``; without that setting, no URL is allowed. Credentials of a request travel
in its request document, encrypted; those of a registered server are encrypted in the database.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import orjson
from cryptography.fernet import InvalidToken
from django.conf import settings

from inference_site.core.domain.addresses import AllowedAddresses, is_listed
from inference_site.core.storage.cipher import cipher_for
from inference_site.mcp.models import McpServer

if TYPE_CHECKING:
    import httpx

TransportName = Literal["auto", "streamable_http", "sse"]

LIST_TOOLS = "tools/list"
"""The name by which a list of tools is asked for, in place of the name of a tool."""
MAX_HEADERS = 32
MAX_HEADERS_BYTES = 16_384
_PURPOSE = "mcp credentials"
_ANY_HOST = "*"
"""The entry of ``MCP_ALLOWED_HOSTS`` that stands for every host."""
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_HEADER_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_RESERVED = frozenset(
    {
        *("accept", "accept-encoding", "connection", "content-encoding", "content-length"),
        *("content-type", "host", "last-event-id", "mcp-protocol-version", "mcp-session-id"),
        *("proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade"),
    }
)
"""Headers of HTTP and of MCP, which the client sets itself."""


class NotUsable(Exception):
    """A server may not be used. The message says why and has no secret."""


@dataclass(frozen=True, slots=True)
class OAuthClient:
    """A client that gets tokens from an authorization server, by its own secret."""

    issuer: str
    client_id: str
    client_secret: str = field(repr=False)
    scope: str = ""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is. ``headers`` are secret; ``allowed`` are the addresses it may have.

    The addresses are also those that the authorization server of ``oauth`` may have.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    transport: TransportName = "auto"
    allowed: AllowedAddresses = field(default_factory=AllowedAddresses)
    oauth: OAuthClient | None = None


def check_url(url: str) -> httpx.URL:
    """Return the parsed address of a server. Raise NotUsable if it can be none."""
    import httpx  # Here, because a web process that is asked for no such server does without it.

    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as exc:
        raise NotUsable("it is not a URL") from exc
    if parsed.scheme not in ("http", "https"):
        raise NotUsable("it must begin with https:// or http://")
    if parsed.userinfo:
        raise NotUsable("it must hold no user name or password")
    if not parsed.host or not 0 < (parsed.port or 80) < 65536:
        raise NotUsable("it is not a URL")
    return parsed


def check_requested_url(url: str, project_hosts: list[str]) -> None:
    """Raise NotUsable unless requests of a project may name this URL.

    ``project_hosts`` are the hosts of the project's own list; an empty list does not restrict it.
    """
    host = check_url(url).host
    if not settings.MCP_ALLOWED_HOSTS:
        raise NotUsable("this site runs registered MCP servers only; name one by its label")
    if not _may_name(host, settings.MCP_ALLOWED_HOSTS):
        raise NotUsable(f"this site allows no MCP server of the host {host!r}")
    if project_hosts and not _may_name(host, project_hosts):
        raise NotUsable(f"the project may use no MCP server of the host {host!r}")


def _may_name(host: str, allowed: list[str]) -> bool:
    return _ANY_HOST in allowed or is_listed(host, allowed)


def check_headers(headers: Mapping[str, str]) -> None:
    """Raise NotUsable unless these can be sent to a server."""
    size = sum(len(name) + len(value) for name, value in headers.items())
    if len(headers) > MAX_HEADERS or size > MAX_HEADERS_BYTES:
        raise NotUsable(
            f"there may be at most {MAX_HEADERS} headers of {MAX_HEADERS_BYTES} bytes together"
        )
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or name.lower() in _RESERVED:
            raise NotUsable(f"the header {name[:100]!r} cannot be set")
        if value and not _HEADER_VALUE.fullmatch(value):
            raise NotUsable(f"the value of the header {name!r} cannot be sent")


def seal_headers(headers: Mapping[str, str]) -> str:
    """Return headers, encrypted; an empty text for none."""
    return seal_secret(orjson.dumps(dict(headers)).decode()) if headers else ""


def unseal_headers(sealed: str) -> dict[str, str]:
    """Return encrypted headers. Raise NotUsable if another ``SECRET_KEY`` encrypted them."""
    if not sealed:
        return {}
    headers: dict[str, str] = orjson.loads(unseal_secret(sealed))
    return headers


def seal_secret(secret: str) -> str:
    """Return a secret, encrypted."""
    return cipher_for(_PURPOSE).encrypt(secret.encode()).decode()


def unseal_secret(sealed: str) -> str:
    """Return an encrypted secret. Raise NotUsable if another ``SECRET_KEY`` encrypted it."""
    try:
        return cipher_for(_PURPOSE).decrypt(sealed.encode()).decode()
    except InvalidToken as exc:
        raise NotUsable("its credentials were encrypted with another SECRET_KEY") from exc


def credentials_error(server: McpServer) -> str:
    """Return why the credentials of a server cannot be read; an empty text if they can."""
    try:
        unseal_headers(server.credentials)
        if server.oauth_secret:
            unseal_secret(server.oauth_secret)
    except NotUsable as exc:
        return str(exc)
    return ""


def registered_endpoint(server: McpServer) -> Endpoint:
    """Return where a registered server is. Raise NotUsable if its credentials cannot be read."""
    headers = unseal_headers(server.credentials)
    transport: TransportName = server.transport  # type: ignore[assignment]  # A choice.
    oauth = None
    if server.oauth_secret:
        secret = unseal_secret(server.oauth_secret)
        oauth = OAuthClient(server.oauth_issuer, server.oauth_client_id, secret, server.oauth_scope)
    return Endpoint(server.url, headers, transport, allowed_addresses(), oauth)


def requested_endpoint(url: str, sealed: str) -> Endpoint:
    """Return where the server of a request is. Raise NotUsable."""
    return Endpoint(url, unseal_headers(sealed), allowed=allowed_addresses())


def is_allowed(options: Mapping[str, Any], name: str, annotations: Any = None) -> bool:
    """Return whether the ``allowed_tools`` of a request let the model call a tool.

    ``annotations`` are those of the list of tools; without them only names are checked.
    """
    names: list[str] | None = options.get("tool_names")
    read_only: bool | None = options.get("read_only")
    if (names is not None and name not in names) or name in options.get("excluded_names", ()):
        return False
    if read_only is None or annotations is None:
        return True
    return bool(annotations.get("read_only")) == read_only


def allowed_addresses() -> AllowedAddresses:
    """Return the addresses that MCP servers may have, by the settings."""
    return AllowedAddresses(networks=tuple(settings.MCP_ALLOWED_NETWORKS))
