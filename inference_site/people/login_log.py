"""Logins, failed logins and logouts in the audit log.

An entry belongs to a user, so tries of names that nobody has are only on the page *Failed logins*.
A session that no request has made, as of a command, is nobody's login.
"""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.signals import user_logged_in, user_logged_out, user_login_failed
from django.http import HttpRequest

from inference_site.people.addresses import client_address

LOGIN, LOGIN_FAILED, LOGOUT = 4, 5, 6
"""Action flags of the audit log, after the three of Django."""
LABELS = {LOGIN: "Login", LOGIN_FAILED: "Failed login", LOGOUT: "Logout"}
SSO_BACKEND = "inference_site.people.single_sign_on.flow.SingleSignOn"


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
