"""Refused requests, collected in a web process until its writer has stored them.

Noting one costs microseconds and never waits. Past a rate, requests with the same error are only
counted: memory and rows are bounded whatever is sent.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from django.db import Error

from inference_site.accounts.keys import owners_of
from inference_site.request_log.models import Refusal
from inference_site.storage.connections import lent_connection

_WINDOW_S = 60.0
_MOST_OF_A_KIND = 60
"""Rows of one kind in a window; after these, one for each time that the writer comes by."""
_MOST = 600
"""Rows of all kinds in a window; likewise."""
_MOST_KINDS = 200
"""Kinds that are counted between two visits of the writer; all others are one kind."""

Kind = tuple[int, str, int | None]
"""HTTP status, error code, and key; all that nobody knows the key of are alike."""


@dataclass(slots=True)
class Refused:
    """One refused request, and how many alike came with it.

    ``digest`` is that of its secret if nobody has looked that up; the writer does.
    """

    status: int
    error_code: str
    method: str = ""
    path: str = ""
    model: str = ""
    request_id: str = ""
    duration_ms: float = 0.0
    project_id: int | None = None
    api_key_id: int | None = None
    digest: str = ""
    at: dt.datetime = field(default_factory=lambda: dt.datetime.now(dt.UTC))
    count: int = 1

    @property
    def kind(self) -> Kind:
        """What it shares with those that are counted with it."""
        return self.status, self.error_code, self.api_key_id


class Refusals:
    """What has been refused since ``take`` was last called. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[Refused] = []
        self._counted: dict[Kind, Refused] = {}
        self._of_kind: dict[Kind, int] = {}
        self._window_ends = 0.0
        self._in_window = 0

    def add(self, refused: Refused) -> bool:
        """Keep a refused request, or count it with one of its kind; return whether it is kept."""
        with self._lock:
            self._begin_window()
            kind = refused.kind
            if self._in_window < _MOST and self._of_kind.get(kind, 0) < _MOST_OF_A_KIND:
                self._in_window += 1
                self._of_kind[kind] = self._of_kind.get(kind, 0) + 1
                self._kept.append(refused)
                return True
            self._count(kind, refused)
            return False

    def take(self) -> list[Refused]:
        """Return what was added since the last call, and forget it."""
        with self._lock:
            taken = [*self._kept, *self._counted.values()]
            self._kept, self._counted = [], {}
        return taken

    def _begin_window(self) -> None:
        now = time.monotonic()
        if now >= self._window_ends:
            self._window_ends, self._in_window, self._of_kind = now + _WINDOW_S, 0, {}

    def _count(self, kind: Kind, refused: Refused) -> None:
        known = self._counted.get(kind)
        if known is None and len(self._counted) >= _MOST_KINDS:
            refused = Refused(0, "others", at=refused.at)
            kind = refused.kind
            known = self._counted.get(kind)
        if known is not None:
            known.count += 1
            return
        refused.digest = ""  # The next of its kind may have another.
        self._counted[kind] = refused


refusals = Refusals()
"""Those of this process."""


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
            with lent_connection():
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
