"""Refused requests: buffered in the web process, and written to the database by a thread.

Adding one takes microseconds and waits for nothing. Above a rate, requests with the same error are
only counted, so memory and rows are bounded for any number of requests.

Messages quote values of requests, and values may be content or secrets. They are taken out before
anything is stored (``kept_message``).
"""

from __future__ import annotations

import datetime as dt
import logging
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from django.db import Error

from inference_site.accounts.keys import owners_of
from inference_site.core.observability.logs import redacted
from inference_site.core.observability.outages import OutageLog
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.runs.request_log.models import LONGEST_MESSAGE, LONGEST_PARAM, Refusal

logger = logging.getLogger(__name__)

_WINDOW_S = 60.0
_MAX_ROWS_OF_GROUP = 60
"""Rows of one group in a window; above it, one row for each run of the writer."""
_MAX_ROWS = 600
"""Rows of all groups in a window; above it, one row of a group for each run of the writer."""
_MAX_GROUPS = 200
"""Groups that are counted between two runs of the writer; further groups are counted as one."""
_WRITE_INTERVAL_S = 1.0
_MAX_HELD = 2_000
"""Refused requests held while PostgreSQL is unavailable; later ones are dropped."""
TAKEN_OUT = "…"
_MOST_READ = 4_000
_QUOTES = "'\"`“”‘’"
_OPENING = re.compile(rf"(?<!\w)[{_QUOTES}]")
_CLOSING = re.compile(rf"[{_QUOTES}](?!\w)")
_REPORTED = re.compile(
    r"(?P<start>\bNo such [^:]{1,60}:|\b(?:The model|The server|The hub)\b[^:]{0,40}:).*", re.DOTALL
)
_PLAIN = re.compile(
    r"[(\[]*(?:[A-Za-z]{1,20}(?:[-/'’][A-Za-z]{1,20})*|[0-9][0-9.,]{0,18})%?[\])]*[.,:;?!]*"
)
_PARAM = re.compile(
    r"[A-Za-z_][A-Za-z0-9_]{0,40}(?:\.[A-Za-z0-9_]{1,40}|\[[0-9]{1,6}\])*", re.ASCII
)

Group = tuple[int, str, int | None]
"""HTTP status, error code and key of requests that are counted together."""


@dataclass(slots=True)
class RefusedRequest:
    """One refused request; ``count`` includes the requests of its group that were only counted.

    ``digest`` is the digest of its API key, if the key has not been looked up yet. ``message`` is
    the message that the client got; only a part of it is stored.
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
    param: str = ""
    message: str = ""
    trace_id: str = ""
    at: dt.datetime = field(default_factory=lambda: dt.datetime.now(dt.UTC))
    count: int = 1

    @property
    def group(self) -> Group:
        """The group with which it is counted."""
        return self.status, self.error_code, self.api_key_id


class RefusalBuffer:
    """The refused requests since the last call of ``take``; safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[RefusedRequest] = []
        self._counted: dict[Group, RefusedRequest] = {}
        self._rows_of_group: dict[Group, int] = {}
        self._window_ends = 0.0
        self._rows_in_window = 0

    def add(self, refused: RefusedRequest) -> bool:
        """Keep a refused request, or only count it; return whether it is kept."""
        with self._lock:
            now = time.monotonic()
            if now >= self._window_ends:
                self._window_ends, self._rows_in_window = now + _WINDOW_S, 0
                self._rows_of_group = {}
            group = refused.group
            rows = self._rows_of_group.get(group, 0)
            if self._rows_in_window < _MAX_ROWS and rows < _MAX_ROWS_OF_GROUP:
                self._rows_in_window += 1
                self._rows_of_group[group] = rows + 1
                self._kept.append(refused)
                return True
            known = self._counted.get(group)
            if known is None and len(self._counted) >= _MAX_GROUPS:
                refused = RefusedRequest(0, "others", at=refused.at)
                group = refused.group
                known = self._counted.get(group)
            if known is not None:
                known.count += 1
            else:
                refused.trace_id = ""
                refused.digest = ""  # Other requests of the group may have another key.
                self._counted[group] = refused
            return False

    def take(self) -> list[RefusedRequest]:
        """Return and remove the requests that were added since the last call."""
        with self._lock:
            taken = [*self._kept, *self._counted.values()]
            self._kept, self._counted = [], {}
        return taken


class RefusalWriter:
    """A thread that stores the refused requests of a buffer, in batches.

    While PostgreSQL is unavailable, it holds up to ``_MAX_HELD`` requests and tries again.
    """

    def __init__(self, source: RefusalBuffer) -> None:
        self._source = source
        self._held: list[RefusedRequest] = []
        self._outage = OutageLog(logger, "refused requests are held")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="refusals", daemon=True)

    def start(self) -> None:
        """Start the thread; may be called once."""
        self._thread.start()

    def stop(self) -> None:
        """Store the remaining requests, and end the thread."""
        self._stopped.set()
        self._thread.join(5)

    def write(self) -> bool:
        """Store the buffered and the held requests; return False if it has to be tried again."""
        taken = self._source.take()
        log_counted(taken)
        self._held = [*self._held, *taken][:_MAX_HELD]
        if not self._held:
            return True
        try:
            with release_connection_after():
                _store(self._held)
        except Error as exc:
            self._outage.failed(exc)
            return False
        self._outage.succeeded()
        self._held = []
        return True

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopped.wait(_WRITE_INTERVAL_S)
            try:
                self.write()
            except Exception:
                logger.exception("%d refused requests could not be stored", len(self._held))
                self._held = []


def log_counted(taken: Sequence[RefusedRequest]) -> None:
    """Log the number of requests that were only counted.

    The access log has no line for those of them that were answered with a 503.
    """
    for one in taken:
        if one.count > 1:
            facts = {"status": one.status, "error_code": one.error_code, "project": one.project_id}
            logger.info("refused %d requests with the same error", one.count, extra=facts)


def _store(refused: Sequence[RefusedRequest]) -> None:
    """Insert a row for each, oldest first, after looking up the keys of the digests."""
    owners = owners_of({one.digest for one in refused if one.digest})
    rows = []
    for one in sorted(refused, key=lambda one: one.at):
        project_id, api_key_id = owners.get(one.digest, (one.project_id, one.api_key_id))
        row = Refusal(
            created_at=one.at,
            project_id=project_id,
            api_key_id=api_key_id,
            method=one.method,
            path=one.path,
            model=one.model,
            status=one.status,
            error_code=one.error_code,
            param=kept_param(one.param),
            message=kept_message(one.message),
            request_id=one.request_id,
            trace_id=one.trace_id[:32],
            duration_ms=one.duration_ms,
            count=one.count,
        )
        rows.append(row)
    Refusal.objects.bulk_create(rows)


def kept_param(param: str | None) -> str:
    """Return the name of a parameter; without it, if it has parts that are no names of fields."""
    given = (param or "")[:LONGEST_PARAM]
    return given if _PARAM.fullmatch(given) else ""


def kept_message(message: str) -> str:
    """Return what is kept of a message, at most ``LONGEST_MESSAGE`` characters. Taken out are:

    - everything from the first opening quote to the last closing one, since a value may contain
      quotes itself; the row has the names of the parameter and the model anyway;
    - what follows "No such …:" and what an engine or a hub has said;
    - every other word that is no plain word or number, such as an id, an address or a path.
    """
    text = redacted(message[:_MOST_READ])
    text = _REPORTED.sub(lambda found: f"{found['start']} {TAKEN_OUT}", text)
    opening = _OPENING.search(text)
    if opening is not None:
        closings = [found.end() for found in _CLOSING.finditer(text, opening.end())]
        text = text[: opening.start()] + TAKEN_OUT + (text[closings[-1] :] if closings else "")
    words = (  # The punctuation after a word that is taken out stays.
        word if _PLAIN.fullmatch(word) else TAKEN_OUT + word[len(word.rstrip(".,:;")) :][:1]
        for word in text.split()
    )
    line = re.sub(rf"{TAKEN_OUT}(?: {TAKEN_OUT})+", TAKEN_OUT, " ".join(words))
    return line if len(line) <= LONGEST_MESSAGE else f"{line[: LONGEST_MESSAGE - 1]}{TAKEN_OUT}"


refusals = RefusalBuffer()
"""The refused requests of this process."""
refusal_writer = RefusalWriter(refusals)
