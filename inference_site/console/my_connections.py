"""The page "My connections": MCP servers that each user authorises, and what the user has done.

Connecting takes three steps. A button finds the authorization server and shows its address as a
link; there the user agrees; it sends the user back with a code and with the state that the first
step has put into the session. So a code is of use only in the session that asked for it, once.
"""

from __future__ import annotations

import re
import time
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.contrib import admin, messages
from django.contrib.auth.decorators import permission_required
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.text import capfirst
from django.views.decorators.http import require_GET, require_POST

from inference_site.core.admin_pages.base_admin import log_action
from inference_site.mcp.access import NotUsable, allowed_addresses, unseal_secret
from inference_site.mcp.connections import disconnect, save_grant, why_ended
from inference_site.mcp.grants import Attempt, SiteClient, seal, unseal_attempt, unseal_client
from inference_site.mcp.models import McpConnection, McpServer

PERMISSION = "accounts.make_own_key"
_ATTEMPTS = "mcp_attempts"
"""The key of the session with the attempts that have begun: state, and the attempt, encrypted."""
_MAX_ATTEMPTS = 5
_MAX_ATTEMPT_S = 600
_ERROR = re.compile(r"[a-z_]{1,40}")


@permission_required(PERMISSION, raise_exception=True)
@require_GET
def my_connections(request: HttpRequest) -> HttpResponse:
    """Show the servers that the user may connect to, and to which they are connected."""
    return _page(request)


@permission_required(PERMISSION, raise_exception=True)
@require_POST
def connect(request: HttpRequest, pk: int) -> HttpResponse:
    """Begin to connect to a server: show where the user agrees. Nothing is connected yet."""
    # The SDK takes 50 MB; only processes that use it have it.
    from inference_site.mcp import authorization

    server = get_object_or_404(_servers(request), pk=pk)
    path = reverse("admin:my-connection-made")
    # At the site's address, not at one that a client has sent.
    back = f"{settings.SITE_URL}{path}" if settings.SITE_URL else request.build_absolute_uri(path)
    try:
        wanted = authorization.Wanted(
            url=server.url,
            redirect_uri=back,
            issuer=server.oauth_issuer,
            client_id=server.oauth_client_id,
            client_secret=unseal_secret(server.oauth_secret) if server.oauth_secret else "",
            scope=server.oauth_scope,
            registration=_registered(server),
        )
        begun = authorization.begin(wanted, allowed_addresses())
    except (NotUsable, authorization.AuthorizationFailed) as exc:
        messages.error(request, f"{server.label}: {str(exc).rstrip('.')}.")
        return HttpResponseRedirect(reverse("admin:my-connections"))
    if not server.oauth_client_id:
        McpServer.objects.filter(pk=server.pk).update(registration=seal(begun.client))
    attempt = Attempt(
        user_id=_user_id(request),
        server_id=server.pk,
        server_url=server.url,
        authorization_server=begun.authorization_server,
        client=begun.client,
        resource=begun.resource,
        scope=begun.scope,
        verifier=begun.verifier,
        began_at=time.time(),
    )
    attempts = {**request.session.get(_ATTEMPTS, {}), begun.state: seal(attempt)}
    request.session[_ATTEMPTS] = dict([*attempts.items()][-_MAX_ATTEMPTS:])
    host = urlsplit(begun.url).netloc.rpartition("@")[2]  # A name before it would mislead.
    return _page(request, going_to={"server": server, "url": begun.url, "host": host})


@permission_required(PERMISSION, raise_exception=True)
@require_GET
def connected(request: HttpRequest) -> HttpResponse:
    """Take the user back from the authorization server, and get the tokens for the code."""
    # The SDK takes 50 MB; only processes that use it have it.
    from inference_site.mcp import authorization

    back = HttpResponseRedirect(reverse("admin:my-connections"))
    attempts = request.session.get(_ATTEMPTS, {})
    sealed = attempts.pop(request.GET.get("state", ""), "")
    request.session[_ATTEMPTS] = attempts  # A state is of use once.
    attempt = _attempt(request, sealed)
    server = attempt and _servers(request).filter(pk=attempt.server_id, url=attempt.server_url)
    found = server.first() if server else None
    if attempt is None or found is None:
        messages.error(request, "This login did not begin here, or took too long. Connect again.")
        return back
    if error := request.GET.get("error"):
        named = error if _ERROR.fullmatch(error) else "an error"
        messages.error(request, f"{found.label}: the authorization server answered {named}.")
        return back
    code, issuer = request.GET.get("code", ""), request.GET.get("iss")
    try:
        grant = authorization.finish(attempt, code, issuer, allowed_addresses())
    except authorization.AuthorizationFailed as exc:
        messages.error(request, f"{found.label}: {exc}")
        return back
    save_grant(found, attempt.user_id, grant)
    log_action(request, found, "Connected to it.")
    messages.success(request, f"Connected to {found.label}.")
    return back


@permission_required(PERMISSION, raise_exception=True)
@require_POST
def end_connection(request: HttpRequest, pk: int) -> HttpResponse:
    """End the user's connection to a server, also there if the server has a way to."""
    own = McpConnection.objects.filter(user=_user_id(request)).select_related("server")
    connection = get_object_or_404(own, server=pk)
    server = connection.server
    if disconnect(connection):
        messages.success(request, f"Disconnected from {server.label}.")
    else:
        messages.warning(
            request,
            f"Disconnected from {server.label}: its tokens are deleted, but the server did not "
            "confirm it. To be sure, end the access there too.",
        )
    log_action(request, server, "Disconnected from it.")
    return HttpResponseRedirect(reverse("admin:my-connections"))


def _page(request: HttpRequest, going_to: dict[str, Any] | None = None) -> HttpResponse:
    own = {one.server_id: one for one in McpConnection.objects.filter(user=_user_id(request))}
    rows = []
    for server in _servers(request):
        connection = own.get(server.pk)
        if connection is None:
            state = {"label": "idle", "word": "not connected", "sentence": ""}
        elif reason := why_ended(server, connection):
            sentence = f"{capfirst(reason)}. Connect again."
            state = {"label": "failed", "word": "ended", "sentence": sentence}
        else:
            state = {"label": "active", "word": "connected", "sentence": "Your keys use it."}
        rows.append({"server": server, "connection": connection, "state": state})
    context = {
        **admin.site.each_context(request),
        "title": "My connections",
        "rows": rows,
        "going_to": going_to,
    }
    return TemplateResponse(request, "console/my_connections.html", context)


def _servers(request: HttpRequest) -> QuerySet[McpServer]:
    """Return the active servers that a project of the user may use, or the playground."""
    is_open = Q(projects=None) | Q(projects__members=_user_id(request))
    is_open |= Q(projects__is_playground=True)
    return McpServer.objects.filter(is_open, is_active=True, is_per_user=True).distinct()


def _registered(server: McpServer) -> SiteClient | None:
    """Return the client that the site has registered there. Without one, it registers again."""
    if not server.registration or server.oauth_client_id:
        return None
    try:
        return unseal_client(server.registration)
    except NotUsable:  # Another SECRET_KEY encrypted it.
        return None


def _attempt(request: HttpRequest, sealed: str) -> Attempt | None:
    """Return an attempt of the session, if it is the user's and recent."""
    if not sealed:
        return None
    try:
        attempt = unseal_attempt(sealed)
    except NotUsable:
        return None
    is_recent = attempt.began_at > time.time() - _MAX_ATTEMPT_S
    return attempt if is_recent and attempt.user_id == _user_id(request) else None


def _user_id(request: HttpRequest) -> int:
    return int(request.user.pk or 0)
