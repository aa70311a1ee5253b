"""The pages before a login: asking for a reset, and setting a password with a link."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE
from django.contrib.auth import login
from django.contrib.auth.forms import PasswordResetForm, SetPasswordForm
from django.contrib.auth.models import User
from django.contrib.auth.views import (
    INTERNAL_RESET_SESSION_TOKEN,
    PasswordResetConfirmView,
    PasswordResetView,
)
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.urls import reverse_lazy
from unfold.widgets import INPUT_CLASSES

from inference_site.admin_pages.labels import duration
from inference_site.people import tries
from inference_site.people.links import mail_link, make_link, sends_mail
from inference_site.people.login import lock, mark_locked
from inference_site.people.login_log import write

_BACKEND = "django.contrib.auth.backends.ModelBackend"


class ResetForm(PasswordResetForm):
    """The form that asks for a link by mail."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _style(self)

    def save(self, *_: Any, request: Any = None, **__: Any) -> None:
        """Mail a link to each active user with this address and a password."""
        for user in self.get_users(self.cleaned_data["email"]):
            if not tries.RESETS_OF_USER.seconds_to_wait(str(user.pk)):
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
        if wait_s := tries.of_address(request, tries.RESETS_OF_ADDRESS):
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
        tries.remember_browser(self.request, answer)
        return answer


def _style(form: forms.Form) -> None:
    for field in form.fields.values():
        field.widget.attrs["class"] = " ".join(INPUT_CLASSES)
