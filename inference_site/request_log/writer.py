"""The thread of a web process that stores refused requests, out of the way of any request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from django.db import Error

from inference_site.accounts.keys import owners_of
from inference_site.request_log.models import Refusal
from inference_site.request_log.refusals import Refusals, Refused, refusals
from inference_site.storage.postgresql import release_connection_after

logger = logging.getLogger(__name__)

_EVERY_S = 1.0
_MOST_HELD = 2_000
"""How many are held while PostgreSQL is away; the first of them are the ones that are kept."""


class Writer:
    """Stores what was refused, in batches. What cannot be stored is held until it can be."""

    def __init__(self, source: Refusals) -> None:
        self._source = source
        self._held: list[Refused] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="refusals", daemon=True)

    def start(self) -> None:
        """Begin; to be called once."""
        self._thread.start()

    def stop(self) -> None:
        """Store what is left, and end."""
        self._stopped.set()
        self._thread.join(5)

    def write(self) -> bool:
        """Store what has come; return False if it has to be tried again."""
        taken = self._source.take()
        log_counted(taken)
        self._held = [*self._held, *taken][:_MOST_HELD]
        if not self._held:
            return True
        try:
            with release_connection_after():
                store(self._held)
        except Error as exc:
            logger.warning("%d refused requests are not stored yet: %s", len(self._held), exc)
            return False
        self._held = []
        return True

    def _run(self) -> None:
        while not self._stopped.wait(_EVERY_S):
            self._write_or_drop()
        self._write_or_drop()

    def _write_or_drop(self) -> None:
        try:
            self.write()
        except Exception:
            logger.exception("%d refused requests could not be stored", len(self._held))
            self._held = []


def log_counted(taken: Sequence[Refused]) -> None:
    """Log how many requests were only counted: those answered with a 503 have no line."""
    for one in taken:
        if one.count > 1:
            facts = {"status": one.status, "error_code": one.error_code, "project": one.project_id}
            logger.info("refused %d requests alike", one.count, extra=facts)


def store(refused: Sequence[Refused]) -> None:
    """Write refused requests, oldest first, with the keys that nobody has looked up."""
    owners = owners_of({one.digest for one in refused if one.digest})
    rows = [_row(one, owners) for one in sorted(refused, key=lambda one: one.at)]
    Refusal.objects.bulk_create(rows)


def _row(refused: Refused, owners: dict[str, tuple[int, int]]) -> Refusal:
    known = (refused.project_id, refused.api_key_id)
    project_id, api_key_id = owners.get(refused.digest, known)
    return Refusal(
        created_at=refused.at,
        project_id=project_id,
        api_key_id=api_key_id,
        method=refused.method,
        path=refused.path,
        model=refused.model,
        status=refused.status,
        error_code=refused.error_code,
        request_id=refused.request_id,
        duration_ms=refused.duration_ms,
        count=refused.count,
    )


writer = Writer(refusals)
"""That of this process."""
