"""The queue page: waiting and running generations, and the actions on one or many of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import redis.exceptions
from django.contrib import messages
from django.contrib.auth.decorators import permission_required
from django.core.exceptions import PermissionDenied
from django.db.models import Count, Min, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.template.defaultfilters import pluralize
from django.urls import reverse
from django.utils import timezone

from inference_site.console.request_log_page import contents_of
from inference_site.console.tiles import VIEW_REQUESTS
from inference_site.core.admin_pages.base_admin import log_action
from inference_site.core.admin_pages.labels import may_see_content
from inference_site.runs.cancellation import stop
from inference_site.runs.models import Generation, ServiceClass, Status
from inference_site.runs.queue import move_up
from inference_site.runs.queue_position import (
    QueuePosition,
    Waiting,
    claim_order,
    position_at,
    slots_of,
)

CHANGE = "generations.change_generation"
_MAX_ROWS, _MAX_READ = 100, 20_000
_IS_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)


def queue_context(request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the page, for the ``model`` of the query or for all.

    Raise PermissionDenied if the user may not view it.
    """
    if not request.user.has_perm(VIEW_REQUESTS):
        raise PermissionDenied
    rows, model = Generation.objects.select_related("project", "api_key"), _chosen_model(request)
    if model:
        rows = rows.filter(model=model)
    running = rows.filter(status=Status.RUNNING).order_by("model", "claimed_at")
    waiting = _next_in_line(rows)
    sees_content = may_see_content(request)
    if sees_content:
        found = contents_of([row.public_id for row in waiting])
        for row in waiting:
            known = found.get(row.public_id)
            row.asked = known.asked if known else "—"  # type: ignore[attr-defined]  # For the page.
    groups = (
        Generation.objects.filter(status=Status.QUEUED)
        .values("model", "project__name", "service_class")
        .annotate(count=Count("pk"), oldest=Min("created_at"))
        .order_by("model", "service_class", "project__name")
    )
    now = timezone.now()
    return {
        "model": model,
        "groups": [
            {
                "model": row["model"],
                "project": row["project__name"],
                "service_class": ServiceClass(row["service_class"]).label,
                "count": row["count"],
                "oldest_s": (now - row["oldest"]).total_seconds(),
            }
            for row in groups
        ],
        "waiting": waiting,
        "sees_content": sees_content,
        "running": running[:_MAX_ROWS],
        "may_change": request.user.has_perm(CHANGE),
        "urgent": ServiceClass.URGENT,
    }


def _chosen_model(request: HttpRequest) -> str:
    return request.GET.get("model", "")


def _next_in_line(rows: QuerySet[Generation]) -> list[Generation]:
    """Return the waiting generations by model, as workers will claim them, with their places."""
    running: dict[str, list[int]] = {}
    runs = Generation.objects.filter(status=Status.RUNNING).order_by("claimed_at")
    for model, project_id in runs.values_list("model", "project_id"):
        running.setdefault(model, []).append(project_id)
    waiting: dict[str, list[Waiting]] = {}
    queued = rows.filter(status=Status.QUEUED).order_by("created_at", "pk")
    columns = ("model", "pk", "project_id", "service_class")
    for model, *facts in queued.values_list(*columns)[:_MAX_READ]:
        waiting.setdefault(model, []).append(Waiting(*facts))
    places: dict[int, QueuePosition] = {}
    for model in sorted(waiting):
        if len(places) >= _MAX_ROWS:
            break
        runs_now = running.get(model, [])
        most = _MAX_ROWS - len(places)
        try:
            slots = slots_of(model) or len(runs_now)
        except redis.exceptions.RedisError:
            slots = len(runs_now)
        order = claim_order(waiting[model], runs_now, slots, most)
        for nth, pk in enumerate(order, start=1):
            try:
                places[pk] = position_at(model, nth)
            except redis.exceptions.RedisError:  # The page is useful without estimates.
                places[pk] = QueuePosition(nth, None)
    found = rows.in_bulk(places)
    shown = [found[pk] for pk in places if pk in found]  # Another may have ended meanwhile.
    for row in shown:
        row.place = places[row.pk]  # type: ignore[attr-defined]  # For the template.
    return shown


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
    return _back(request)


@permission_required(CHANGE, raise_exception=True)
def stop_chosen(request: HttpRequest) -> HttpResponse:
    """Stop the posted generations, log each, and redirect to the page."""
    chosen = [int(pk) for pk in request.POST.getlist("chosen") if _IS_NUMBER.fullmatch(pk)]
    stopped = late = 0
    try:
        for generation in Generation.objects.filter(pk__in=chosen[: 2 * _MAX_ROWS]):
            if stop(generation):
                stopped += 1
                log_action(request, generation, "Stopped.")
        late = len(set(chosen)) - stopped
    except redis.exceptions.RedisError:
        messages.error(request, "Not all were stopped: Redis is not reachable.")
    if not chosen:
        messages.info(request, "Choose requests first.")
    elif stopped:
        messages.success(request, f"Stopping {stopped} request{pluralize(stopped)}…")
    if late:
        messages.info(request, f"{late} had ended before.")
    return _back(request)


def _back(request: HttpRequest) -> HttpResponse:
    model = _chosen_model(request)
    query = f"?{urlencode({'model': model})}" if model else ""
    return HttpResponseRedirect(reverse("admin:queue") + query)
