"""Routes of the pages before a login; ``ConsoleSite.extra_urls`` adds them to the admin."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path

from inference_site.console.people.password_links import (
    INVITATION,
    RESET,
    RequestResetView,
    SetPasswordView,
)

_SINGLE_SIGN_ON = "inference_site.console.people.single_sign_on"


def urls() -> list[URLPattern]:
    """Return the routes; those of single sign-on are a 404 unless it is configured."""
    if settings.OIDC_ISSUER:
        import_module(_SINGLE_SIGN_ON)  # Now, so that no request waits for it.
    invitation = SetPasswordView.as_view(token_generator=INVITATION)
    reset = SetPasswordView.as_view(token_generator=RESET)
    return [
        path("reset/", RequestResetView.as_view(), name="admin_password_reset"),
        path("reset/<uidb64>/<token>/", reset, name="people_reset"),
        path("invitation/<uidb64>/<token>/", invitation, name="people_invitation"),
        path("single-sign-on/", _single_sign_on("StartView"), name="single_sign_on"),
        path(
            "single-sign-on/callback/",
            _single_sign_on("CallbackView"),
            name="single_sign_on_callback",
        ),
    ]


def _single_sign_on(view_name: str) -> Any:
    """Return a view that imports its class at the first request: its libraries take 10 MB."""

    def view(request: HttpRequest) -> HttpResponse:
        views: Any = import_module(_SINGLE_SIGN_ON)
        response: HttpResponse = getattr(views, view_name).as_view()(request)
        return response

    return view
