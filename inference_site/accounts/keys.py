"""Creating, looking up, rotating and revoking API keys."""

from __future__ import annotations

import datetime as dt
import hashlib
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from django.db import transaction
from django.db.models import Exists, OuterRef, Q
from django.utils import timezone

from inference_site.accounts.models import ApiKey, Budget, KeySecret, Project
from inference_site.errors.api_errors import AuthenticationError

_PREFIX_LENGTH = 10
_CACHE_S = 5.0
"""How long a revoked key may still be accepted by a process that did not revoke it."""
_CACHE_SIZE = 10_000
_USED_S = 60
"""The time of a key's last use is written at most this often."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a project or a key; None means no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_runs: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: the key and project behind a valid secret.

    An empty ``allowed_models`` allows all models.
    """

    api_key_id: int
    project_id: int
    project_name: str = ""
    scopes: frozenset[str] = frozenset()
    allowed_models: frozenset[str] = frozenset()
    key_limits: Limits = field(default=Limits())
    project_limits: Limits = field(default=Limits())
    disconnect_grace_s: int | None = None
    has_budget: bool = False
    is_authenticated: bool = True


def create_key(project: Project, name: str, **fields: Any) -> tuple[ApiKey, str]:
    """Create a key; return its record and its secret, which is not stored in plain text.

    ``fields`` are further fields of the record, such as scopes and limits.
    """
    record = ApiKey(project=project, name=name, **fields)
    return record, issue_key(record)


def issue_key(record: ApiKey) -> str:
    """Save a new key with its first secret, and return the secret."""
    secret = _new_secret()
    record.prefix = secret[:_PREFIX_LENGTH]
    with transaction.atomic():
        record.save(force_insert=True)
        KeySecret.objects.create(api_key=record, digest=digest_of(secret))
    return secret


def rotate_key(record: ApiKey, overlap: dt.timedelta) -> str:
    """Give the key a new secret and return it; the current one expires after ``overlap``."""
    secret, until = _new_secret(), timezone.now() + overlap
    with transaction.atomic():
        current = record.secrets.select_for_update().filter(expires_at=None)
        _forget(current.values_list("digest", flat=True))
        current.update(expires_at=until)
        KeySecret.objects.create(api_key=record, digest=digest_of(secret))
        ApiKey.objects.filter(pk=record.pk).update(prefix=secret[:_PREFIX_LENGTH])
    record.prefix = secret[:_PREFIX_LENGTH]
    return secret


def revoke_key(record: ApiKey) -> None:
    """Revoke the key: at once in this process, within ``_CACHE_S`` in others."""
    ApiKey.objects.filter(pk=record.pk, revoked_at=None).update(revoked_at=timezone.now())
    _forget(record.secrets.values_list("digest", flat=True))


def given_secret(authorization: str, api_key: str) -> str:
    """Return the secret that the two headers hold. Raise AuthenticationError if they hold none."""
    scheme, _, secret = authorization.partition(" ")
    if scheme.lower() == "bearer" and secret.strip():
        return secret.strip()
    if api_key.strip():
        return api_key.strip()
    raise AuthenticationError


_cache: dict[str, tuple[float, Caller]] = {}


def find_caller(secret: str) -> Caller | None:
    """Return the caller of this secret; None if the key is unknown, expired or revoked.

    The result of the one indexed read is cached for ``_CACHE_S``.
    """
    digest = digest_of(secret)
    now = time.monotonic()
    cached = _cache.get(digest)
    if cached is not None and cached[0] > now:
        return cached[1]
    found = _read(_has_secret(digest, timezone.now()))
    if found is None:
        _cache.pop(digest, None)
        return None
    if len(_cache) >= _CACHE_SIZE:
        _cache.clear()
    _cache[digest] = (now + _CACHE_S, found)
    return found


def known_caller(secret: str) -> tuple[Caller | None, bool]:
    """Return the caller that was found for this secret, at once, and whether that counts still."""
    expires_at, caller = _cache.get(digest_of(secret), (0.0, None))
    return caller, expires_at > time.monotonic()


def owners_of(digests: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return project and key of secrets by their digests, also of keys that are refused now."""
    found = KeySecret.objects.filter(digest__in=list(digests))
    rows = found.values_list("digest", "api_key__project_id", "api_key_id")
    return {digest: (project, key) for digest, project, key in rows}


def caller_of_key(pk: int) -> Caller | None:
    """Return the caller of this key without its secret; None if the key is not valid.

    For requests that staff make on behalf of a key.
    """
    return _read(Q(pk=pk))


def _read(which: Q) -> Caller | None:
    now = timezone.now()
    record = (
        ApiKey.objects.select_related("project")
        .annotate(has_budget=Exists(Budget.objects.filter(project=OuterRef("project"))))
        .filter(
            which,
            Q(expires_at=None) | Q(expires_at__gt=now),
            revoked_at=None,
            project__is_active=True,
        )
        .first()
    )
    if record is None:
        return None
    _note_use(record, now)
    return _caller(record)


def _has_secret(digest: str, now: dt.datetime) -> Q:
    is_good = Q(secrets__expires_at=None) | Q(secrets__expires_at__gt=now)
    return is_good & Q(secrets__digest=digest)


def _caller(record: Any) -> Caller:
    return Caller(
        api_key_id=record.pk,
        project_id=record.project_id,
        project_name=record.project.name,
        scopes=frozenset(record.scopes),
        allowed_models=frozenset(record.allowed_models),
        key_limits=_limits(record),
        project_limits=_limits(record.project),
        disconnect_grace_s=record.project.disconnect_grace_s,
        has_budget=record.has_budget,
    )


def _limits(record: ApiKey | Project) -> Limits:
    return Limits(record.requests_per_minute, record.tokens_per_minute, record.concurrent_runs)


def _note_use(record: ApiKey, now: dt.datetime) -> None:
    last = record.last_used_at
    if last is None or (now - last).total_seconds() > _USED_S:
        ApiKey.objects.filter(pk=record.pk).update(last_used_at=now)


def _new_secret() -> str:
    return f"sk-{secrets.token_urlsafe(36)}"


def _forget(digests: Iterable[str]) -> None:
    for digest in digests:
        _cache.pop(digest, None)


def digest_of(secret: str) -> str:
    """Return what is stored of a secret."""
    # A slow password hash is not needed: the secret has 288 random bits.
    return hashlib.sha256(secret.encode()).hexdigest()
