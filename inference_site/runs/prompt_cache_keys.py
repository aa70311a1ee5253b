"""Prompt cache keys: the latest generation of a project and model with each key.

Prompts with one ``prompt_cache_key`` begin alike, so a generation prefers the worker of the latest
one with its key (see ``queue``). The key is a hint: without Redis, nothing is preferred.
"""

from __future__ import annotations

import hashlib
import logging

import redis.exceptions

from inference_site.catalogue.fleet.leases import live_view
from inference_site.core.storage.redis import site_client

logger = logging.getLogger(__name__)

_KEPT_S = 600
"""As long as OpenAI keeps a prefix that is not used again."""


def latest_with_key(project_id: int, model: str, cache_key: str) -> str:
    """Return the id of the latest generation with this key; "" if none is known or needed."""
    if not cache_key or not _has_choice(model):
        return ""
    try:
        found = site_client().get(_name(project_id, model, cache_key))
    except redis.exceptions.RedisError as exc:
        logger.warning("prompt cache keys: %s", exc)
        return ""
    return found.decode() if isinstance(found, bytes) else ""


def note_key(project_id: int, model: str, cache_key: str, generation_id: str) -> None:
    """Record a generation as the latest with this key."""
    if not cache_key or not _has_choice(model):
        return
    try:
        site_client().set(_name(project_id, model, cache_key), generation_id, ex=_KEPT_S)
    except redis.exceptions.RedisError as exc:
        logger.warning("prompt cache keys: %s", exc)


def _has_choice(model: str) -> bool:
    return len(live_view.serving(model)) > 1


def _name(project_id: int, model: str, cache_key: str) -> str:
    # Hashed, because the key may be long and may name a person.
    digest = hashlib.sha256(f"{model}\0{cache_key}".encode()).hexdigest()
    return f"prompt_cache_key:{project_id}:{digest[:32]}"
