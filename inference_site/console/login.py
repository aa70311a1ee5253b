"""Logging in to the admin: who tries, and when no more is tried (django-axes).

``AXES_FAILURE_LIMIT`` wrong passwords from one address lock the user name for that address, for
``AXES_COOLOFF_TIME``. Nobody locks others out: they log in from their own addresses. PostgreSQL
keeps the count for all web processes.

Passwords are slow to check by design, so an address has ``_TRIES_A_MINUTE`` of all user names
together. Redis counts them.
"""

from __future__ import annotations

import ipaddress
import logging
from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.http import HttpRequest
from redis.exceptions import RedisError
from unfold.forms import AuthenticationForm

from inference_site.storage.redis_clients import site_client

logger = logging.getLogger(__name__)

_TRIES_A_MINUTE, _MINUTE_S = 30, 60
_COUNT = """
local tries = redis.call('INCR', KEYS[1])
if tries == 1 then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
return tries
"""
_IPV6_SITE = 64
"""A subscriber has a network of this many bits, and all addresses in it."""


class LoginForm(AuthenticationForm):
    """The form of the login page, which says when a login is locked.

    It checks one password of a user from an address at a time: those that come at once would all
    begin before the first of them is counted.
    """

    def clean(self) -> dict[str, Any]:
        """Return the data of a login that succeeds. Raise ValidationError for any other."""
        if self.request is not None and _has_too_many_tries(self.request):
            self.request.axes_locked_out = True  # type: ignore[attr-defined]  # As axes marks it.
            raise ValidationError("Too many logins from your address. Wait a minute.")
        with transaction.atomic():
            if not self._is_alone():
                failure = ValidationError("Another login of this user is being checked. Try again.")
            else:
                try:
                    data: dict[str, Any] = super().clean()
                    return data
                except ValidationError as exc:
                    failure = exc
        raise failure  # After the count of failures is committed.

    def _is_alone(self) -> bool:
        """Keep others of this user and address out until the transaction ends, unless one is in."""
        address = None if self.request is None else client_address(self.request)
        pair = f"login {address} {self.cleaned_data.get('username')}"
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))", [pair])
            return bool(cursor.fetchone()[0])

    def get_invalid_login_error(self) -> ValidationError:
        """Return what the page says about a login that failed."""
        if is_locked_out(self.request):
            minutes = settings.AXES_COOLOFF_TIME.seconds // 60
            return ValidationError(
                "Too many wrong passwords for this user from your address. "
                f"Wait {minutes} minutes, or log in from another address.",
                code="locked_out",
            )
        error: ValidationError = super().get_invalid_login_error()
        return error


def is_locked_out(request: HttpRequest | None) -> bool:
    """Return whether the login that this request tried is locked."""
    return getattr(request, "axes_locked_out", False)


def _has_too_many_tries(request: HttpRequest) -> bool:
    """Count a login of this request's address; return whether there were too many in a minute."""
    try:
        tries: Any = site_client().eval(_COUNT, 1, f"logins:{client_address(request)}", _MINUTE_S)
    except RedisError as exc:
        logger.warning("a login is not counted: %s", exc)
        return False
    return int(tries) > _TRIES_A_MINUTE


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
