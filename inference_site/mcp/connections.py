"""The tokens of users for MCP servers that each user authorises: kept, refreshed, used, ended.

A refresh token may be used once, and many servers take a second use for theft and end the access.
So a refresh holds the lock of its row from before the request until the new tokens are committed:
of two processes, one refreshes, and the other one uses what it finds then. A process that dies in
between may lose the tokens; its user connects again. A slow authorization server keeps few
connections to PostgreSQL, because a process makes few refreshes at a time.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
from typing import NoReturn

from django.conf import settings
from django.db import OperationalError
from django.utils import timezone

from inference_site.core.storage.postgresql import (
    is_timeout,
    release_connection_after,
    transaction_with_timeouts,
)
from inference_site.mcp.access import (
    Endpoint,
    NotUsable,
    allowed_addresses,
    unseal_headers,
)
from inference_site.mcp.grants import Grant, seal, unseal_grant
from inference_site.mcp.models import EndedGrant, McpConnection, McpServer

logger = logging.getLogger(__name__)

PAGE = "/admin/my-connections/"
"""The page of the console where users connect. A worker does not load its routes."""
_EARLY_S = 30.0
"""How long before its end an access token is refreshed, so that it does not end during a call."""
_WAIT_S = 15.0
"""How long a refresh by another process or thread is waited for."""
_END_TRIED_FOR = dt.timedelta(hours=72)
"""For how long an authorization server is asked to end the access of a deleted connection."""
_MIN_PAUSE = dt.timedelta(seconds=10)
_MOST = 100
_refreshes = threading.BoundedSemaphore(2)
"""The refreshes of this process at one time, each of which keeps a connection to PostgreSQL."""


class NotConnected(NotUsable):
    """The user must connect first. The message names the page."""


def user_endpoint(
    server: McpServer, user_id: int | None, refused: Endpoint | None = None
) -> Endpoint:
    """Return where a server is, with the token of a user; it is refreshed if it has ended.

    ``refused`` is what was returned before, if the server did not accept its token. Raise
    NotConnected, or NotUsable if there is no token now.
    """
    if user_id is None:
        _ask_to_connect(
            server,
            f"each user authorises the MCP server '{server.label}', and this key belongs to no "
            "user; make one on the page My keys",
        )
    with release_connection_after():
        own = McpConnection.objects.filter(server=server, user=user_id, user__is_active=True)
        grant = _usable(server, own.first())
    if not _is_fresh(grant, refused):
        grant = _refreshed(server, user_id, refused)
    bearer = {"Authorization": f"Bearer {grant.access_token}"}
    headers = {**unseal_headers(server.credentials), **bearer}
    transport = server.transport
    return Endpoint(server.url, headers, transport, allowed_addresses())  # type: ignore[arg-type]  # A choice.


def save_grant(server: McpServer, user_id: int, grant: Grant) -> None:
    """Save what a user has authorised, in place of what there was."""
    McpConnection.objects.update_or_create(
        server=server,
        user_id=user_id,
        defaults={
            "server_url": server.url,
            "grant": seal(grant),
            "error": "",
            "connected_at": timezone.now(),
        },
    )


def why_ended(server: McpServer, connection: McpConnection) -> str:
    """Return why a connection is of no use any more; an empty text if it is."""
    if not connection.grant or connection.server_url != server.url:
        return connection.error.rstrip(".") or "the server has another address now"
    return "" if is_readable(connection) else "another SECRET_KEY encrypted it"


def is_readable(connection: McpConnection) -> bool:
    """Whether this ``SECRET_KEY`` encrypted the tokens of a connection."""
    try:
        unseal_grant(connection.grant)
    except NotUsable:
        return False
    return True


def disconnect(connection: McpConnection) -> bool:
    """Delete a connection, and end its access at the authorization server.

    Return whether the access is known to have ended there, or had ended before. ``end_grants``
    tries again what could not be done now.
    """
    connection.delete()
    ended = EndedGrant.objects.filter(grant=connection.grant).first()
    return ended is None or _end(ended)


def end_grants() -> None:
    """Have the authorization servers end the access of deleted connections. Beat calls this.

    A second beat does no harm: to end an access twice is no error (RFC 7009, section 2.2).
    """
    for ended in EndedGrant.objects.filter(next_at__lte=timezone.now()).order_by("next_at")[:_MOST]:
        tried_for = timezone.now() - ended.ended_at
        if tried_for > _END_TRIED_FOR:
            logger.warning("the access of a deleted connection could not be ended at its server")
            ended.delete()
            continue
        ended.next_at = timezone.now() + max(tried_for, _MIN_PAUSE)  # Doubles the age each time.
        ended.save(update_fields=["next_at"])
        _end(ended)


def _end(ended: EndedGrant) -> bool:
    """End an access at its authorization server; return whether it is known to have ended.

    The tokens are kept if the server could not be asked.
    """
    # The SDK takes 50 MB; only processes that use it have it.
    from inference_site.mcp import authorization

    try:
        grant = unseal_grant(ended.grant)
        authorization.revoke(grant, allowed_addresses())
    except authorization.AuthorizationFailed:
        return False
    except NotUsable:  # Nobody can read them any more.
        has_ended = False
    else:
        has_ended = bool(grant.authorization_server.revocation_endpoint)
    ended.delete()
    return has_ended


def _usable(server: McpServer, connection: McpConnection | None) -> Grant:
    """Return the grant of a connection. Raise NotConnected if it has none for this server."""
    if connection is None:
        _ask_to_connect(server, f"you are not connected to the MCP server '{server.label}'")
    if why := why_ended(server, connection):
        _ask_to_connect(
            server, f"your connection to the MCP server '{server.label}' has ended: {why}"
        )
    return unseal_grant(connection.grant)


def _ask_to_connect(server: McpServer, reason: str) -> NoReturn:
    raise NotConnected(f"{reason}. Connect to '{server.label}' here: {settings.SITE_URL}{PAGE}")


def _is_fresh(grant: Grant, refused: Endpoint | None) -> bool:
    """Whether a token can be used: it has not ended, and is not the one that was refused."""
    if (
        refused is not None
        and refused.headers.get("Authorization") == f"Bearer {grant.access_token}"
    ):
        return False
    return not grant.expires_at or grant.expires_at > time.time() + _EARLY_S


def _refreshed(server: McpServer, user_id: int, refused: Endpoint | None) -> Grant:
    """Refresh a grant, or return what another process has refreshed. Raise NotUsable."""
    # Before the lock, because the import takes seconds on a busy machine.
    from inference_site.mcp import authorization  # noqa: F401

    deadline = time.monotonic() + _WAIT_S
    rows = McpConnection.objects.select_for_update().filter(server=server, user=user_id)
    while _refreshes.acquire(timeout=max(0, deadline - time.monotonic())):
        try:
            with release_connection_after(), transaction_with_timeouts():
                found = _refresh_locked(server, rows.first(), refused)
            if isinstance(found, McpConnection):
                return _usable(server, found)  # It raises: the grant was refused.
            return found
        except OperationalError as exc:
            if not is_timeout(exc):
                raise
        finally:
            _refreshes.release()
    raise NotUsable("the access could not be renewed in time")


def _refresh_locked(
    server: McpServer, connection: McpConnection | None, refused: Endpoint | None
) -> Grant | McpConnection:
    """Refresh the grant of a locked row; return the row without a grant if that is refused."""
    # The SDK takes 50 MB; only processes that use it have it.
    from inference_site.mcp import authorization

    grant = _usable(server, connection)
    assert connection is not None
    if _is_fresh(grant, refused):
        return grant
    try:
        grant = authorization.refresh(grant, allowed_addresses())
    except authorization.GrantRefused as exc:
        connection.grant, connection.error = "", str(exc)
        connection.save(update_fields=["grant", "error"])
        return connection
    except authorization.AuthorizationFailed as exc:
        raise NotUsable(f"the access could not be renewed: {str(exc).rstrip('.')}") from exc
    connection.grant = seal(grant)
    connection.save(update_fields=["grant"])
    return grant
