"""Requests for a queue without room a moment ago: refused before they wait for a thread."""

from __future__ import annotations

from typing import Any

import orjson
from django.conf import settings

from inference_site.errors.exceptions import api_error
from inference_site.generations.queue_position import queue_counts

_LARGEST = 64 * 1024
"""Bytes of a body that is decoded on the event loop; the view looks into a larger one."""


def refuse_if_full(scope: dict[str, Any], body: bytes, project_id: int | None) -> None:
    """Raise what the view would raise if it finds the queue full, or the project's share of it.

    A request that may be a repeated one is left to the view, which may know its answer.
    """
    if not queue_counts.any_refused() or len(body) > _LARGEST:
        return
    if any(name == b"idempotency-key" for name, _ in scope["headers"]):
        return
    try:
        asked = orjson.loads(body)
    except ValueError:
        return
    model = asked.get("model", settings.DEFAULT_MODEL) if isinstance(asked, dict) else None
    if not isinstance(model, str):
        return
    is_background = asked.get("background") is True or asked.get("service_tier") == "flex"
    refusal = queue_counts.refusal(model, project_id, is_background=is_background)
    if refusal is not None:
        raise api_error(refusal)
