"""The queue as operators see it: who waits for which model, who runs, and what may be done."""

from __future__ import annotations

from typing import Any

import redis.exceptions
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import Count, Min
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.urls import reverse
from django.utils import timezone

from inference_site.console.audit import note
from worker.interventions import move_up, stop
from worker.models import Generation, ServiceClass, Status

VIEW, CHANGE = "worker.view_generation", "worker.change_generation"
_MOST = 100


def queue_context(request: HttpRequest) -> dict[str, Any]:
    """Return what the page shows. Raise PermissionDenied."""
    if not request.user.has_perm(VIEW):
        raise PermissionDenied
    rows = Generation.objects.select_related("project", "api_key")
    waiting = rows.filter(status=Status.QUEUED).order_by("model", "service_class", "created_at")
    running = rows.filter(status=Status.RUNNING).order_by("model", "claimed_at")
    return {
        "groups": _groups(),
        "waiting": waiting[:_MOST],
        "running": running[:_MOST],
        "most": _MOST,
        "may_change": request.user.has_perm(CHANGE),
        "urgent": ServiceClass.URGENT,
    }


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


def act(request: HttpRequest, pk: int) -> HttpResponse:
    """Do what the form says to one generation, note it, and go back to the page."""
    if not request.user.has_perm(CHANGE):
        raise PermissionDenied
    generation = get_object_or_404(Generation, pk=pk)
    does_stop = request.POST.get("act") == "stop"
    try:
        done = stop(generation) if does_stop else move_up(generation)
    except redis.exceptions.RedisError:
        messages.error(request, "It could not be stopped: Redis is not reachable.")
        return _back()
    if done:
        note(request, generation, "Stopped." if does_stop else "Moved up.")
        messages.success(request, "It is being stopped." if does_stop else "It goes next.")
    else:
        messages.info(request, "It waits no more.")
    return _back()


def _back() -> HttpResponse:
    return HttpResponseRedirect(reverse("admin:queue"))
