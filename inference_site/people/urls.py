"""Routes of the pages before a login, for the admin site."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path

from inference_site.people.password_links import INVITATION, RESET, AskForReset, SetPassword

_SINGLE_SIGN_ON = "inference_site.people.single_sign_on"


def urls() -> list[URLPattern]:
    """Return the routes; single sign-on is a 404 unless it is set up."""
    if settings.OIDC_ISSUER:
        import_module(_SINGLE_SIGN_ON)  # Before the process serves.
    invitation = SetPassword.as_view(token_generator=INVITATION)
    reset = SetPassword.as_view(token_generator=RESET)
    return [
        path("reset/", AskForReset.as_view(), name="admin_password_reset"),
        path("reset/<uidb64>/<token>/", reset, name="people_reset"),
        path("invitation/<uidb64>/<token>/", invitation, name="people_invitation"),
        path("single-sign-on/", _begin, name="single_sign_on"),
        path("single-sign-on/callback/", _callback, name="single_sign_on_callback"),
    ]


def _begin(request: HttpRequest) -> HttpResponse:
    return _step("Begin", request)


def _callback(request: HttpRequest) -> HttpResponse:
    return _step("Callback", request)


def _step(name: str, request: HttpRequest) -> HttpResponse:
    # Imported where it is used: its libraries take some ten megabytes.
    views: Any = import_module(_SINGLE_SIGN_ON)
    answer: HttpResponse = getattr(views, name).as_view()(request)
    return answer
