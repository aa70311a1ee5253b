"""How often something may be tried. Redis counts, for all web processes.

An address may try ``OF_ADDRESS`` passwords a minute, whatever the user names: passwords are slow to
check by design. A user name may be tried ``OF_NAME`` times an hour from browsers in which its user
has never logged in, whatever the addresses. Browsers that know the user (a signed cookie) are not
counted, so whoever spends the tries of a name does not lock its user out of them.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import Any

from axes.models import AccessAttempt
from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.db.models import Max
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from redis.exceptions import RedisError
from unfold.forms import AuthenticationForm

from inference_site.admin_pages.labels import duration
from inference_site.people.login_log import client_address
from inference_site.storage.redis_clients import site_client

logger = logging.getLogger(__name__)

_COUNT = """
local tries = redis.call('INCR', KEYS[1])
if tries == 1 then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
return {tries, redis.call('TTL', KEYS[1])}
"""
_COOKIE, _SALT, _YEAR_S = "known_browser", "known browser", 365 * 86_400


@dataclass(frozen=True, slots=True)
class Limit:
    """So many tries in so many seconds, from the first of them on."""

    name: str
    most: int
    window_s: int

    def seconds_to_wait(self, who: str | None) -> int:
        """Count a try; return how long no more is taken, or 0. While Redis is away, 0."""
        try:
            counted: Any = site_client().eval(_COUNT, 1, f"{self.name}:{who}", self.window_s)
        except RedisError as exc:
            logger.warning("a try is not counted: %s", exc)
            return 0
        login, left_s = map(int, counted)
        return max(1, left_s) if login > self.most else 0

    def forget(self, who: str) -> None:
        """Begin to count anew."""
        try:
            site_client().delete(f"{self.name}:{who}")
        except RedisError as exc:
            logger.warning("tries are not forgotten: %s", exc)


OF_ADDRESS = Limit("logins", 30, 60)
OF_NAME = Limit("logins-of", 50, 3_600)
RESETS_OF_ADDRESS = Limit("resets", 10, 600)
RESETS_OF_USER = Limit("resets-of", 3, 3_600)


def of_address(request: HttpRequest, limit: Limit = OF_ADDRESS) -> int:
    """Count a try of the request's address; return how many seconds it must wait, or 0."""
    return limit.seconds_to_wait(client_address(request))


def of_name(request: HttpRequest, username: str) -> int:
    """Count a try of this user name, unless its user has logged in in this browser before."""
    known = request.get_signed_cookie(_COOKIE, default="", salt=_SALT, max_age=_YEAR_S)
    return 0 if known == _digest(username) else OF_NAME.seconds_to_wait(_digest(username))


def remember_browser(request: HttpRequest, response: HttpResponse) -> None:
    """Have the browser show from now on that the user who is logged in uses it."""
    if not request.user.is_authenticated:
        return
    name = _digest(request.user.get_username())
    OF_NAME.forget(name)
    response.set_signed_cookie(
        _COOKIE,
        name,
        salt=_SALT,
        max_age=_YEAR_S,
        path="/admin/",
        secure=settings.SESSION_COOKIE_SECURE,
        httponly=True,
        samesite="Lax",
    )


def _digest(username: str) -> str:
    return hashlib.sha256(username.encode(errors="replace")).hexdigest()[:32]


class LoginForm(AuthenticationForm):
    """The form of the login page, which says until when a login is locked.

    It checks one password of a user from an address at a time: those that come at once would all
    begin before the first of them is counted.
    """

    def clean(self) -> dict[str, Any]:
        """Return the data of a login that succeeds. Raise ValidationError for any other."""
        if self.request is not None:
            self._refuse_too_many(self.request)
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

    def _refuse_too_many(self, request: HttpRequest) -> None:
        """Raise ValidationError if the address, or the user name, was tried too often."""
        if wait_s := of_address(request):
            lock(request, wait_s)
            raise ValidationError(
                f"Too many logins from your address. Try again in {duration(wait_s)}."
            )
        if wait_s := of_name(request, self.cleaned_data.get("username") or ""):
            lock(request, wait_s)
            raise ValidationError(
                f"Too many wrong passwords for this user. Try again in {duration(wait_s)}, use a "
                "browser in which you have logged in before, or ask an administrator for a link."
            )

    def _is_alone(self) -> bool:
        """Keep others of this user and address out until the transaction ends, unless one is in."""
        address = None if self.request is None else client_address(self.request)
        pair = f"login {address} {self.cleaned_data.get('username')}"
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))", [pair])
            return bool(cursor.fetchone()[0])

    def get_invalid_login_error(self) -> ValidationError:
        """Return what the page says about a login that failed."""
        if self.request is None or not is_locked_out(self.request):
            error: ValidationError = super().get_invalid_login_error()
            return error
        wait_s = _locked_s(self.request, self.cleaned_data.get("username"))
        lock(self.request, wait_s)
        return ValidationError(
            "Too many wrong passwords for this user from your address. "
            f"Try again in {duration(wait_s)}, or log in from another address.",
            code="locked_out",
        )


def _locked_s(request: HttpRequest, username: str | None) -> int:
    """Return for how many seconds django-axes takes no password of this user and address."""
    tried = AccessAttempt.objects.filter(username=username, ip_address=client_address(request))
    last = tried.aggregate(last=Max("attempt_time"))["last"] or timezone.now()
    left = last + settings.AXES_COOLOFF_TIME - timezone.now()
    return max(1, round(left.total_seconds()))


def lock(request: HttpRequest, wait_s: int) -> None:
    """Note that the login that this request tries is locked for so many seconds."""
    request.axes_locked_out = True  # type: ignore[attr-defined]  # As axes marks it.
    request.locked_for_s = wait_s  # type: ignore[attr-defined]  # For the answer's header.


def is_locked_out(request: HttpRequest | None) -> bool:
    """Return whether the login that this request tried is locked."""
    return getattr(request, "axes_locked_out", False)


def mark_locked(request: HttpRequest, response: HttpResponse) -> None:
    """Make the answer to a login that is locked a 429 that says when to try again."""
    if is_locked_out(request):
        response.status_code = 429
        response["Retry-After"] = str(getattr(request, "locked_for_s", 60))
