"""The queue as operators see it: who waits for which model, who runs, and what may be done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import redis.exceptions
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import Case, Count, IntegerField, Min, QuerySet, Value, When
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.urls import reverse
from django.utils import timezone

from inference_site.console.audit import note
from inference_site.generations.models import Generation, ServiceClass, Status
from inference_site.generations.operator_actions import move_up, stop

VIEW, CHANGE = "generations.view_generation", "generations.change_generation"
_MOST = 100


def queue_context(request: HttpRequest) -> dict[str, Any]:
    """Return what the page shows, of one ``model`` or of all. Raise PermissionDenied."""
    if not request.user.has_perm(VIEW):
        raise PermissionDenied
    rows, model = Generation.objects.select_related("project", "api_key"), _model(request)
    if model:
        rows = rows.filter(model=model)
    running = rows.filter(status=Status.RUNNING).order_by("model", "claimed_at")
    return {
        "model": model,
        "groups": _groups(),
        "waiting": _line(rows)[:_MOST],
        "running": running[:_MOST],
        "most": _MOST,
        "may_change": request.user.has_perm(CHANGE),
        "urgent": ServiceClass.URGENT,
    }


def _model(request: HttpRequest) -> str:
    return request.GET.get("model", "").replace("\0", "")


def _line(rows: QuerySet[Generation]) -> QuerySet[Generation]:
    """Return those that wait, by model in the order in which they are claimed (``_CLAIM``)."""
    running = Generation.objects.filter(status=Status.RUNNING)
    runs = running.values_list("model", "project").annotate(Count("pk")).order_by()
    share = Case(
        *(When(model=model, project=project, then=Value(count)) for model, project, count in runs),
        default=Value(0),
        output_field=IntegerField(),
    )
    waiting = rows.filter(status=Status.QUEUED).annotate(runs=share)
    return waiting.order_by("model", "service_class", "runs", "created_at")


def _groups() -> list[dict[str, Any]]:
    """Return how many wait, and for how long, by model, project and class."""
    found = (
        Generation.objects.filter(status=Status.QUEUED)
        .values("model", "project__name", "service_class")
        .annotate(count=Count("pk"), oldest=Min("created_at"))
        .order_by("model", "service_class", "project__name")
    )
    now = timezone.now()
    return [
        {
            "model": row["model"],
            "project": row["project__name"],
            "service_class": ServiceClass(row["service_class"]).label,
            "count": row["count"],
            "oldest_s": (now - row["oldest"]).total_seconds(),
        }
        for row in found
    ]


@dataclass(frozen=True, slots=True)
class _Act:
    """What may be done to a generation, and how it is told: to the log, then to who did it."""

    do: Callable[[Generation], bool]
    noted: str
    told: str
    too_late: str


_ACTS = {
    "stop": _Act(stop, "Stopped.", "It is being stopped.", "It had ended already."),
    "up": _Act(
        move_up,
        "Moved up.",
        "It goes before all of its model that were not moved up.",
        "It waits no more, or was moved up already.",
    ),
}


def act(request: HttpRequest, pk: int) -> HttpResponse:
    """Do what the form says to one generation, note it, and go back to the page."""
    if not request.user.has_perm(CHANGE):
        raise PermissionDenied
    generation = get_object_or_404(Generation, pk=pk)
    chosen = _ACTS.get(request.POST.get("act", ""))
    if chosen is None:
        messages.error(request, "There is no such action.")
        return _back(request)
    try:
        is_done = chosen.do(generation)
    except redis.exceptions.RedisError:
        messages.error(request, "It could not be done: Redis is not reachable.")
        return _back(request)
    if is_done:
        note(request, generation, chosen.noted)
        messages.success(request, chosen.told)
    else:
        messages.info(request, chosen.too_late)
    return _back(request)


def _back(request: HttpRequest) -> HttpResponse:
    model = _model(request)
    query = f"?{urlencode({'model': model})}" if model else ""
    return HttpResponseRedirect(reverse("admin:queue") + query)
