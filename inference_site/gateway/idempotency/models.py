"""KeyedRequest: one row for each ``Idempotency-Key`` that an API key used within a day.

The row is written in the transaction that accepts the generation, or that does what the request
asks for. So it exists if and only if that was done: a process that dies leaves no claim behind that
would have to time out. Of several requests that write the row of one key at the same time,
PostgreSQL lets one commit; the others wait for it on the unique index, at most ``_WAIT_MS``.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db import OperationalError, models
from django.utils import timezone

from inference_site.core.storage.old_rows import delete_older
from inference_site.core.storage.postgresql import (
    execute_pipelined,
    execute_prepared,
    is_timeout,
)

_KEPT_S = 86_400
_MOST_BYTES = 8 * 1024 * 1024
"""Bytes of answers that are kept for one project."""
_WAIT_MS = 2_000
_IDLE_MS = 10_000
_TRIMMED_AT_ONCE = 500
_DELETED_AT_ONCE = 500


class KeyedRequest(models.Model):
    """A request with an idempotency key, and its answer or the generation that answers it.

    ``key`` and ``request`` are SHA-256 digests: of the idempotency key, and of path and body.
    ``generation_id`` is the public id of the generation, "" without one. ``status`` and ``body``
    are those of an answer that was given at once; ``status`` is 0 if the generation's stream is the
    answer, ``body`` is empty if it was too large to keep. ``kept_bytes`` counts towards the limits
    of the project; 0 for rows without an answer. A request that reuses the key gets a new id.
    """

    api_key = models.ForeignKey(
        "accounts.ApiKey", on_delete=models.DO_NOTHING, db_constraint=False, db_index=False
    )
    project = models.ForeignKey(
        "accounts.Project", on_delete=models.DO_NOTHING, db_constraint=False, db_index=False
    )
    key = models.CharField(max_length=64)
    request = models.CharField(max_length=64)
    generation_id = models.CharField(max_length=64, blank=True, default="")
    grace_s = models.PositiveIntegerField(default=0)
    status = models.PositiveSmallIntegerField(default=0)
    body = models.TextField(blank=True, default="")
    kept_bytes = models.PositiveIntegerField(default=0)
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        default_permissions = ()  # No page shows it.
        constraints = [
            models.UniqueConstraint(fields=["api_key", "key"], name="keyed_request_one_a_key"),
        ]
        indexes = [
            models.Index(
                fields=["project", "id"],
                condition=models.Q(kept_bytes__gt=0),
                name="keyed_request_kept",
            ),
            models.Index(
                fields=["generation_id"],
                condition=models.Q(kept_bytes__gt=0) & ~models.Q(generation_id=""),
                name="keyed_request_of_generation",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.api_key_id}:{self.key[:12]}"


_FIND = """
SELECT known.id, known.request, known.generation_id, known.grace_s, known.status, known.body,
       run.status, run.kind, run.streamed, run.model
FROM idempotency_keyedrequest known
LEFT JOIN generations_generation run
       ON run.public_id = known.generation_id AND known.generation_id <> ''
WHERE known.api_key_id = %(api_key)s AND known.key = %(key)s::text
      AND known.created_at >= now() - %(kept_s)s * interval '1 s'
"""
_BOUND = (
    "SELECT set_config('idempotency.lock_timeout', current_setting('lock_timeout'), true), "
    f"set_config('lock_timeout', '{_WAIT_MS}', true), "
    f"set_config('idle_in_transaction_session_timeout', '{_IDLE_MS}', true)"
)
_UNBOUND = "SELECT set_config('lock_timeout', current_setting('idempotency.lock_timeout'), true)"
_CLAIM = """
INSERT INTO idempotency_keyedrequest AS known (
    api_key_id, project_id, key, request, generation_id, grace_s, status, body, kept_bytes,
    created_at
) VALUES (
    %(api_key)s, %(project)s, %(key)s, %(request)s, %(generation_id)s, %(grace_s)s, %(status)s,
    %(body)s, %(kept_bytes)s, clock_timestamp()
)
ON CONFLICT (api_key_id, key) DO UPDATE SET
    id = excluded.id, project_id = excluded.project_id, request = excluded.request,
    generation_id = excluded.generation_id, grace_s = excluded.grace_s, status = excluded.status,
    body = excluded.body, kept_bytes = excluded.kept_bytes, created_at = excluded.created_at
WHERE known.id = %(replaces)s::bigint
      OR known.created_at < now() - %(kept_s)s * interval '1 s'
RETURNING id
"""
_TRIM = """
WITH ranked AS (
    SELECT id, row_number() OVER newest AS nth, sum(kept_bytes) OVER newest AS bytes
    FROM idempotency_keyedrequest WHERE project_id = %(project)s AND kept_bytes > 0
    WINDOW newest AS (ORDER BY id DESC)
), excess AS (
    SELECT known.id FROM idempotency_keyedrequest known JOIN ranked ON ranked.id = known.id
    WHERE ranked.nth > %(keys)s OR ranked.bytes > %(bytes)s
    ORDER BY known.id LIMIT %(limit)s FOR UPDATE OF known SKIP LOCKED
), emptied AS (
    UPDATE idempotency_keyedrequest SET body = '', kept_bytes = 0
    WHERE id IN (SELECT id FROM excess) AND generation_id <> ''
    RETURNING id
), deleted AS (
    DELETE FROM idempotency_keyedrequest
    WHERE id IN (SELECT id FROM excess) AND generation_id = ''
    RETURNING id
)
SELECT (SELECT count(*) FROM emptied) + (SELECT count(*) FROM deleted)
"""


@dataclass(frozen=True, slots=True)
class KeyUse:
    """A request of the last day that used a key.

    ``run_status``, ``kind``, ``streamed`` and ``model`` are those of the generation; None without
    one.
    """

    id: int
    request: str
    generation_id: str
    grace_s: int
    status: int
    body: str
    run_status: str | None
    kind: str | None
    streamed: bool | None
    model: str | None


class KeyTaken(Exception):
    """Another request with the same key was accepted meanwhile."""


class KeyLocked(Exception):
    """Another request with the same key is being accepted, and takes longer than ``_WAIT_MS``."""


@dataclass(frozen=True, slots=True)
class KeyClaim:
    """The row of a request, to be written in the transaction of what the request does.

    It replaces a row of this key that is older than a day; and that with the id ``replaces``, whose
    request has failed.
    """

    api_key_id: int
    project_id: int
    key: str
    request: str
    replaces: int | None = None
    generation_id: str = ""
    grace_s: int = 0
    status: int = 0
    body: str = ""

    def write(self) -> None:
        """Write the row. Raise KeyTaken or KeyLocked."""
        given = {
            "api_key": self.api_key_id,
            "project": self.project_id,
            "key": self.key,
            "request": self.request,
            "generation_id": self.generation_id,
            "grace_s": self.grace_s,
            "replaces": self.replaces,
            "kept_s": _KEPT_S,
            **_answer(self.status, self.body),
        }
        try:
            _, written, _ = execute_pipelined((_BOUND, {}), (_CLAIM, given), (_UNBOUND, {}))
        except OperationalError as exc:
            if is_timeout(exc):
                raise KeyLocked from exc
            raise
        if written.fetchone() is None:
            raise KeyTaken

    def keep_answer(self, status: int, body: str) -> None:
        """Add an answer to the row that this transaction has written."""
        rows = KeyedRequest.objects.filter(api_key_id=self.api_key_id, key=self.key)
        rows.update(**_answer(status, body))

    def withdraw(self) -> None:
        """Delete the row that this transaction has written."""
        KeyedRequest.objects.filter(api_key_id=self.api_key_id, key=self.key).delete()


def _answer(status: int, body: str) -> dict[str, Any]:
    kept_bytes = max(1, len(body.encode())) if status else 0
    return {"status": status, "body": body, "kept_bytes": kept_bytes}


def find_use(api_key_id: int, key: str) -> KeyUse | None:
    """Return the request of the last day that used this key."""
    given = {"api_key": api_key_id, "key": key, "kept_s": _KEPT_S}
    row = execute_prepared(_FIND, given).fetchone()
    return None if row is None else KeyUse(*row)


def trim_answers(project_id: int) -> int:
    """Delete the oldest answers of a project beyond its limits, at most ``_TRIMMED_AT_ONCE``.

    Return how many. The row of a generation stays, without its answer: it still runs once.
    """
    limits = {"keys": settings.IDEMPOTENCY_KEYS, "bytes": _MOST_BYTES, "limit": _TRIMMED_AT_ONCE}
    row = execute_prepared(_TRIM, {"project": project_id, **limits}).fetchone()
    return 0 if row is None else int(row[0])


def forget_answers(generation_ids: Collection[str]) -> None:
    """Delete the kept answers of generations whose results were deleted."""
    kept = KeyedRequest.objects.filter(generation_id__in=generation_ids, kept_bytes__gt=0)
    kept.exclude(generation_id="").update(body="", kept_bytes=0)


def prune(until: float) -> int:
    """Delete rows of more than a day ago, and answers beyond the limits of their projects.

    Stop when the monotonic clock passes ``until``; return how many were deleted.
    """
    day_ago = timezone.now() - dt.timedelta(seconds=_KEPT_S)
    deleted = delete_older(KeyedRequest.objects.all(), day_ago, until, _DELETED_AT_ONCE)
    kept = KeyedRequest.objects.filter(kept_bytes__gt=0).values("project_id").order_by()
    sums = kept.annotate(keys=models.Count("id"), bytes=models.Sum("kept_bytes"))
    most = models.Q(keys__gt=settings.IDEMPOTENCY_KEYS) | models.Q(bytes__gt=_MOST_BYTES)
    for project_id in list(sums.filter(most).values_list("project_id", flat=True)):
        while time.monotonic() < until and (trimmed := trim_answers(project_id)):
            deleted += trimmed
    return deleted
