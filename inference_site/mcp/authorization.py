"""OAuth for MCP servers that each user authorises: the code flow with PKCE, refresh, revocation.

A user's authorization takes two requests of the console, which may reach two processes, so the
SDK's provider, which waits in one coroutine for the user, does not fit. Its public parts find the
servers, register the client and check the answers (MCP, "Authorization"; RFC 9728, 8414, 7591,
7636, 8707, 9207). All requests go through the checked transport, follow no redirect, and are
bounded in time and bytes. No error has the text of a server, because that may repeat a secret.
This module imports the SDK (50 MB), so other modules import it inside functions. Errors:

    AuthorizationFailed    there is no token now; the message says why
    └── GrantRefused       there will be none: the user must authorise again
"""

from __future__ import annotations

import asyncio
import base64
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import anyio
import httpx2
from mcp.client.auth import OAuthFlowError, PKCEParameters
from mcp.client.auth.oauth2 import check_registration_usable
from mcp.client.auth.utils import (
    build_oauth_authorization_server_metadata_discovery_urls,
    build_protected_resource_metadata_discovery_urls,
    create_client_registration_request,
    create_oauth_metadata_request,
    extract_resource_metadata_from_www_auth,
    extract_scope_from_www_auth,
    get_client_metadata_scopes,
    handle_auth_metadata_response,
    handle_protected_resource_response,
    handle_registration_response,
    issuers_match,
    validate_authorization_response_iss,
)
from mcp.shared.auth import (
    OAuthClientMetadata,
    OAuthMetadata,
    OAuthToken,
    ProtectedResourceMetadata,
)
from mcp.shared.auth_utils import check_resource_allowed, resource_url_from_server_url
from pydantic import AnyUrl, ValidationError

from inference_site.core.domain.addresses import AllowedAddresses
from inference_site.mcp.access import NotUsable, check_headers
from inference_site.mcp.grants import (
    Attempt,
    AuthorizationServer,
    ClientMethod,
    Grant,
    SiteClient,
)
from inference_site.mcp.transport import CheckedTransport, Traffic

T = TypeVar("T")

_TIMEOUT_S = 8.0
_MAX_BYTES = 512 * 1024
_GRANT_TYPES = ["authorization_code", "refresh_token"]
_REFUSALS = frozenset({"invalid_grant", "invalid_client", "unauthorized_client"})
"""Errors of a token endpoint that a repeat does not change (RFC 6749, section 5.2)."""
_CODE = re.compile(r"[\x20-\x7e]{1,4096}")
_PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}


class AuthorizationFailed(Exception):
    """There is no token. The message has nothing that a server wrote."""


class GrantRefused(AuthorizationFailed):
    """The authorization server does not accept the grant any more."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A server that a user wants to authorise, as it is registered.

    ``issuer`` and ``client_id`` are empty where the server's metadata and a registration of the
    client decide; ``registration`` is the client that was registered before.
    """

    url: str
    redirect_uri: str
    issuer: str = ""
    client_id: str = ""
    client_secret: str = ""
    scope: str = ""
    registration: SiteClient | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """``url`` is where the user agrees; ``state`` comes back with the user."""

    url: str
    state: str
    authorization_server: AuthorizationServer
    client: SiteClient
    resource: str
    scope: str
    verifier: str


def begin(wanted: Wanted, allowed: AllowedAddresses) -> Begun:
    """Find the authorization server, register the client, and return where the user agrees.

    Raise AuthorizationFailed.
    """

    async def act(http: httpx2.AsyncClient) -> Begun:
        # How the server answers without a token; the body is not read.
        headers = {"Accept": "application/json, text/event-stream"}
        request = http.build_request("POST", wanted.url, json=_PING, headers=headers)
        challenge = await http.send(request, stream=True)
        await challenge.aclose()
        # What the server says of itself as a protected resource, if it says anything.
        described: ProtectedResourceMetadata | None = None
        named = extract_resource_metadata_from_www_auth(challenge)
        for address in build_protected_resource_metadata_discovery_urls(named, wanted.url):
            response = await http.send(create_oauth_metadata_request(address))
            described = await handle_protected_resource_response(response)
            if described is not None:
                break
        asked = resource_url_from_server_url(wanted.url)
        resource = asked if described is None else str(described.resource)
        if not check_resource_allowed(asked, resource):
            raise AuthorizationFailed("The server's metadata is that of another resource.")
        issuer = _issuer(wanted, described)
        metadata = await _metadata(http, issuer, wanted.url)
        scope = wanted.scope or get_client_metadata_scopes(
            extract_scope_from_www_auth(challenge), described, metadata, _GRANT_TYPES
        )
        client = await _client(http, wanted, metadata, scope or "")
        return _begun(metadata, client, resource, scope or "")

    return asyncio.run(_within(allowed, act))


def finish(attempt: Attempt, code: str, issuer: str | None, allowed: AllowedAddresses) -> Grant:
    """Return the tokens for a code with which the user came back. Raise AuthorizationFailed.

    ``issuer`` is what the authorization server says of itself beside the code.
    """
    server = attempt.authorization_server
    metadata = OAuthMetadata.model_validate(
        {
            "issuer": server.issuer,
            "authorization_endpoint": server.authorization_endpoint,
            "token_endpoint": server.token_endpoint,
            "authorization_response_iss_parameter_supported": server.names_issuer,
        }
    )
    try:
        validate_authorization_response_iss(issuer, metadata)
    except OAuthFlowError as exc:
        raise AuthorizationFailed("The code comes from another authorization server.") from exc
    if not _CODE.fullmatch(code):
        raise AuthorizationFailed("The authorization server sent no code.")
    fields = {
        "grant_type": "authorization_code",
        "code": code,
        "redirect_uri": attempt.client.redirect_uri,
        "code_verifier": attempt.verifier,
        "resource": attempt.resource,
    }
    tokens = asyncio.run(
        _within(allowed, lambda http: _tokens(http, server, attempt.client, fields))
    )
    return Grant(
        authorization_server=server,
        client=attempt.client,
        resource=attempt.resource,
        scope=tokens.scope or attempt.scope,
        access_token=tokens.access_token,
        refresh_token=tokens.refresh_token or "",
        expires_at=_expiry(tokens),
    )


def refresh(grant: Grant, allowed: AllowedAddresses) -> Grant:
    """Return new tokens for a grant. Raise GrantRefused or AuthorizationFailed."""
    if not grant.refresh_token:
        raise GrantRefused("The access has ended.")
    fields = {
        "grant_type": "refresh_token",
        "refresh_token": grant.refresh_token,
        "resource": grant.resource,
    }
    server = grant.authorization_server
    tokens = asyncio.run(_within(allowed, lambda http: _tokens(http, server, grant.client, fields)))
    return replace(
        grant,
        scope=tokens.scope or grant.scope,
        access_token=tokens.access_token,
        refresh_token=tokens.refresh_token or grant.refresh_token,
        expires_at=_expiry(tokens),
    )


def revoke(grant: Grant, allowed: AllowedAddresses) -> None:
    """End a grant at its authorization server, if that has an endpoint for it (RFC 7009).

    Raise AuthorizationFailed.
    """
    server = grant.authorization_server
    if not server.revocation_endpoint:
        return
    is_refresh = bool(grant.refresh_token)
    fields = {
        "token": grant.refresh_token if is_refresh else grant.access_token,
        "token_type_hint": "refresh_token" if is_refresh else "access_token",
    }

    async def act(http: httpx2.AsyncClient) -> None:
        response = await http.send(_form(server.revocation_endpoint, grant.client, fields))
        if response.status_code != 200:
            raise AuthorizationFailed("The authorization server did not end the access.")

    asyncio.run(_within(allowed, act))


async def _within(
    allowed: AllowedAddresses, act: Callable[[httpx2.AsyncClient], Awaitable[T]]
) -> T:
    """Act with a client whose requests are bounded. Raise AuthorizationFailed."""
    with anyio.move_on_after(_TIMEOUT_S) as scope:
        traffic = Traffic(_MAX_BYTES, scope)
        headers = {"User-Agent": "inference-site", "Accept-Encoding": "identity"}
        transport = CheckedTransport(allowed, traffic)
        async with httpx2.AsyncClient(
            transport=transport, headers=headers, timeout=None, trust_env=False
        ) as http:
            try:
                return await act(http)
            except OAuthFlowError:
                problem = "The authorization server's answer does not follow the protocol."
            except (httpx2.HTTPError, httpx2.InvalidURL, ValueError):
                problem = (
                    "A server of the authorization has no address that may be connected to."
                    if traffic.is_refused
                    else "A server of the authorization does not answer as it should."
                )
        raise AuthorizationFailed(problem)
    raise AuthorizationFailed("The servers of the authorization sent too much or nothing in time.")


def _issuer(wanted: Wanted, described: ProtectedResourceMetadata | None) -> str:
    """Return the authorization server: the registered one, or the first that the server names."""
    named = [] if described is None else [str(one) for one in described.authorization_servers]
    if not wanted.issuer:
        if named:
            return named[0]
        parts = urlsplit(wanted.url)  # As the protocol of 2025-03-26 has it.
        return f"{parts.scheme}://{parts.netloc}"
    if named and not any(issuers_match(wanted.issuer, one) for one in named):
        raise AuthorizationFailed("The server names another authorization server than registered.")
    return wanted.issuer


async def _metadata(http: httpx2.AsyncClient, issuer: str, url: str) -> OAuthMetadata:
    """Return the metadata of an authorization server, which must be its own and offer PKCE."""
    found = None
    for address in build_oauth_authorization_server_metadata_discovery_urls(issuer, url):
        response = await http.send(create_oauth_metadata_request(address))
        goes_on, found = await handle_auth_metadata_response(response)
        if found is not None or not goes_on:
            break
    if found is None:
        raise AuthorizationFailed("The authorization server does not describe itself.")
    if not issuers_match(str(found.issuer), issuer):
        raise AuthorizationFailed("The authorization server says that it is another one.")
    if "S256" not in (found.code_challenge_methods_supported or ()):
        raise AuthorizationFailed("The authorization server does not offer PKCE (S256).")
    endpoints = (
        *(found.authorization_endpoint, found.token_endpoint),
        *(found.registration_endpoint, found.revocation_endpoint),
    )
    if issuer.startswith("https:") and any(one and one.scheme != "https" for one in endpoints):
        raise AuthorizationFailed("The authorization server has an address without encryption.")
    return found


async def _client(
    http: httpx2.AsyncClient, wanted: Wanted, metadata: OAuthMetadata, scope: str
) -> SiteClient:
    """Return the client of the site: the given one, the stored one, or one that is registered."""
    issuer = str(metadata.issuer)
    offered = metadata.token_endpoint_auth_methods_supported or ["client_secret_basic"]
    if wanted.client_id:
        method: ClientMethod = "none"
        if wanted.client_secret:
            is_basic = "client_secret_basic" in offered or "client_secret_post" not in offered
            method = "client_secret_basic" if is_basic else "client_secret_post"
        return SiteClient(
            issuer, wanted.redirect_uri, wanted.client_id, wanted.client_secret, method
        )
    stored = wanted.registration
    if (
        stored is not None
        and stored.issuer == issuer
        and stored.redirect_uri == wanted.redirect_uri
        and (not stored.secret_expires_at or stored.secret_expires_at > time.time() + 60)
    ):
        return stored
    if metadata.registration_endpoint is None:
        raise AuthorizationFailed(
            "The authorization server registers no clients: the server's page needs a client ID."
        )
    # In this order, because servers of the SDK end an access only for a secret in the form.
    known: tuple[ClientMethod, ...] = ("client_secret_post", "client_secret_basic", "none")
    asked = OAuthClientMetadata(
        redirect_uris=[AnyUrl(wanted.redirect_uri)],
        client_name="Inference site",
        application_type="web",
        grant_types=[*_GRANT_TYPES],
        token_endpoint_auth_method=next((one for one in known if one in offered), "none"),
        scope=scope or None,
    )
    request = create_client_registration_request(metadata, asked, issuer)
    info = await handle_registration_response(await http.send(request))
    check_registration_usable(info)
    secret = info.client_secret or ""
    given = info.token_endpoint_auth_method or ("client_secret_basic" if secret else "none")
    return SiteClient(
        issuer=issuer,
        redirect_uri=wanted.redirect_uri,
        client_id=info.client_id,
        client_secret=secret,
        method=next(one for one in known if one == given),
        secret_expires_at=info.client_secret_expires_at or 0,
    )


def _begun(metadata: OAuthMetadata, client: SiteClient, resource: str, scope: str) -> Begun:
    pkce, state = PKCEParameters.generate(), secrets.token_urlsafe(32)
    fields = {
        "response_type": "code",
        "client_id": client.client_id,
        "redirect_uri": client.redirect_uri,
        "state": state,
        "code_challenge": pkce.code_challenge,
        "code_challenge_method": "S256",
        "resource": resource,
        **({"scope": scope} if scope else {}),
        # OpenID Connect Core, section 11: a refresh token needs the user's consent.
        **({"prompt": "consent"} if "offline_access" in scope.split() else {}),
    }
    parts = urlsplit(str(metadata.authorization_endpoint))
    own = [pair for pair in parse_qsl(parts.query) if pair[0] not in fields]
    url = urlunsplit(parts._replace(query=urlencode([*own, *fields.items()]), fragment=""))
    server = AuthorizationServer(
        issuer=str(metadata.issuer),
        authorization_endpoint=str(metadata.authorization_endpoint),
        token_endpoint=str(metadata.token_endpoint),
        revocation_endpoint=str(metadata.revocation_endpoint or ""),
        names_issuer=bool(metadata.authorization_response_iss_parameter_supported),
    )
    return Begun(url, state, server, client, resource, scope, pkce.code_verifier)


async def _tokens(
    http: httpx2.AsyncClient,
    server: AuthorizationServer,
    client: SiteClient,
    fields: Mapping[str, str],
) -> OAuthToken:
    """Return the answer of the token endpoint. Raise GrantRefused or AuthorizationFailed."""
    response = await http.send(_form(server.token_endpoint, client, fields))
    if response.status_code not in (200, 201):
        try:
            error: Any = response.json()
        except ValueError:
            error = None
        if isinstance(error, dict) and str(error.get("error")) in _REFUSALS:
            raise GrantRefused("The authorization server refuses the access.")
        raise AuthorizationFailed("The authorization server gave no token.")
    try:
        tokens = OAuthToken.model_validate_json(response.content)
        check_headers({"Authorization": f"Bearer {tokens.access_token}"})
    except (ValidationError, NotUsable):
        # Without the cause: it may have the token.
        raise AuthorizationFailed("The authorization server's token cannot be used.") from None
    return tokens


def _form(url: str, client: SiteClient, fields: Mapping[str, str]) -> httpx2.Request:
    """Return the request of a client that proves who it is (RFC 6749, section 2.3.1)."""
    data, headers = {**fields, "client_id": client.client_id}, dict[str, str]()
    if client.method == "client_secret_post":
        data["client_secret"] = client.client_secret
    elif client.method == "client_secret_basic":
        pair = f"{quote(client.client_id, safe='')}:{quote(client.client_secret, safe='')}"
        headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    headers |= {"Accept": "application/json", "Accept-Encoding": "identity"}
    return httpx2.Request("POST", url, data=data, headers=headers)


def _expiry(tokens: OAuthToken) -> float:
    """Return when the access token ends, in Unix seconds; 0 if the server does not say."""
    return 0 if tokens.expires_in is None else time.time() + tokens.expires_in
