"""Login events in the audit log, with the client's address.

An audit entry belongs to a user, so attempts with unknown user names are only on the page *Failed
logins*. Sessions that a management command creates are not logged as logins.
"""

from __future__ import annotations

import ipaddress
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.contrib.auth.signals import user_logged_in, user_logged_out, user_login_failed
from django.dispatch import receiver
from django.http import HttpRequest

LOGIN, LOGIN_FAILED, LOGOUT = 4, 5, 6
"""Action flags of the audit log; Django uses 1 to 3."""
LABELS = {LOGIN: "Login", LOGIN_FAILED: "Failed login", LOGOUT: "Logout"}
SSO_BACKEND = "inference_site.console.people.single_sign_on.SingleSignOnBackend"
_IPV6_PREFIX_BITS = 64
"""Providers assign an IPv6 subscriber a network of this prefix length."""


def client_address(request: HttpRequest) -> str | None:
    """Return the client's address; for IPv6, its /64 network.

    ``X-Forwarded-For`` is read from the right, and only while the hop that added the entry is in
    ``TRUSTED_PROXIES``: anybody can write the entries further left.
    """
    client = _parse_address(request.META.get("REMOTE_ADDR", ""))
    hops = request.headers.get("X-Forwarded-For", "").split(",")
    while (
        hops
        and client is not None
        and any(client in network for network in settings.TRUSTED_PROXIES)
    ):
        previous = _parse_address(hops.pop())
        if previous is None:
            break
        client = previous
    if isinstance(client, ipaddress.IPv6Address):
        client = ipaddress.ip_network((client, _IPV6_PREFIX_BITS), strict=False).network_address
    return None if client is None else str(client)


def _parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text.strip())
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def describe_attempt(username: str | None, address: str | None, *_: Any) -> str:
    """Return the text for django-axes' log: one line, even if the user name has line breaks."""
    return f"user {username!a} from {address}"


def log_own_action(user: Any, flag: int, message: str) -> None:
    """Write an audit entry about a user, with the same user as its author."""
    from inference_site.core.admin_pages.base_admin import log_entry  # Needs the loaded models.

    log_entry(user.pk, user, message, flag)


@receiver(user_logged_in, dispatch_uid="people.logged_in")
def _on_login(sender: Any, request: HttpRequest, user: Any, **_: Any) -> None:
    if _is_from_client(request):
        how = "single sign-on" if getattr(user, "backend", "") == SSO_BACKEND else "password"
        log_own_action(user, LOGIN, f"By {how}, from {client_address(request)}.")


@receiver(user_login_failed, dispatch_uid="people.login_failed")
def _on_failed_login(
    sender: Any, credentials: dict[str, Any], request: HttpRequest | None = None, **_: Any
) -> None:
    name = str(credentials.get("username") or "").replace("\0", "")
    if request is None or not name:
        return
    user = get_user_model()._default_manager.filter(username=name).first()
    if user is not None:
        is_locked = getattr(request, "axes_locked_out", False)
        why = "locked" if is_locked else "wrong password" if user.is_active else "not active"
        log_own_action(user, LOGIN_FAILED, f"From {client_address(request)}: {why}.")


@receiver(user_logged_out, dispatch_uid="people.logged_out")
def _on_logout(sender: Any, request: HttpRequest, user: Any, **_: Any) -> None:
    if user is not None and _is_from_client(request):
        log_own_action(user, LOGOUT, f"From {client_address(request)}.")


def _is_from_client(request: HttpRequest | None) -> bool:
    return request is not None and "REMOTE_ADDR" in request.META
