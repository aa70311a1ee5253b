"""Where a login comes from."""

from __future__ import annotations

import ipaddress
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.contrib.auth.signals import user_logged_in, user_logged_out, user_login_failed
from django.http import HttpRequest

_IPV6_SITE = 64
"""A subscriber has a network of this many bits, and all addresses in it."""


def client_address(request: HttpRequest) -> str | None:
    """Return the address that a request comes from; of an IPv6 address, its network.

    The header ``X-Forwarded-For`` counts as far as each proxy that added to it is in
    ``TRUSTED_PROXIES``; what comes from further away anybody may have written.
    """
    client = _parsed(request.META.get("REMOTE_ADDR", ""))
    hops = request.headers.get("X-Forwarded-For", "").split(",")
    while hops and client is not None and _is_trusted(client):
        earlier = _parsed(hops.pop())
        if earlier is None:
            break
        client = earlier
    if isinstance(client, ipaddress.IPv6Address):
        client = ipaddress.ip_network((client, _IPV6_SITE), strict=False).network_address
    return None if client is None else str(client)


def _parsed(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text.strip())
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_trusted(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return any(address in network for network in settings.TRUSTED_PROXIES)


def one_line(username: str | None, address: str | None, *_: Any) -> str:
    """Return what the log says of a login: on one line, whatever the name is."""
    return f"user {username!a} from {address}"


LOGIN, LOGIN_FAILED, LOGOUT = 4, 5, 6
"""Action flags of the audit log, after the three of Django."""
LABELS = {LOGIN: "Login", LOGIN_FAILED: "Failed login", LOGOUT: "Logout"}
SSO_BACKEND = "inference_site.people.single_sign_on.SingleSignOn"


def connect() -> None:
    """Listen to Django's signals."""
    user_logged_in.connect(_logged_in, dispatch_uid="people.logged_in")
    user_login_failed.connect(_failed, dispatch_uid="people.login_failed")
    user_logged_out.connect(_logged_out, dispatch_uid="people.logged_out")


def write(user: Any, flag: int, message: str) -> None:
    """Write an entry about a user, by that user."""
    from inference_site.admin_pages.audit import log_entry  # It needs the models.

    log_entry(user.pk, user, message, flag)


def _logged_in(sender: Any, request: HttpRequest, user: Any, **_: Any) -> None:
    if _is_asked(request):
        how = "single sign-on" if getattr(user, "backend", "") == SSO_BACKEND else "password"
        write(user, LOGIN, f"By {how}, from {client_address(request)}.")


def _failed(
    sender: Any, credentials: dict[str, Any], request: HttpRequest | None = None, **_: Any
) -> None:
    name = str(credentials.get("username") or "").replace("\0", "")
    if request is None or not name:
        return
    user = get_user_model()._default_manager.filter(username=name).first()
    if user is not None:
        is_locked = getattr(request, "axes_locked_out", False)
        why = "locked" if is_locked else "wrong password" if user.is_active else "not active"
        write(user, LOGIN_FAILED, f"From {client_address(request)}: {why}.")


def _logged_out(sender: Any, request: HttpRequest, user: Any, **_: Any) -> None:
    if user is not None and _is_asked(request):
        write(user, LOGOUT, f"From {client_address(request)}.")


def _is_asked(request: HttpRequest | None) -> bool:
    return request is not None and "REMOTE_ADDR" in request.META
