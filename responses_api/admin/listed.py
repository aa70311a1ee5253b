"""What the list of responses shows besides their fields: the state of their runs, and previews."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Case, OuterRef, QuerySet, Subquery, When
from django.http import HttpRequest

from inference_site.generations.models import Generation, Status
from responses_api.models import ENDED, ResponseStatus, StoredResponse

_OPEN = sorted(set(ResponseStatus) - ENDED)
_STATUS_OF_RUN = {
    Status.QUEUED: ResponseStatus.QUEUED,
    Status.RUNNING: ResponseStatus.IN_PROGRESS,
}


def with_run(rows: QuerySet[StoredResponse]) -> QuerySet[StoredResponse]:
    """Add ``run``, the status of the generation of each response that has not ended."""
    return rows.annotate(run=status_of_run())


def status_of_run() -> Case:
    """Return the status of the generation of a row of responses, null if the response has ended."""
    generation = Generation.objects.filter(public_id=OuterRef("public_id")).values("status")
    return Case(When(status__in=_OPEN, then=Subquery(generation[:1])))


def status_of(stored: StoredResponse, run: str | None) -> str:
    """Return the status of a response; ``run`` is the status of its generation, if it has one.

    The row of a response says only that it has not ended: whether it runs, its generation knows.
    """
    if stored.status in ENDED or run is None:
        return stored.status
    return _STATUS_OF_RUN.get(Status(run), ResponseStatus(stored.status))


class StatusFilter(admin.SimpleListFilter):
    """The status of a response, and of its generation while that has not ended."""

    title = parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(status.value, status.replace("_", " ")) for status in ResponseStatus]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value() or ""
        runs = [run for run, status in _STATUS_OF_RUN.items() if status == chosen]
        if runs:
            return queryset.filter(status__in=_OPEN, run=runs[0])
        return queryset.filter(status=chosen) if chosen in ResponseStatus else queryset
