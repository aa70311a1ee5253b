"""The admin's sidebar: links to the pages that the user may open."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.templatetags.static import static
from django.urls import reverse

_MODELS: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    (
        "Requests",
        (
            ("Responses", "chat", "responses_api.storedresponse"),
            ("Conversations", "forum", "responses_api.conversation"),
            ("Chat completions", "sms", "completions.storedcompletion"),
            ("Generations", "receipt_long", "generations.generation"),
        ),
    ),
    (
        "Alarms",
        (
            ("Alarms", "notifications", "alarms.alarm"),
            ("Rules", "rule", "alarms.rule"),
            ("Recipients", "forward_to_inbox", "alarms.recipient"),
            ("Notices", "outbox", "alarms.notice"),
        ),
    ),
    (
        "Access",
        (
            ("Projects", "workspaces", "accounts.project"),
            ("API keys", "key", "accounts.apikey"),
            ("Budgets", "savings", "accounts.budget"),
            ("Users", "person", "auth.user"),
            ("Roles", "group", "auth.group"),
            ("Audit log", "history", "admin.logentry"),
            ("Failed logins", "lock", "axes.accessfailurelog"),
        ),
    ),
)


def favicon(_: HttpRequest) -> str:
    """Return the address of the site's icon."""
    return static("console/favicon.svg")


def navigation(request: HttpRequest) -> list[dict[str, Any]]:
    """Return the groups of links; the theme hides groups without links."""
    sees_queue = request.user.has_perm("generations.view_generation")
    sees_settings = request.user.has_perm("site_settings.view_sitesettings")
    operation = [
        _link("Usage", "monitoring", reverse("admin:index"), shown=True),
        _link("Queue", "low_priority", reverse("admin:queue"), shown=sees_queue),
        _link("Models and workers", "dns", reverse("admin:fleet"), shown=sees_queue),
        _link("Settings", "settings", reverse("admin:settings"), shown=sees_settings),
        _link("Playground", "science", reverse("admin:playground"), shown=True),
    ]
    groups: list[dict[str, Any]] = [{"items": operation}]
    for title, models in _MODELS:
        items = [_to_list(request, *model) for model in models]
        if title == "Requests":
            log = reverse("admin:requests")
            items.insert(0, _link("Request log", "manage_search", log, shown=sees_queue))
        groups.append({"title": title, "items": items})
    return groups


def _link(title: str, icon: str, address: str, *, shown: bool) -> dict[str, Any]:
    return {"title": title, "icon": icon, "link": address, "permission": lambda _: shown}


def _to_list(request: HttpRequest, title: str, icon: str, name: str) -> dict[str, Any]:
    app, model = name.split(".")
    address = reverse(f"admin:{app}_{model}_changelist")
    return _link(title, icon, address, shown=request.user.has_perm(f"{app}.view_{model}"))


def landmarks(_: HttpRequest) -> str:
    """Return the address of the script that adds what the theme lacks for keyboards."""
    return static("console/landmarks.js")


def stylesheet(_: HttpRequest) -> str:
    """Return the address of the console's own stylesheet."""
    return static("console/admin.css")
