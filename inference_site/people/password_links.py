"""Links with which people set a password: invitations, and resets.

A link is signed by ``SECRET_KEY`` and works once: what it signs changes with the password. It ends
after its lifetime, with the next login, and when a newer invitation is made.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE
from django.contrib.auth import login
from django.contrib.auth.forms import PasswordResetForm, SetPasswordForm
from django.contrib.auth.hashers import make_password
from django.contrib.auth.models import User
from django.contrib.auth.tokens import PasswordResetTokenGenerator
from django.contrib.auth.views import (
    INTERNAL_RESET_SESSION_TOKEN,
    PasswordResetConfirmView,
    PasswordResetView,
)
from django.core.mail import EmailMessage
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.urls import reverse, reverse_lazy
from django.utils.encoding import force_bytes
from django.utils.http import base36_to_int, urlsafe_base64_encode
from unfold.widgets import INPUT_CLASSES

from inference_site.admin_pages.labels import duration
from inference_site.people.login import (
    RESETS_OF_ADDRESS,
    RESETS_OF_USER,
    lock,
    mark_locked,
    of_address,
    remember_browser,
)
from inference_site.people.login_log import write

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


_BACKEND = "django.contrib.auth.backends.ModelBackend"


class ResetForm(PasswordResetForm):
    """The form that asks for a link by mail."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _style(self)

    def save(self, *_: Any, request: Any = None, **__: Any) -> None:
        """Mail a link to each active user with this address and a password."""
        for user in self.get_users(self.cleaned_data["email"]):
            if not RESETS_OF_USER.seconds_to_wait(str(user.pk)):
                mail_link(user, *make_link(request, user))


class AskForReset(PasswordResetView):
    """The page that mails a link. Its answer does not tell whether the address is known."""

    form_class = ResetForm
    template_name = "people/ask_for_reset.html"
    success_url = reverse_lazy("admin:login")
    title = "Set a new password"

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        """Return what the template shows."""
        site = admin.site.each_context(self.request)
        return {**site, "sends_mail": sends_mail(), **super().get_context_data(**kwargs)}

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Mail a link, unless the address asks too often or the site sends no mail."""
        if not sends_mail():
            return self.get(request, *args, **kwargs)
        if wait_s := of_address(request, RESETS_OF_ADDRESS):
            lock(request, wait_s)
            form = self.get_form()
            form.add_error(None, f"Too many requests. Try again in {duration(wait_s)}.")
            refused = self.form_invalid(form)
            mark_locked(request, refused)
            return refused
        return super().post(request, *args, **kwargs)

    def form_valid(self, form: Any) -> HttpResponse:
        """Say the same to everybody."""
        answer = super().form_valid(form)
        text = "If a user of the console has this e-mail address, a link is on its way to it."
        messages.info(self.request, text)
        return answer


class NewPasswordForm(SetPasswordForm):  # type: ignore[type-arg]  # Not generic at run time.
    """Two fields for a new password."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _style(self)


class SetPassword(PasswordResetConfirmView):
    """The page that a link leads to. Whoever sets the password is logged in."""

    form_class = NewPasswordForm
    template_name = "people/set_password.html"
    success_url = reverse_lazy("admin:index")
    title = "Choose a password"

    def get_user(self, uidb64: str) -> Any:
        """Return the user of the link; nobody if the user has been deactivated."""
        user = super().get_user(uidb64)
        return user if user is not None and user.is_active else None

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        """Return what the template shows."""
        context = {**admin.site.each_context(self.request), **super().get_context_data(**kwargs)}
        return context if self.validlink else {**context, "title": "This link does not work"}

    def form_valid(self, form: Any) -> HttpResponse:
        """Set the password and log in; of two that do so at once, one finds the link used."""
        with transaction.atomic():
            # The page has a form only with a user.
            form.user = User.objects.select_for_update().get(pk=form.user.pk)
            token = self.request.session.get(INTERNAL_RESET_SESSION_TOKEN)
            self.validlink = self.token_generator.check_token(form.user, token)
            if not self.validlink:
                return self.render_to_response(self.get_context_data(form=None))
            answer = super().form_valid(form)
            kind = getattr(self.token_generator, "kind", "")
            write(form.user, CHANGE, f"Set a password with a link ({kind}).")
            login(self.request, form.user, _BACKEND)
        remember_browser(self.request, answer)
        return answer


def _style(form: forms.Form) -> None:
    for field in form.fields.values():
        field.widget.attrs["class"] = " ".join(INPUT_CLASSES)
