"""What a user has chosen to see of the request log."""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from typing import Any

from django.db.models import Model, QuerySet
from django.http import QueryDict
from django.utils import timezone

from inference_site.admin_pages.keyset import first_since
from inference_site.generations.models import Generation, Status
from inference_site.request_log.models import Refusal

REFUSED = "refused"
SPANS = {"1h": dt.timedelta(hours=1), "24h": dt.timedelta(days=1), "7d": dt.timedelta(days=7)}
FIELDS = ("q", "project", "key", "model", "status", "error", "since")
"""The parameters of a choice; what a saved filter keeps."""
_OWN_IDS = ("chatcmpl-", "cmpl-", "resp_", "embd-", "tok-")
_CURSOR = re.compile(r"([0-9]{1,18})-([0-9]{1,18})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Choice:
    """Filters, words, and the ids of generations and refusals below which the page begins."""

    q: str = ""
    project: int | None = None
    key: int | None = None
    model: str = ""
    status: str = ""
    error: str = ""
    since: str = ""
    before: tuple[int, int] | None = None

    @property
    def id(self) -> str:
        """The id that is looked for, if ``q`` is one."""
        return self.q if self.q.startswith((*_OWN_IDS, "req_")) else ""

    @property
    def words(self) -> str:
        """The words that are looked for in prompts and answers."""
        return "" if self.id else self.q

    def generations(self) -> QuerySet[Generation] | None:
        """Return the accepted requests; None if the choice is of refused ones."""
        rows = self._shared(Generation)
        if self.status == REFUSED or self.status.isdecimal():
            return None
        if self.status:
            rows = rows.filter(status=self.status)
        elif self.error:
            # Only these have an error, and the index of the status finds them.
            rows = rows.filter(status__in=[Status.FAILED, Status.CANCELLED])
        if self.id:
            column = "request_id" if self.id.startswith("req_") else "public_id"
            rows = rows.filter(**{column: self.id})
        return rows

    def refusals(self) -> QuerySet[Refusal] | None:
        """Return the refused requests; None if the choice is of accepted ones."""
        rows = self._shared(Refusal)
        if self.words or (self.id and not self.id.startswith("req_")):
            return None
        if self.status.isdecimal():
            rows = rows.filter(status=self.status)
        elif self.status and self.status != REFUSED:
            return None
        return rows.filter(request_id=self.id) if self.id else rows

    def _shared(self, table: type[Model]) -> QuerySet[Any]:
        """Return the rows of a table by what both tables have."""
        given = {
            "project": self.project,
            "api_key": self.key,
            "model": self.model or None,
            "error_code": self.error or None,
        }
        rows = table._default_manager.filter(
            **{name: value for name, value in given.items() if value is not None}
        )
        if self.since:
            moment = timezone.now() - SPANS[self.since]
            first = first_since(table, "created_at", moment)
            rows = rows.filter(pk__gte=first, created_at__gte=moment)
        return rows


def chosen(query: QueryDict) -> Choice:
    """Return the choice in a query string; missing and invalid values become the defaults."""
    text = {name: query.get(name, "").replace("\0", "").strip()[:200] for name in FIELDS}
    status, since = text["status"], text["since"]
    is_known = status in (REFUSED, *Status.values) or (status.isascii() and len(status) == 3)
    cursor = _CURSOR.fullmatch(query.get("before", ""))
    return Choice(
        q=text["q"],
        project=_number(text["project"]),
        key=_number(text["key"]),
        model=text["model"],
        status=status if is_known and (status.isdecimal() or status.isalpha()) else "",
        error=text["error"],
        since=since if since in SPANS else "",
        before=(int(cursor[1]), int(cursor[2])) if cursor else None,
    )


def _number(given: str) -> int | None:
    return int(given) if given.isdecimal() and len(given) <= 18 else None
