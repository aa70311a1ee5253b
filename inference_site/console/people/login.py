"""Password logins and their limits, which protect against guessing.

- django-axes: ``AXES_FAILURE_LIMIT`` wrong passwords for a user name from one address lock that
  pair for ``AXES_COOLOFF_TIME``. PostgreSQL holds the count.
- ``LOGINS_PER_ADDRESS``: attempts from one address, whatever the user name. Checking a password is
  slow by design, so this also bounds processor time.
- ``LOGINS_PER_USERNAME``: attempts for one user name from all addresses together. Browsers in which
  the user has logged in before (a signed cookie) are exempt, so an attacker who uses up these
  attempts does not lock the user out.

Redis counts the latter two for all web processes.
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass
from typing import Any

from axes.models import AccessAttempt
from django.conf import settings
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.db.models import Max
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from limits import RateLimitItemPerSecond
from limits.strategies import FixedWindowRateLimiter
from redis.exceptions import RedisError
from unfold.forms import AuthenticationForm

from inference_site.accounts.rate_limits import limit_storage
from inference_site.console.people.login_log import client_address
from inference_site.core.admin_pages.labels import duration

logger = logging.getLogger(__name__)

_COOKIE, _SALT, _YEAR_S = "known_browser", "known browser", 365 * 86_400


@dataclass(frozen=True, slots=True)
class AttemptLimit:
    """``max_attempts`` in ``window_s`` seconds; the window begins with the first attempt."""

    name: str
    max_attempts: int
    window_s: int

    def seconds_to_wait(self, subject: str | None) -> int:
        """Count an attempt; return the seconds until the next allowed one, 0 if allowed now.

        While Redis is unavailable, every attempt is allowed.
        """
        limiter, item = FixedWindowRateLimiter(limit_storage()), self._item
        try:
            if limiter.hit(item, self.name, str(subject)):
                return 0
            reset_time = limiter.get_window_stats(item, self.name, str(subject)).reset_time
        except RedisError as exc:
            logger.warning("an attempt is not counted: %s", exc)
            return 0
        return max(1, round(reset_time - time.time()))

    def reset(self, subject: str) -> None:
        """Delete the count of this subject."""
        try:
            limit_storage().clear(self._item.key_for(self.name, subject))
        except RedisError as exc:
            logger.warning("a count of attempts is not deleted: %s", exc)

    @property
    def _item(self) -> RateLimitItemPerSecond:
        return RateLimitItemPerSecond(self.max_attempts, self.window_s)


LOGINS_PER_ADDRESS = AttemptLimit("logins", 30, 60)
LOGINS_PER_USERNAME = AttemptLimit("logins-of", 50, 3_600)
RESETS_PER_ADDRESS = AttemptLimit("resets", 10, 600)
RESETS_PER_USER = AttemptLimit("resets-of", 3, 3_600)


def count_address(request: HttpRequest, limit: AttemptLimit = LOGINS_PER_ADDRESS) -> int:
    """Count an attempt from the client's address; return the seconds to wait, 0 if allowed."""
    return limit.seconds_to_wait(client_address(request))


def remember_browser(request: HttpRequest, response: HttpResponse) -> None:
    """Set the cookie that exempts this browser from the limit of its user's name."""
    if not request.user.is_authenticated:
        return
    digest = _digest(request.user.get_username())
    LOGINS_PER_USERNAME.reset(digest)
    response.set_signed_cookie(
        _COOKIE,
        digest,
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
    """The login form; its errors say when a locked login may be tried again.

    For each pair of user name and address it checks one password at a time. Otherwise concurrent
    attempts would all start before the first failure is counted.
    """

    def clean(self) -> dict[str, Any]:
        """Return the cleaned data of a successful login. Raise ValidationError otherwise."""
        if self.request is not None:
            self._check_limits(self.request)
        address = None if self.request is None else client_address(self.request)
        pair = f"login {address} {self.cleaned_data.get('username')}"
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))", [pair])
                has_lock = bool(cursor.fetchone()[0])
            if not has_lock:
                failure = ValidationError("Another login of this user is being checked. Try again.")
            else:
                try:
                    data: dict[str, Any] = super().clean()
                    return data
                except ValidationError as exc:
                    failure = exc
        raise failure  # Outside the transaction: an exception inside would undo the failure count.

    def confirm_login_allowed(self, user: User) -> None:
        """Note whether it is the user's first login, whose password somebody else has made."""
        super().confirm_login_allowed(user)
        if self.request is not None:
            self.request.is_first_login = user.last_login is None  # type: ignore[attr-defined]

    def _check_limits(self, request: HttpRequest) -> None:
        """Count this attempt. Raise ValidationError if the address or user name is over a limit."""
        if wait_s := count_address(request):
            lock_login(request, wait_s)
            raise ValidationError(
                f"Too many logins from your address. Try again in {duration(wait_s)}."
            )
        digest = _digest(self.cleaned_data.get("username") or "")
        known = request.get_signed_cookie(_COOKIE, default="", salt=_SALT, max_age=_YEAR_S)
        if known != digest and (wait_s := LOGINS_PER_USERNAME.seconds_to_wait(digest)):
            lock_login(request, wait_s)
            raise ValidationError(
                f"Too many wrong passwords for this user. Try again in {duration(wait_s)}, use a "
                "browser in which you have logged in before, or ask an administrator for a link."
            )

    def get_invalid_login_error(self) -> ValidationError:
        """Return the error of a failed login; if django-axes has locked it, with the wait."""
        if self.request is None or not _is_locked(self.request):
            error: ValidationError = super().get_invalid_login_error()
            return error
        attempts = AccessAttempt.objects.filter(
            username=self.cleaned_data.get("username"), ip_address=client_address(self.request)
        )
        last = attempts.aggregate(last=Max("attempt_time"))["last"] or timezone.now()
        left = last + settings.AXES_COOLOFF_TIME - timezone.now()
        wait_s = max(1, round(left.total_seconds()))
        lock_login(self.request, wait_s)
        return ValidationError(
            "Too many wrong passwords for this user from your address. "
            f"Try again in {duration(wait_s)}, or log in from another address.",
            code="locked_out",
        )


def is_first_login(request: HttpRequest) -> bool:
    """Return whether this request has logged a user in who had never logged in before."""
    return request.user.is_authenticated and getattr(request, "is_first_login", False)


def lock_login(request: HttpRequest, wait_s: int) -> None:
    """Mark the request as a locked login, for django-axes and ``set_locked_status``."""
    request.axes_locked_out = True  # type: ignore[attr-defined]  # The attribute that axes sets.
    request.locked_for_s = wait_s  # type: ignore[attr-defined]  # For the header Retry-After.


def set_locked_status(request: HttpRequest, response: HttpResponse) -> None:
    """Make the response to a locked login a 429 with ``Retry-After``."""
    if _is_locked(request):
        response.status_code = 429
        response["Retry-After"] = str(getattr(request, "locked_for_s", 60))


def _is_locked(request: HttpRequest) -> bool:
    return getattr(request, "axes_locked_out", False)
