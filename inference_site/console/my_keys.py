"""The page "My keys": keys that users make for themselves, their usage, and a first request.

A project names the users who may make keys in it. Such a key only has the scope ``inference``, may
have lower limits than its project but no higher ones, and works while its user is active. The page
shows a user nothing of the keys of others.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.contrib import admin, messages
from django.contrib.auth import get_user_model
from django.contrib.auth.decorators import permission_required
from django.db import transaction
from django.db.models import F, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.template.response import TemplateResponse
from django.urls import reverse
from django.views.decorators.http import require_POST

from inference_site.accounts.keys import create_key, end_old_secrets, revoke_key, rotate_key
from inference_site.accounts.models import LIMITS, ApiKey, Scope
from inference_site.catalogue.catalogue import catalogue
from inference_site.console.key_forms import OwnKeyForm
from inference_site.console.key_states import (
    REVOKED,
    ROTATION_OVERLAP,
    bars_of,
    spends_of,
    state_of,
    valid_secrets,
)
from inference_site.console.tiles import recent_tiles
from inference_site.core.admin_pages.base_admin import log_action, secrets_page
from inference_site.runs.usage.models import Period

PERMISSION = "accounts.make_own_key"
MAX_OWN_KEYS = 20
"""Keys of one user that are not revoked."""
_MAX_SHOWN = 50
"""Keys on the page: those that are not revoked, then those that were revoked last."""


@permission_required(PERMISSION, raise_exception=True)
def my_keys(request: HttpRequest) -> HttpResponse:
    """Show the user's keys, or make one and show its secret."""
    form = OwnKeyForm(request.user, request.POST or None)
    if request.method == "POST" and form.is_valid():
        made = _make(request, form.cleaned_data)
        if made is None:
            form.add_error(None, f"You have {MAX_OWN_KEYS} keys. Revoke one first.")
        else:
            key, secret = made
            log_action(request, key, "Made a key of their own.")
            return _secret_page(request, key, secret)
    user: Any = request.user
    rows = _own_keys(request).select_related("project", "owner")
    # Those that work first: PostgreSQL sorts null, of a key that is not revoked, as the largest.
    keys = list(rows.order_by(F("revoked_at").desc(nulls_first=True), "-pk")[:_MAX_SHOWN])
    spends = spends_of(keys)
    shown = []
    for key in keys:
        bars = bars_of(key)
        shown.append(
            {
                "key": key,
                "state": state_of(key, bars, with_refusals=True),
                "bars": [bar for bar in bars if key.revoked_at is None],
                "spend": spends.get(key.pk, "—"),
                "secrets": [] if key.revoked_at else valid_secrets(key),
            }
        )
    # The model of the snippets is one that the newest key may use.
    newest = keys[0] if keys else None
    project = user.projects.first() if newest is None else newest.project
    usable = catalogue().listed(project.name) if project is not None else []
    lists = [one.allowed_models for one in (newest, project) if one is not None]
    allowing = [allowed for allowed in lists if allowed]
    ids = [key.pk for key in keys]
    length = dt.timedelta(days=30)
    context = {
        **admin.site.each_context(request),
        "title": "My keys",
        "form": form,
        "keys": shown,
        "tiles": recent_tiles(Period.DAY, length, api_keys=ids) if ids else [],
        "may_make": user.projects.filter(is_active=True).exists(),
        "base_url": request.build_absolute_uri("/v1"),
        "model": next(
            (s.id for s in usable if all(s.id in allowed for allowed in allowing)), "MODEL"
        ),
    }
    return TemplateResponse(request, "console/my_keys.html", context)


@permission_required(PERMISSION, raise_exception=True)
@require_POST
def act_on_my_key(request: HttpRequest, pk: int, action: str) -> HttpResponse:
    """Rotate or revoke a key of the user, or end its old secret. Raise Http404 for others' keys."""
    key = get_object_or_404(_own_keys(request), pk=pk)
    if action == "rotate" and key.revoked_at is None:
        secret = rotate_key(key, ROTATION_OVERLAP)
        log_action(request, key, "Rotated.")
        return _secret_page(request, key, secret)
    if action == "revoke" and revoke_key(key):
        log_action(request, key, REVOKED)
        messages.success(request, f"Revoked. {key.name} stops working within 5 seconds.")
    elif action == "end-old" and end_old_secrets(key):
        log_action(request, key, "Ended the old secret.")
        messages.success(request, "The old secret stops working within 5 seconds.")
    else:
        messages.error(request, "Nothing was changed: the key has changed meanwhile.")
    return HttpResponseRedirect(reverse("admin:my-keys"))


def _own_keys(request: HttpRequest) -> QuerySet[ApiKey]:
    return ApiKey.objects.filter(owner=int(request.user.pk or 0))


def _make(request: HttpRequest, values: dict[str, Any]) -> tuple[ApiKey, str] | None:
    """Make a key; return it and its secret, or None if the user has as many as they may."""
    day = values["expires_on"]
    with transaction.atomic():
        # The lock makes a second request of this user wait, so that both count the new key.
        user = get_user_model().objects.select_for_update().get(pk=int(request.user.pk or 0))
        if _own_keys(request).filter(revoked_at=None).count() >= MAX_OWN_KEYS:
            return None
        return create_key(
            values["project"],
            values["name"],
            owner=user,
            scopes=[Scope.INFERENCE],
            allowed_models=values["allowed_models"],
            expires_at=day and dt.datetime.combine(day, dt.time(), dt.UTC),
            **{name: values[name] for name in LIMITS},
        )


def _secret_page(request: HttpRequest, key: ApiKey, secret: str) -> HttpResponse:
    named = [(f"Key {key.name}", secret)]
    return secrets_page(request, named, reverse("admin:my-keys"))
