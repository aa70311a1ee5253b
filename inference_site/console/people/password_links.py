"""Invitations and password resets: signed links, and the pages that send and open them.

A link is signed by ``SECRET_KEY`` and works once, because the password hash is part of what is
signed. It stops working after its lifetime, at the user's next login, and when a newer invitation
is made.
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

from inference_site.console.people.login import (
    RESETS_PER_ADDRESS,
    RESETS_PER_USER,
    count_address,
    lock_login,
    remember_browser,
    set_locked_status,
)
from inference_site.console.people.login_log import log_own_action
from inference_site.core.admin_pages.labels import duration

logger = logging.getLogger(__name__)


class LinkTokens(PasswordResetTokenGenerator):
    """Tokens of one kind of link, with its own lifetime; they are not valid as another kind.

    ``settings.PASSWORD_RESET_TIMEOUT`` must not be shorter than any lifetime.
    """

    def __init__(self, kind: str, lifetime: dt.timedelta) -> None:
        super().__init__()
        self.kind, self.lifetime = kind, lifetime
        self.key_salt = f"inference_site.console.people.{kind}"

    def check_token(self, user: Any, token: str | None) -> bool:
        """Return whether the token belongs to this user, is unused and has not expired."""
        if not super().check_token(user, token):
            return False
        created_s = base36_to_int(str(token).partition("-")[0])
        age_s = self._num_seconds(self._now()) - created_s
        return bool(age_s <= self.lifetime.total_seconds())


INVITATION = LinkTokens("invitation", dt.timedelta(days=7))
RESET = LinkTokens("reset", dt.timedelta(days=1))


def is_invited(user: User) -> bool:
    """Return whether the user has been invited and has not set a password yet."""
    return not user.has_usable_password() and user.last_login is None


def make_link(request: HttpRequest, user: User) -> tuple[str, LinkTokens]:
    """Return a link for this user and its kind; a new invitation makes earlier ones invalid."""
    if is_invited(user):
        # An unusable password has a random part, so replacing it invalidates earlier links. The
        # guard is for a user who sets a password at this moment.
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

    They are not while ``ALLOWED_HOSTS`` contains ``*``: the link takes its host from the request,
    so an attacker could have a token mailed that leads to the attacker's host.
    """
    return bool(settings.EMAIL_HOST) and "*" not in settings.ALLOWED_HOSTS


def mail_link(user: User, link: str, kind: LinkTokens) -> None:
    """Mail a link from a thread, so that response times do not show who has an account."""
    context = {"user": user, "link": link, "kind": kind.kind, "days": kind.lifetime.days}
    subject = "Your invitation" if kind is INVITATION else "Set a new password"
    text = render_to_string("people/link_mail.txt", context)
    mail = EmailMessage(f"Inference site: {subject}", text, settings.EMAIL_FROM, [user.email])

    def send() -> None:
        try:
            mail.send()
        except Exception as exc:  # noqa: BLE001  # A thread has no caller: the log must have it.
            logger.warning("a link for user %s was not mailed: %s", user.pk, type(exc).__name__)

    threading.Thread(target=send, name="mail").start()


class ResetForm(PasswordResetForm):
    """The form that requests a reset link by mail."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _style(self)

    def save(self, *_: Any, request: Any = None, **__: Any) -> None:
        """Mail a link to each active user who has this address and a password."""
        for user in self.get_users(self.cleaned_data["email"]):
            if not RESETS_PER_USER.seconds_to_wait(str(user.pk)):
                mail_link(user, *make_link(request, user))


class RequestResetView(PasswordResetView):
    """The page that mails a reset link; its response does not show whether the address is known."""

    form_class = ResetForm
    template_name = "people/ask_for_reset.html"
    success_url = reverse_lazy("admin:login")
    title = "Set a new password"

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        site = admin.site.each_context(self.request)
        return {**site, "sends_mail": sends_mail(), **super().get_context_data(**kwargs)}

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Mail a link, unless the client's address is over its limit or mail is off."""
        if not sends_mail():
            return self.get(request, *args, **kwargs)
        if wait_s := count_address(request, RESETS_PER_ADDRESS):
            lock_login(request, wait_s)
            form = self.get_form()
            form.add_error(None, f"Too many requests. Try again in {duration(wait_s)}.")
            refused = self.form_invalid(form)
            set_locked_status(request, refused)
            return refused
        return super().post(request, *args, **kwargs)

    def form_valid(self, form: Any) -> HttpResponse:
        """Show the same message for known and unknown addresses."""
        response = super().form_valid(form)
        text = "If a user of the console has this e-mail address, a link is on its way to it."
        messages.info(self.request, text)
        return response


class NewPasswordForm(SetPasswordForm):  # type: ignore[type-arg]  # Not generic at run time.
    """Two fields for a new password."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _style(self)


class SetPasswordView(PasswordResetConfirmView):
    """The page that a link opens. Setting the password logs the user in."""

    form_class = NewPasswordForm
    template_name = "people/set_password.html"
    success_url = reverse_lazy("admin:index")
    title = "Choose a password"

    def get_user(self, uidb64: str) -> Any:
        """Return the link's user; None if the user has been deactivated."""
        user = super().get_user(uidb64)
        return user if user is not None and user.is_active else None

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        context = {**admin.site.each_context(self.request), **super().get_context_data(**kwargs)}
        return context if self.validlink else {**context, "title": "This link does not work"}

    def form_valid(self, form: Any) -> HttpResponse:
        """Set the password and log in; of two concurrent requests, the second is refused."""
        with transaction.atomic():
            form.user = User.objects.select_for_update().get(pk=form.user.pk)
            token = self.request.session.get(INTERNAL_RESET_SESSION_TOKEN)
            self.validlink = self.token_generator.check_token(form.user, token)
            if not self.validlink:
                return self.render_to_response(self.get_context_data(form=None))
            response = super().form_valid(form)
            kind = getattr(self.token_generator, "kind", "")
            log_own_action(form.user, CHANGE, f"Set a password with a link ({kind}).")
            login(self.request, form.user, "django.contrib.auth.backends.ModelBackend")
        remember_browser(self.request, response)
        return response


def _style(form: forms.Form) -> None:
    for field in form.fields.values():
        field.widget.attrs["class"] = " ".join(INPUT_CLASSES)
