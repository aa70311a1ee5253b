"""The queue page: waiting and running generations, and the actions "move up" and "stop"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import redis.exceptions
from django.contrib import messages
from django.contrib.auth.decorators import permission_required
from django.core.exceptions import PermissionDenied
from django.db.models import Case, Count, IntegerField, Min, QuerySet, Value, When
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.urls import reverse
from django.utils import timezone

from inference_site.core.admin_pages.base_admin import log_action
from inference_site.runs.cancellation import stop
from inference_site.runs.models import Generation, ServiceClass, Status
from inference_site.runs.queue import move_up
from inference_site.runs.queue_position import position_of

VIEW, CHANGE = "generations.view_generation", "generations.change_generation"
_MAX_ROWS = 100


def queue_context(request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the page, for the ``model`` of the query or for all.

    Raise PermissionDenied if the user may not view it.
    """
    if not request.user.has_perm(VIEW):
        raise PermissionDenied
    rows, model = Generation.objects.select_related("project", "api_key"), _chosen_model(request)
    if model:
        rows = rows.filter(model=model)
    running = rows.filter(status=Status.RUNNING).order_by("model", "claimed_at")
    waiting = list(_in_claim_order(rows)[:_MAX_ROWS])
    _add_places(waiting)
    return {
        "model": model,
        "groups": _waiting_groups(),
        "waiting": waiting,
        "running": running[:_MAX_ROWS],
        "may_change": request.user.has_perm(CHANGE),
        "urgent": ServiceClass.URGENT,
    }


def _chosen_model(request: HttpRequest) -> str:
    return request.GET.get("model", "").replace("\0", "")


def _in_claim_order(rows: QuerySet[Generation]) -> QuerySet[Generation]:
    """Return waiting generations by model, in the order in which workers claim them."""
    running = Generation.objects.filter(status=Status.RUNNING)
    runs = running.values_list("model", "project").annotate(Count("pk")).order_by()
    runs_of_project = Case(
        *(When(model=model, project=project, then=Value(count)) for model, project, count in runs),
        default=Value(0),
        output_field=IntegerField(),
    )
    waiting = rows.filter(status=Status.QUEUED).annotate(runs=runs_of_project)
    return waiting.order_by("model", "service_class", "runs", "created_at")


def _add_places(waiting: Sequence[Generation]) -> None:
    """Set the ``place`` of each generation, all in claim order, for the template."""
    before: Counter[tuple[str, int, int]] = Counter()
    for row in waiting:
        key = row.model, row.project_id, row.service_class
        with suppress(redis.exceptions.RedisError):  # The page is useful without places.
            row.place = position_of(*key, before[key])  # type: ignore[attr-defined]  # For the page.
        before[key] += 1


def _waiting_groups() -> list[dict[str, Any]]:
    """Return the number waiting and the longest wait, by model, project and class."""
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
class _Action:
    """An action on a generation and its texts; ``run`` returns False when it is too late.

    ``success`` may name the ``id`` and the ``model`` of the generation.
    """

    run: Callable[[Generation], bool]
    log_entry: str
    success: str
    too_late: str


_ACTIONS = {
    "stop": _Action(
        stop,
        "Stopped.",
        "Stopping {id}…",
        "The generation had already ended.",
    ),
    "up": _Action(
        move_up,
        "Moved up.",
        "Moved to the front of the queue for {model}.",
        "It is at the front already, or no longer waits.",
    ),
}


@permission_required(CHANGE, raise_exception=True)
def run_action(request: HttpRequest, pk: int) -> HttpResponse:
    """Run the posted action on one generation, log it, and redirect to the page."""
    generation = get_object_or_404(Generation, pk=pk)
    action = _ACTIONS.get(request.POST.get("action", ""))
    try:
        if action is None:
            messages.error(request, "There is no such action.")
        elif action.run(generation):
            log_action(request, generation, action.log_entry)
            text = action.success.format(id=generation.public_id, model=generation.model)
            messages.success(request, text)
        else:
            messages.info(request, action.too_late)
    except redis.exceptions.RedisError:
        messages.error(request, "The action failed: Redis is not reachable.")
    model = _chosen_model(request)
    query = f"?{urlencode({'model': model})}" if model else ""
    return HttpResponseRedirect(reverse("admin:queue") + query)
