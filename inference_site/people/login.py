"""Logging in to the admin with a password: when no more is tried, and until when.

``AXES_FAILURE_LIMIT`` wrong passwords from one address lock the user name for that address, for
``AXES_COOLOFF_TIME`` (django-axes). PostgreSQL keeps that count for all web processes. ``tries.py``
has the limits of an address and of a user name.
"""

from __future__ import annotations

from typing import Any

from axes.models import AccessAttempt
from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.db.models import Max
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from unfold.forms import AuthenticationForm

from inference_site.admin_pages.labels import duration
from inference_site.people import tries
from inference_site.people.addresses import client_address


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
        if wait_s := tries.of_address(request):
            lock(request, wait_s)
            raise ValidationError(
                f"Too many logins from your address. Try again in {duration(wait_s)}."
            )
        if wait_s := tries.of_name(request, self.cleaned_data.get("username") or ""):
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
