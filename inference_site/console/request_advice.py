"""What to do about an error: a sentence for each code, and the page where that is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.urls import reverse

from inference_site.accounts.models import ApiKey

_KEY, _FLEET, _QUEUE, _SETTINGS = "key", "admin:fleet", "admin:queue", "admin:settings"
_BUDGETS, _KEYS = "admin:accounts_budget_changelist", "admin:accounts_apikey_changelist"
_ADVICE = {
    "invalid_api_key": ("The secret is not, or no longer, one of this site: make a key.", _KEYS),
    "key_revoked": ("The key was revoked: give the client another one.", _KEYS),
    "insufficient_scope": ("The key lacks a permission: add it to the key.", _KEY),
    "permission_denied": ("The key lacks a permission: add it to the key.", _KEY),
    "rate_limit_exceeded": ("A limit of the key or its project was reached: raise it.", _KEY),
    "insufficient_quota": ("A budget is spent: raise it, or wait until it resets.", _BUDGETS),
    "model_not_allowed": ("The key does not allow this model: add it to the key.", _KEY),
    "model_not_found": ("The project has no such model: compare the name, or add it.", _FLEET),
    "model_loading": ("The model was being loaded: the client should try again.", _FLEET),
    "no_worker": ("No worker serves the model: start one, or load the model.", _FLEET),
    "engine_unavailable": ("The model's server did not answer: see its state.", _FLEET),
    "worker_lost": ("The worker died during the run: see its log.", _FLEET),
    "worker_unavailable": ("The worker stopped or lost its storage: see its state.", _FLEET),
    "model_error": ("The model's library failed: see the worker's log.", _FLEET),
    "context_length_exceeded": (
        "The prompt is longer than the model's context: shorten it, or raise the length.",
        _FLEET,
    ),
    "queue_full": ("Too much waits: add a worker or slots, or stop what waits.", _QUEUE),
    "project_queue_full": ("Too much of one project waits: see the queue.", _QUEUE),
    "queue_timeout": ("It waited too long: add a worker or slots.", _QUEUE),
    "queue_memory_full": ("Redis is full: give it more memory.", _QUEUE),
    "stopped_by_operator": ("An operator stopped it in the console.", _QUEUE),
    "hook_failed": ("The site's own hook failed: see the log of the web process.", _SETTINGS),
    "database_unavailable": ("PostgreSQL did not answer: see its log.", ""),
    "queue_unavailable": ("Redis did not answer: see its log.", ""),
    "cancelled": ("The client closed the connection or cancelled the run.", ""),
}
_OF_STATUS = {
    400: "The request is invalid: correct the parameter that is named.",
    401: "The request has no valid key.",
    404: "The client asks for something that is not there: compare the address and the ids.",
    413: "The body is too large: send less, or raise MAX_BODY_BYTES.",
    415: "The client sends another type of content: it should be application/json.",
}
_PERMISSIONS = {
    _KEYS: "accounts.view_apikey",
    _BUDGETS: "accounts.view_budget",
    _SETTINGS: "site_settings.view_sitesettings",
}


@dataclass(frozen=True, slots=True)
class Advice:
    """A sentence, and the address and name of the page where it is done; "" without one."""

    sentence: str
    link: str = ""
    title: str = ""


_TITLES = {
    _KEYS: "API keys",
    _BUDGETS: "Budgets",
    _FLEET: "Models and workers",
    _QUEUE: "Queue",
    _SETTINGS: "Settings",
}


def advice_for(user: Any, code: str, status: int | str, key: ApiKey | None) -> Advice | None:
    """Return what to do about an error code; None if nothing is known about it.

    The link is left out if the user may not open its page.
    """
    sentence, route = _ADVICE.get(code, ("", ""))
    if not sentence:
        sentence = _OF_STATUS.get(status, "") if isinstance(status, int) else ""
    if not sentence:
        return None
    if route == _KEY:
        if key is None or not user.has_perm("accounts.view_apikey"):
            return Advice(sentence)
        link = reverse("admin:accounts_apikey_change", args=[key.pk])
        return Advice(sentence, link, f"Key {key.name}")
    if not route or not user.has_perm(_PERMISSIONS.get(route, "generations.view_generation")):
        return Advice(sentence)
    return Advice(sentence, reverse(route), _TITLES[route])
