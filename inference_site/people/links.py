"""Links with which people set a password: invitations, and resets.

A link is signed by ``SECRET_KEY`` and works once: what it signs changes with the password. It ends
after its lifetime, with the next login, and when a newer invitation is made.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
from typing import Any

from django.conf import settings
from django.contrib.auth.hashers import make_password
from django.contrib.auth.models import User
from django.contrib.auth.tokens import PasswordResetTokenGenerator
from django.core.mail import EmailMessage
from django.http import HttpRequest
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils.encoding import force_bytes
from django.utils.http import base36_to_int, urlsafe_base64_encode

logger = logging.getLogger(__name__)


class LinkTokens(PasswordResetTokenGenerator):
    """Tokens of one kind of link: with a lifetime of its own, and no use as another kind.

    ``settings.PASSWORD_RESET_TIMEOUT`` must not be shorter than any lifetime.
    """

    def __init__(self, kind: str, lifetime: dt.timedelta) -> None:
        super().__init__()
        self.kind, self.lifetime = kind, lifetime
        self.key_salt = f"inference_site.people.{kind}"

    def check_token(self, user: Any, token: str | None) -> bool:
        """Return whether the token is of this user, unused and young enough."""
        if not super().check_token(user, token):
            return False
        made = base36_to_int(str(token).partition("-")[0])
        age_s = self._num_seconds(self._now()) - made
        return bool(age_s <= self.lifetime.total_seconds())


INVITATION = LinkTokens("invitation", dt.timedelta(days=7))
RESET = LinkTokens("reset", dt.timedelta(days=1))


def is_invited(user: User) -> bool:
    """Return whether the user has been invited, and has not set a password yet."""
    return not user.has_usable_password() and user.last_login is None


def make_link(request: HttpRequest, user: User) -> tuple[str, LinkTokens]:
    """Return a link for this user, and its kind; an invitation ends those made before it."""
    if is_invited(user):
        # What stands for no password has a random part. The user may be choosing one just now.
        old, user.password = user.password, make_password(None)
        if not User.objects.filter(pk=user.pk, password=old).update(password=user.password):
            user.refresh_from_db()
    kind = INVITATION if is_invited(user) else RESET
    path = reverse(
        f"admin:people_{kind.kind}",
        args=[urlsafe_base64_encode(force_bytes(user.pk)), kind.make_token(user)],
    )
    return request.build_absolute_uri(path), kind


def sends_mail() -> bool:
    """Return whether links are mailed.

    With ``*`` in ``ALLOWED_HOSTS`` they are not: whoever asks for a reset could name the host that
    the mailed link, with its token, leads to.
    """
    return bool(settings.EMAIL_HOST) and "*" not in settings.ALLOWED_HOSTS


def mail_link(user: User, link: str, kind: LinkTokens) -> None:
    """Mail a link on a thread: how long that takes must not tell who has an account."""
    context = {"user": user, "link": link, "kind": kind.kind, "days": kind.lifetime.days}
    subject = "Your invitation" if kind is INVITATION else "Set a new password"
    text = render_to_string("people/link_mail.txt", context)
    mail = EmailMessage(f"Inference site: {subject}", text, settings.EMAIL_FROM, [user.email])
    threading.Thread(target=_send, args=(mail, user.pk), name="mail").start()


def _send(mail: EmailMessage, user_id: int) -> None:
    try:
        mail.send()
    except Exception as exc:  # noqa: BLE001  # Whatever it is, the log must say it.
        logger.warning("a link for user %s was not mailed: %s", user_id, type(exc).__name__)
