"""The admin site: unfold's, with the pages before a login and the console's own pages added."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from http import HTTPStatus
from importlib import import_module
from typing import Any, cast
from urllib.parse import urlsplit

from django.conf import settings
from django.contrib import messages
from django.contrib.admin.models import CHANGE
from django.contrib.auth.views import redirect_to_login
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_GET, require_POST
from unfold.sites import UnfoldAdminSite

from inference_site.console import palette
from inference_site.console.downloads import export
from inference_site.console.fleet_page import (
    ask_before,
    fleet_context,
    model_context,
    request_action,
    stop_pull,
)
from inference_site.console.my_connections import (
    connect,
    connected,
    end_connection,
    my_connections,
)
from inference_site.console.my_keys import act_on_my_key, my_keys
from inference_site.console.parts_page import parts_context
from inference_site.console.people.login import is_first_login, remember_browser, set_locked_status
from inference_site.console.people.login_log import log_own_action
from inference_site.console.people.password_links import (
    INVITATION,
    RESET,
    RequestResetView,
    SetPasswordView,
)
from inference_site.console.playground.views import playground_context
from inference_site.console.queue_page import queue_context, run_action, stop_chosen
from inference_site.console.request_columns import choose_columns
from inference_site.console.request_log_page import requests_context, save_filter
from inference_site.console.request_panel import request_page
from inference_site.console.settings_page import settings_page
from inference_site.console.usage_page import home_context, usage_download

_SINGLE_SIGN_ON = "inference_site.console.people.single_sign_on"


def _login_urls() -> list[URLPattern]:
    """Return the routes before a login; those of single sign-on are a 404 unless configured."""
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


def _page_of_form(request: HttpRequest) -> str:
    """Return the address of the console's page that has sent a form; without one the home page."""
    page = request.META.get("HTTP_REFERER", "")
    index = reverse("admin:index")
    if not url_has_allowed_host_and_scheme(page, {request.get_host()}):
        return index
    parts = urlsplit(page)
    return parts._replace(scheme="", netloc="").geturl() if parts.path.startswith(index) else index


class ConsoleSite(UnfoldAdminSite):
    """The admin site of the console; its index shows usage."""

    index_title = "Usage"
    index_template = "console/home.html"
    login_template = "people/login.html"
    password_change_template = "people/change_password.html"  # noqa: S105
    empty_value_display = "—"  # As on the console's own pages.

    def extra_urls(self) -> list[URLPattern]:
        """Return the routes of pages that belong to no Django model."""
        own, page = self.admin_view, self._page
        fleet = page("Models and workers", fleet_context, "fleet")
        playground = page("Playground", playground_context, "playground")
        requests = page("Requests", requests_context, "requests")
        model = page("Model", model_context, "model")
        return [
            *_login_urls(),
            path("usage.csv", own(require_GET(usage_download)), {"form": "csv"}, name="usage-csv"),
            path(
                "usage.jsonl",
                own(require_GET(usage_download)),
                {"form": "jsonl"},
                name="usage-jsonl",
            ),
            path("queue/", own(page("Queue", queue_context, "queue")), name="queue"),
            path("queue/stop/", own(require_POST(stop_chosen)), name="queue-stop"),
            path("queue/<int:pk>/", own(require_POST(run_action)), name="queue-action"),
            path("fleet/", own(fleet), name="fleet"),
            path("playground/", own(playground), name="playground"),
            path("parts/", own(page("Parts of the console", parts_context, "parts")), name="parts"),
            path("settings/", own(settings_page), name="settings"),
            path("my-keys/", own(my_keys), name="my-keys"),
            path(
                "my-keys/<int:pk>/<str:action>/",
                own(act_on_my_key),
                name="my-key-act",
            ),
            path("my-connections/", own(my_connections), name="my-connections"),
            path("my-connections/back/", own(connected), name="my-connection-made"),
            path("my-connections/<int:pk>/connect/", own(connect), name="my-connection-begin"),
            path("my-connections/<int:pk>/end/", own(end_connection), name="my-connection-end"),
            path("requests/", own(requests), name="requests"),
            path("requests/<str:table>/<int:pk>/", own(request_page), name="request"),
            path("requests/export/", own(require_GET(export)), name="requests-export"),
            path("requests/columns/", own(require_POST(choose_columns)), name="requests-columns"),
            path("requests/filters/", own(require_POST(save_filter)), name="requests-filters"),
            path("fleet/action/", own(require_POST(request_action)), name="fleet-action"),
            path("fleet/question/", own(require_GET(ask_before)), name="fleet-question"),
            path("fleet/models/<path:model>/", own(model), name="model"),
            path("fleet/pulls/<int:pk>/stop/", own(require_POST(stop_pull)), name="pull-stop"),
        ]

    def admin_view(self, view: Callable[..., Any], cacheable: bool = False) -> Any:
        """Return the view, for users who are logged in.

        A form that is sent after the end of the session does nothing, and leads to its page again:
        most addresses that forms are sent to have no page to go on to after the login.
        """
        for_users = super().admin_view(view, cacheable)

        def shown(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            is_form = request.method == "POST" and request.path != reverse("admin:logout")
            if not is_form or self.has_permission(request):
                return for_users(request, *args, **kwargs)
            messages.warning(
                request, "You were logged out, so nothing was done. Log in and try again."
            )
            return redirect_to_login(_page_of_form(request), reverse("admin:login"))

        return update_wrapper(shown, for_users)

    def index(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> TemplateResponse:
        """Show usage, the queue and the workers."""
        context = {**home_context(request), **(extra_context or {})}
        found: TemplateResponse = super().index(request, context)
        return found

    def search(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> TemplateResponse:
        """Return the lines of the command palette for the term ``s``; see ``palette.search``."""
        entries = palette.search(request, request.GET.get("s", ""))
        shown = {"entries": entries, **(extra_context or {})}
        page = TemplateResponse(request, "console/palette.html", shown)
        page["Cache-Control"] = "no-store"
        return page

    def login(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the login page, or log in; answer with a 429 while the user is locked.

        The first login with a password leads to the page where the user chooses another.
        """
        for name in ("HTTP_USER_AGENT", "HTTP_ACCEPT"):  # PostgreSQL stores no NUL in texts.
            request.META[name] = request.META.get(name, "").replace("\0", "")
        sign_on = {"single_sign_on": settings.OIDC_NAME if settings.OIDC_ISSUER else ""}
        page: HttpResponse = super().login(request, {**sign_on, **(extra_context or {})})
        set_locked_status(request, page)
        if request.method == "POST":
            remember_browser(request, page)
            if is_first_login(request):
                messages.info(request, "This is your first login. Choose a password of your own.")
                own = redirect("admin:password_change")
                own.cookies = page.cookies
                return own
        return page

    def password_change(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> TemplateResponse:
        """Let users change their own passwords, and log that."""
        page = super().password_change(request, extra_context)
        if request.method == "POST" and page.status_code == HTTPStatus.FOUND:
            log_own_action(request.user, CHANGE, "Changed the own password.")
        return cast(TemplateResponse, page)  # Or a redirect, which Django's types omit.

    def _page(
        self, title: str, context: Callable[..., dict[str, Any]], template: str
    ) -> Callable[..., HttpResponse]:
        """Return the view that renders one page."""

        def view(request: HttpRequest, **arguments: str) -> HttpResponse:
            own = context(request, **arguments)
            shown = {**self.each_context(request), "title": title, **own}
            return TemplateResponse(request, f"console/{template}.html", shown)

        return view
