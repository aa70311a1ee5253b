"""API keys: create, rotate, revoke, and find the caller of a secret."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from django.db import transaction
from django.utils import timezone

from inference_site.accounts.models import ApiKey, KeySecret, Project, Scope
from inference_site.core.errors.api_errors import AuthenticationError
from inference_site.core.observability.outages import OutageLog
from inference_site.core.storage.postgresql import (
    DATABASE_UNAVAILABLE,
    execute_prepared,
    release_connection_after,
)

logger = logging.getLogger(__name__)

_PREFIX_LENGTH = 10
_CACHE_S = 5.0
"""How long a process may accept a key after another process has revoked it."""
_CACHE_SIZE = 10_000
_REFRESH_S = 3.5
"""How often ``keep_fresh`` reads. Less than ``_CACHE_S`` by more than a read takes."""
_ASKED_S, _MOST_REFRESHED = 60.0, 1000
"""``keep_fresh`` reads the keys that requests of the last minute had, and no more than these."""
_OF_IMPORTS = "import"
_LAST_USED_INTERVAL = dt.timedelta(seconds=60)
"""``last_used_at`` of a key is written at most this often."""

_CALLER = """
SELECT {digest}, key.id, key.project_id, project.name, key.scopes, key.allowed_models,
       {used_earlier},
       key.requests_per_minute, key.tokens_per_minute, key.concurrent_runs,
       project.requests_per_minute, project.tokens_per_minute, project.concurrent_runs,
       project.disconnect_grace_s, key.priority_requests_per_minute, project.allowed_models,
       EXISTS (SELECT FROM accounts_budget budget WHERE budget.project_id = key.project_id),
       (SELECT json_agg(json_build_array(
            CASE WHEN of_model.api_key_id IS NULL THEN 'project' ELSE 'key' END,
            of_model.requests_per_minute, of_model.tokens_per_minute, of_model.concurrent_runs,
            of_model.model
        ) ORDER BY of_model.api_key_id NULLS LAST)
        FROM accounts_modellimit of_model WHERE of_model.project_id = key.project_id
            AND (of_model.api_key_id IS NULL OR of_model.api_key_id = key.id))
FROM accounts_apikey key JOIN accounts_project project ON project.id = key.project_id
     LEFT JOIN auth_user owner ON owner.id = key.owner_id {secrets}
WHERE {which} AND key.revoked_at IS NULL AND project.is_active AND owner.is_active IS NOT FALSE
      AND (key.expires_at IS NULL OR key.expires_at > %(now)s)
"""
_USED = """
UPDATE accounts_apikey SET last_used_at = %(now)s
WHERE id = %(key)s AND (last_used_at IS NULL OR last_used_at < %(used_before)s)
"""
_DIGEST_USED = """
UPDATE accounts_keysecret SET last_used_at = %(now)s
WHERE digest = %(digest)s AND (last_used_at IS NULL OR last_used_at < %(used_before)s)
"""
_USED_EARLIER = "{0}.last_used_at IS NULL OR {0}.last_used_at < %(used_before)s"
_BY_SECRETS = _CALLER.format(
    digest="secret.digest",
    secrets="JOIN accounts_keysecret secret ON secret.api_key_id = key.id",
    used_earlier=f"{_USED_EARLIER.format('key')} OR {_USED_EARLIER.format('secret')}",
    which=(
        "secret.digest = ANY(%(digests)s) AND "
        "(secret.expires_at IS NULL OR secret.expires_at > %(now)s)"
    ),
)
_BY_KEY = _CALLER.format(
    digest="''",
    secrets="",
    used_earlier=_USED_EARLIER.format("key"),
    which="key.id = %(key)s AND 'inference' = ANY(key.scopes)",
)


Owner = Literal["key", "project"]


def shown_owner(owner: Owner, model: str) -> str:
    """Return whose limit it is, for an error; "" is a limit for all models."""
    return f"this {owner} for the model `{model}`" if model else f"this {owner}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a caller's key or project for one model, or for all; None means no limit."""

    owner: Owner
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_runs: int | None = None
    model: str = ""

    def holds_for(self, model: str) -> bool:
        """Whether a request to this model counts here; "" is a request that has no model."""
        return self.model in ("", model)


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: the key and project behind a valid secret.

    ``allowed_models`` are those of the key, and ``project_models`` those of the project: each that
    is empty allows all. ``limits`` are those of both, for all models and for single ones.
    """

    api_key_id: int
    project_id: int
    project_name: str = ""
    scopes: frozenset[str] = frozenset()
    allowed_models: frozenset[str] = frozenset()
    project_models: frozenset[str] = frozenset()
    limits: tuple[Limits, ...] = ()
    disconnect_grace_s: int | None = None
    priority_requests_per_minute: int | None = None
    has_budget: bool = False
    is_authenticated: bool = True

    def allows(self, *names: str) -> bool:
        """Whether key and project allow a model by one of these names: its id, or a route's."""
        lists = filter(None, (self.allowed_models, self.project_models))
        return not any(allowed.isdisjoint(names) for allowed in lists)


def create_key(project: Project, name: str, **fields: Any) -> tuple[ApiKey, str]:
    """Create a key; return its record and its secret, which is not stored in plain text.

    ``fields`` are further model fields, such as scopes and limits.
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
    secret = _new_secret()
    with transaction.atomic():
        current = record.secrets.select_for_update().filter(expires_at=None)
        _evict(current.values_list("digest", flat=True))
        current.update(expires_at=timezone.now() + overlap)
        KeySecret.objects.create(api_key=record, digest=digest_of(secret))
        ApiKey.objects.filter(pk=record.pk).update(prefix=secret[:_PREFIX_LENGTH])
    record.prefix = secret[:_PREFIX_LENGTH]
    return secret


def revoke_key(record: ApiKey) -> bool:
    """Revoke the key: immediately in this process, within ``_CACHE_S`` in others.

    Return False if it is revoked already.
    """
    valid = ApiKey.objects.filter(pk=record.pk, revoked_at=None)
    was_valid = bool(valid.update(revoked_at=timezone.now()))
    _evict(record.secrets.values_list("digest", flat=True))
    return was_valid


def end_old_secrets(record: ApiKey) -> int:
    """End the secrets that a rotation has replaced, and return how many were valid until now.

    They are refused immediately in this process, within ``_CACHE_S`` in others.
    """
    now = timezone.now()
    old = record.secrets.filter(expires_at__gt=now)
    digests = list(old.values_list("digest", flat=True))
    ended = old.update(expires_at=now)
    _evict(digests)
    return ended


def key_of_imports(project_id: int) -> ApiKey:
    """Return the key for imported objects that belong to a key; call it in a transaction.

    It has no secret, so no request can be sent with it until it is rotated. After it was revoked,
    the next import has a new one.
    """
    project = Project.objects.select_for_update(no_key=True).get(pk=project_id)  # One at a time.
    found = project.api_keys.filter(name=_OF_IMPORTS, secrets=None, user=None, revoked_at=None)
    key = found.order_by("pk").first()
    return key or ApiKey.objects.create(project=project, name=_OF_IMPORTS, scopes=[Scope.INFERENCE])


def read_secret(authorization: str, api_key: str) -> str:
    """Return the secret from the values of the headers ``Authorization`` and ``x-api-key``.

    Raise AuthenticationError if neither has one.
    """
    scheme, _, secret = authorization.partition(" ")
    if scheme.lower() == "bearer" and secret.strip():
        return secret.strip()
    if api_key.strip():
        return api_key.strip()
    raise AuthenticationError


@dataclass(slots=True)
class _Cached:
    """A caller, until when it is valid, and when a request last asked (monotonic, seconds)."""

    caller: Caller
    expires_at: float
    asked_at: float


_cache: dict[str, _Cached] = {}
"""By the digest of the secret."""


def find_caller(secret: str) -> Caller | None:
    """Return the caller of this secret; None if the key is unknown, expired or revoked.

    Callers are cached for ``_CACHE_S``, so that most requests need no query.
    """
    digest = digest_of(secret)
    now = time.monotonic()
    cached = _cache.get(digest)
    if cached is not None and cached.expires_at > now:
        cached.asked_at = now
        return cached.caller
    caller = _query_callers(_BY_SECRETS, digests=[digest]).get(digest)
    if caller is None:
        _cache.pop(digest, None)
        return None
    if len(_cache) >= _CACHE_SIZE:
        _cache.clear()
    _cache[digest] = _Cached(caller, now + _CACHE_S, now)
    return caller


def cached_caller(secret: str) -> tuple[Caller | None, bool]:
    """Return the cached caller of this secret without a query, and whether it is still valid."""
    cached = _cache.get(digest_of(secret))
    if cached is None:
        return None, False
    return cached.caller, cached.expires_at > time.monotonic()


def keep_fresh() -> None:
    """Read the callers of the last minute again on a thread, before they expire.

    Call it once, in a process that serves. The query takes a lone request two milliseconds.
    """

    def read_again() -> None:
        outage = OutageLog(logger, "callers of API keys")
        while True:
            time.sleep(_REFRESH_S)
            try:
                with release_connection_after():
                    refresh_callers()
            except Exception as exc:  # noqa: BLE001  # Requests query by themselves, and raise it.
                outage.failed(exc)
            else:
                outage.succeeded()

    threading.Thread(target=read_again, name="keys", daemon=True).start()


def refresh_callers() -> None:
    """Read the cached callers of the last minute again, with one query; drop those not valid."""
    now = time.monotonic()
    recent = [each for each in _cache.copy().items() if now - each[1].asked_at < _ASKED_S]
    recent = sorted(recent, key=lambda each: -each[1].asked_at)[:_MOST_REFRESHED]
    if not recent:
        return
    used = {digest for digest, cached in recent if now - cached.asked_at < _REFRESH_S}
    found = _query_callers(_BY_SECRETS, used, digests=[digest for digest, _ in recent])
    for digest, cached in recent:
        # In place: what was dropped meanwhile, because it was revoked here, stays dropped.
        if caller := found.get(digest):
            cached.caller, cached.expires_at = caller, now + _CACHE_S
        else:
            _evict([digest])


def owners_of(digests: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return (project id, key id) by secret digest; also for expired and revoked keys."""
    issued = KeySecret.objects.filter(digest__in=list(digests))
    rows = issued.values_list("digest", "api_key__project_id", "api_key_id")
    return {digest: (project, key) for digest, project, key in rows}


def caller_of_key(pk: int) -> Caller | None:
    """Return the caller of this key without its secret; None if the key is not valid or may not
    generate.

    For requests that staff or the site make on behalf of a key.
    """
    return _query_callers(_BY_KEY, key=pk).get("")


def _query_callers(
    statement: str, used: Collection[str] | None = None, **params: Any
) -> dict[str, Caller]:
    """Return the callers that ``_BY_SECRETS`` or ``_BY_KEY`` selects, by the digest of the secret.

    Update ``last_used_at`` of those in ``used``, of all by default. The digest is "" for a key.
    """
    now = timezone.now()
    times = {"now": now, "used_before": now - _LAST_USED_INTERVAL}
    callers = {}
    for digest, key, project, name, scopes, models, must_note_use, *rest in execute_prepared(
        statement, {**params, **times}
    ).fetchall():
        if must_note_use and (used is None or digest in used):
            with contextlib.suppress(*DATABASE_UNAVAILABLE):  # A read-only server serves reads.
                execute_prepared(_USED, {"key": key, **times})
                if digest:
                    execute_prepared(_DIGEST_USED, {"digest": digest, **times})
        *limits, grace_s, priority, project_models, has_budget, of_models = rest
        callers[digest] = Caller(
            api_key_id=key,
            project_id=project,
            project_name=name,
            scopes=frozenset(scopes),
            allowed_models=frozenset(models),
            project_models=frozenset(project_models),
            limits=(
                Limits("key", *limits[:3]),
                Limits("project", *limits[3:]),
                *(Limits(*values) for values in of_models or ()),
            ),
            disconnect_grace_s=grace_s,
            priority_requests_per_minute=priority,
            has_budget=has_budget,
        )
    return callers


def _new_secret() -> str:
    return f"sk-{secrets.token_urlsafe(36)}"


def _evict(digests: Iterable[str]) -> None:
    for digest in digests:
        _cache.pop(digest, None)


def digest_of(secret: str) -> str:
    """Return the digest that is stored for a secret.

    A slow password hash is not needed: the secret has 288 random bits.
    """
    return hashlib.sha256(secret.encode()).hexdigest()
