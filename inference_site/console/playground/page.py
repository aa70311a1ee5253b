"""The page of the playground."""

from __future__ import annotations

from typing import Any

import redis.exceptions
from django.conf import settings
from django.http import HttpRequest

from inference_site.accounts.keys import Caller
from inference_site.catalogue.catalogue import catalogue
from inference_site.console.playground.caller import playground_caller
from inference_site.console.playground.models import LONGEST_NAME
from inference_site.fleet.fleet import ModelStatus, capabilities_of, statuses_among, workers
from inference_site.submission.model_access import may_use

# Name, label, step, least and greatest value of each field.
SAMPLERS = (
    ("temperature", "Temperature", "0.1", "0", "2"),
    ("top_p", "Top p", "0.05", "0", "1"),
    ("top_k", "Top k", "1", "-1", ""),
    ("min_p", "Min p", "0.01", "0", "1"),
    ("presence_penalty", "Presence penalty", "0.1", "-2", "2"),
    ("frequency_penalty", "Frequency penalty", "0.1", "-2", "2"),
    ("seed", "Seed", "1", "", ""),
    ("max_output_tokens", "Max output tokens", "1", "1", ""),
)
EFFORTS = ("none", "low", "medium", "high")
_OF_A_BODY = 0.7
"""The part of the largest body that images may take, as files: base64 makes them a third larger."""


def playground_context(request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the page."""
    caller = playground_caller(request.user)
    context: dict[str, Any] = {
        "caller": caller,
        "samplers": SAMPLERS,
        "efforts": EFFORTS,
        "longest_name": LONGEST_NAME,
        "most_image_bytes": int(
            min(settings.MEDIA_MAX_BYTES, settings.MAX_BODY_BYTES * _OF_A_BODY)
        ),
        "origin": f"{request.scheme}://{request.get_host()}",
    }
    try:
        context["models"] = [] if caller is None else _models(caller)
    except redis.exceptions.RedisError:
        context["is_unreachable"] = True
    return context


def _models(caller: Caller) -> list[dict[str, str]]:
    """Return what this caller can chat with: loaded models first, the demo's last, then routes."""
    usable = [spec for spec in catalogue().listed(caller.project_name) if may_use(caller, spec)]
    chats = [spec.id for spec in usable if "chat" in capabilities_of(spec)]
    statuses = statuses_among(workers(), chats)
    shipped = catalogue().is_shipped
    chats.sort(key=lambda id_: (statuses[id_] != ModelStatus.LOADED, shipped(id_)))
    found = [{"id": id_, "status": statuses[id_].value} for id_ in chats]
    routes = [one for one in catalogue().listed_routes(caller.project_name) if may_use(caller, one)]
    leading = [one for one in routes if {spec.id for spec in one.specs} & set(chats)]
    return found + [{"id": one.id, "status": "route"} for one in leading]
