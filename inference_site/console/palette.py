"""The search of the command palette: pages, actions, ids, models, projects and keys.

A user finds only what pages would show them: each part asks for the permission that its page asks
for. Nothing is cached, so that a new key is found and a withdrawn permission holds at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from django.contrib import admin
from django.db.models import Model, Q
from django.http import HttpRequest
from django.urls import reverse
from django.utils.http import urlencode

from completions.models import StoredCompletion
from inference_site.accounts.models import ApiKey, Project
from inference_site.catalogue.catalogue import catalogue
from inference_site.console.navigation import navigation
from inference_site.console.request_filters import ID_PREFIXES
from inference_site.console.tiles import VIEW_REQUESTS
from inference_site.files.models import StoredFile
from inference_site.runs.models import Generation
from responses_api.models import Conversation, StoredResponse

MAX_TERM_LENGTH = 200
_MAX_OF_A_KIND = 8
_ACTIONS = (
    ("Make an API key", "key", "accounts.add_apikey", "admin:accounts_apikey_add"),
    ("Add a project", "workspaces", "accounts.add_project", "admin:accounts_project_add"),
    ("Add a model", "dns", "model_store.add_storedmodel", "admin:model_store_storedmodel_add"),
    ("Pull a model from the hub", "download", "model_store.add_pull", "admin:model_store_pull_add"),
    ("Add a user", "person_add", "auth.add_user", "admin:auth_user_add"),
    ("Download usage as CSV", "table", "usage.view_usagerollup", "admin:usage-csv"),
    ("Change my password", "password", "", "admin:password_change"),
)
"""Title, icon, permission ("": every user with a password) and route."""
_STORED: tuple[tuple[str, str, type[Model]], ...] = (
    ("resp_", "Response", StoredResponse),
    ("conv_", "Conversation", Conversation),
    ("chatcmpl-", "Chat completion", StoredCompletion),
    ("file-", "File", StoredFile),
)
"""Prefix of the ids, name and model of stored objects that have a page."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the palette: where it leads, and what kind of thing that is."""

    title: str
    link: str
    icon: str
    kind: str


def search(request: HttpRequest, term: str) -> list[Entry]:
    """Return the entries for what a user typed; without a term, all pages and actions.

    A title matches if it has all words of the term, in any case and order; titles that start with
    the term come first. An id is found whole.
    """
    term = term.strip(" …")[:MAX_TERM_LENGTH]
    words = term.lower().split()
    found = list(_by_id(request, term)) if term else []
    found += _matching(_pages(request), words)
    found += _matching(_actions(request.user), words)
    if words:
        found += islice(_matching(_models(request.user), words), _MAX_OF_A_KIND)
        found += _projects(request.user, words)
        found += _keys(request.user, words)
    return sorted(found, key=lambda entry: not entry.title.lower().startswith(term.lower()))


def _matching(entries: Iterator[Entry], words: list[str]) -> Iterator[Entry]:
    return (entry for entry in entries if all(word in entry.title.lower() for word in words))


def _pages(request: HttpRequest) -> Iterator[Entry]:
    for group in navigation(request):
        for item in group["items"]:
            if item["permission"](request):
                yield Entry(item["title"], item["link"], item["icon"], group.get("title", "Page"))


def _actions(user: Any) -> Iterator[Entry]:
    for title, icon, permission, route in _ACTIONS:
        # Who only uses single sign-on has no old password, which the form asks for.
        if user.has_perm(permission) if permission else user.has_usable_password():
            yield Entry(title, reverse(route), icon, "Action")


def _models(user: Any) -> Iterator[Entry]:
    if user.has_perm(VIEW_REQUESTS):
        for id_ in catalogue().models:
            yield Entry(id_, reverse("admin:model", args=[id_]), "neurology", "Model")


def _projects(user: Any, words: list[str]) -> Iterator[Entry]:
    if user.has_perm("accounts.view_project"):
        has_all = Q(*(Q(name__icontains=word) for word in words))
        for project in Project.objects.filter(has_all).order_by("name")[:_MAX_OF_A_KIND]:
            yield Entry(project.name, _page(Project, project.pk), "workspaces", "Project")


def _keys(user: Any, words: list[str]) -> Iterator[Entry]:
    """Yield the keys whose name or project has the words, or whose secret starts with them."""
    if not user.has_perm("accounts.view_apikey"):
        return
    has_all = Q(
        *(
            Q(name__icontains=word) | Q(project__name__icontains=word) | Q(prefix__istartswith=word)
            for word in words
        )
    )
    keys = ApiKey.objects.filter(has_all, user=None).select_related("project")
    for key in keys.order_by("-id")[:_MAX_OF_A_KIND]:
        state = "revoked key" if key.revoked_at else "key"
        yield Entry(
            key.name, _page(ApiKey, key.pk), "key", f"{key.project.name}: {state} {key.prefix}…"
        )


def _by_id(request: HttpRequest, term: str) -> Iterator[Entry]:
    """Yield the page of the stored object or the generation with this id, and the request log."""
    for prefix, name, model in _STORED:
        pages = admin.site.get_model_admin(model)
        if term.startswith(prefix) and pages.has_view_permission(request):
            rows = pages.get_queryset(request).filter(public_id=term)
            for pk in rows.values_list("pk", flat=True):
                yield Entry(term, _page(model, pk), "chat", name)
    if term.startswith(ID_PREFIXES) and request.user.has_perm(VIEW_REQUESTS):
        for pk in Generation.objects.filter(public_id=term).values_list("pk", flat=True):
            yield Entry(term, _page(Generation, pk), "receipt_long", "Generation")
        log = f"{reverse('admin:requests')}?{urlencode({'q': term})}"
        yield Entry(term, log, "manage_search", "Search the requests")


def _page(model: type[Model], pk: int) -> str:
    options = model._meta
    return reverse(f"admin:{options.app_label}_{options.model_name}_change", args=[pk])
