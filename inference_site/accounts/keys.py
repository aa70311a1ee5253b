"""Making, finding and revoking API keys."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass

from django.utils import timezone

from inference_site.accounts.models import ApiKey, Project

_PREFIX_LENGTH = 10
_CACHE_S = 5.0
"""How long a revoked key may still be accepted by a process that did not revoke it."""
_CACHE_SIZE = 10_000


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request: what a valid key stands for."""

    api_key_id: int
    project_id: int
    is_authenticated: bool = True


def create_key(project: Project, name: str) -> tuple[ApiKey, str]:
    """Make a key; return its record and the secret, which is not kept and cannot be shown again."""
    secret = f"sk-{secrets.token_urlsafe(36)}"
    record = ApiKey.objects.create(
        project=project, name=name, prefix=secret[:_PREFIX_LENGTH], digest=_digest(secret)
    )
    return record, secret


def revoke_key(record: ApiKey) -> None:
    """Refuse the key from now on: here at once, in other processes within the cache's 5 seconds."""
    ApiKey.objects.filter(pk=record.pk, revoked_at=None).update(revoked_at=timezone.now())
    _cache.pop(record.digest, None)


_cache: dict[str, tuple[float, Caller]] = {}


def find_caller(secret: str) -> Caller | None:
    """Return whom the key stands for; None for an unknown or revoked key. One indexed read."""
    digest = _digest(secret)
    now = time.monotonic()
    cached = _cache.get(digest)
    if cached is not None and cached[0] > now:
        return cached[1]
    row = (
        ApiKey.objects.filter(digest=digest, revoked_at=None, project__is_active=True)
        .values_list("id", "project_id")
        .first()
    )
    if row is None:
        _cache.pop(digest, None)
        return None
    if len(_cache) >= _CACHE_SIZE:
        _cache.clear()
    caller = Caller(*row)
    _cache[digest] = (now + _CACHE_S, caller)
    return caller


def _digest(secret: str) -> str:
    # Not a password hash: the secret has 288 random bits, so there is nothing to guess.
    return hashlib.sha256(secret.encode()).hexdigest()
