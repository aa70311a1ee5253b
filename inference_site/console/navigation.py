"""The menu of the admin: links to the pages that the user may open."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.http import HttpRequest, QueryDict
from django.urls import reverse

from inference_site.console.request_filters import LogFilters, filters_of, tabs_of
from inference_site.console.tiles import VIEW_REQUESTS

# Groups of lists: title, icon and model of each.
_MODELS: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    (
        "Requests",
        (
            ("Conversations", "forum", "responses_api.conversation"),
            ("Approvals", "approval", "responses_api.mcpapproval"),
            ("Prompts", "edit_note", "responses_api.prompttemplate"),
            ("Cases", "fact_check", "cases.caseset"),
            ("Batches", "inventory_2", "batches.batch"),
            ("Files", "description", "files.storedfile"),
            ("Vector stores", "dataset", "vector_stores.vectorstore"),
        ),
    ),
    (
        "Alarms and events",
        (
            ("Alarms", "notifications", "alarms.alarm"),
            ("Rules", "rule", "alarms.rule"),
            ("Endpoints", "forward_to_inbox", "outbox.endpoint"),
            ("Messages", "outbox", "outbox.message"),
        ),
    ),
    (
        "Access",
        (
            ("Projects", "workspaces", "accounts.project"),
            ("API keys", "key", "accounts.apikey"),
            ("Budgets", "savings", "accounts.budget"),
            ("MCP servers", "construction", "mcp_servers.mcpserver"),
            ("Users", "person", "auth.user"),
            ("Roles", "group", "auth.group"),
            ("Audit log", "history", "admin.logentry"),
            ("Failed logins", "lock", "axes.accessfailurelog"),
        ),
    ),
)
_TABLES = (
    ("Responses", "chat", "responses_api.storedresponse"),
    ("Chat completions", "sms", "completions.storedcompletion"),
    ("Generations", "receipt_long", "generations.generation"),
)
"""The tables behind the page of requests; only administrators have them in the menu."""
_ALL = "All"
_ICONS_OF_TABS = {
    _ALL: "manage_search",
    "Failed": "error",
    "Slow": "history",
    "Running": "refresh",
    "Refused": "lock",
}
"""By the titles of the tabs of the page of requests."""


_APPROVALS = "responses_api.mcpapproval"
_MOST_COUNTED = 999


def navigation(request: HttpRequest) -> list[dict[str, Any]]:
    """Return the groups of links; the theme hides groups without links."""
    user = request.user
    sees_queue = user.has_perm(VIEW_REQUESTS)
    has_own_keys = user.has_perm("accounts.make_own_key")
    sees_settings = user.has_perm("site_settings.view_sitesettings")
    operation = [
        _link("Usage", "monitoring", "admin:index", shown=True),
        _link("Queue", "low_priority", "admin:queue", shown=sees_queue),
        _link("Models and workers", "dns", "admin:fleet", shown=sees_queue),
        _link("Settings", "settings", "admin:settings", shown=sees_settings),
        _link("Playground", "science", "admin:playground", shown=True),
        _link("My keys", "key", "admin:my-keys", shown=has_own_keys),
        _link("My connections", "link", "admin:my-connections", shown=has_own_keys),
        _link("API documents", "menu_book", "docs", shown=True),
    ]
    groups: list[dict[str, Any]] = [{"items": operation}]
    for group_title, models in _MODELS:
        items, tables = list[dict[str, Any]](), models
        if group_title == "Requests":
            items += _views_of_requests(request, shown=sees_queue)
            if user.has_perm("auth.view_user"):
                tables = (*models, *_TABLES)
        for title, icon, name in tables:
            app, model = name.split(".")
            may_view = user.has_perm(f"{app}.view_{model}")
            link = _link(title, icon, f"admin:{app}_{model}_changelist", shown=may_view)
            if may_view and name == _APPROVALS:
                unanswered = apps.get_model(_APPROVALS).objects.filter(answered_at=None)
                if waiting := unanswered[:_MOST_COUNTED].count():
                    link |= {"badge": waiting, "badge_variant": "warning"}
            items.append(link)
        groups.append({"title": group_title, "items": items})
    return groups


def _views_of_requests(request: HttpRequest, *, shown: bool) -> list[dict[str, Any]]:
    """Return the links to the page of requests and its tabs; that of the open tab is active."""
    is_open = request.path.startswith(reverse("admin:requests"))
    tabs = tabs_of(filters_of(request.GET), request.GET) if is_open else []
    chosen = next((tab.title for tab in tabs if tab.is_chosen), _ALL)
    links = []
    for tab in tabs_of(LogFilters(), QueryDict()):
        title = "Requests" if tab.title == _ALL else tab.title
        link = _link(title, _ICONS_OF_TABS[tab.title], "admin:requests", shown=shown)
        address = f"{link['link']}?{tab.query}" if tab.query else link["link"]
        links.append(link | {"link": address, "active": is_open and chosen == tab.title})
    return links


def _link(title: str, icon: str, route: str, *, shown: bool) -> dict[str, Any]:
    return {"title": title, "icon": icon, "link": reverse(route), "permission": lambda _: shown}
