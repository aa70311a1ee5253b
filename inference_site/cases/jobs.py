"""The job of beat for runs of cases, which costs almost nothing while there are none."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet

from inference_site.cases.models import CaseRun, RunState
from inference_site.core.storage.postgresql import cached_sql


def collect_results() -> None:
    """Take the results of runs; what that needs is imported when the first run is there."""
    if _one_open_run():
        from inference_site.cases.running import collect

        collect()


@cached_sql
def _one_open_run() -> QuerySet[Any, Any]:
    return CaseRun.objects.exclude(state=RunState.ENDED).values_list("pk")[:1]
