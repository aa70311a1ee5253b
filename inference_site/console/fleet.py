"""The page of models and workers, and its actions: load, unload, drain, resume."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis.exceptions
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import Count, Q
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.urls import reverse
from django.utils import timezone

from inference_site.admin_pages.audit import log_action
from inference_site.admin_pages.labels import free_memory
from inference_site.catalogue.catalogue import catalogue
from inference_site.domain.model_spec import ModelSpec
from inference_site.fleet import fleet
from inference_site.fleet.leases import HostState, LiveWorker, ModelReport
from inference_site.generations.models import Generation, Status
from inference_site.model_store.entries import entry_error
from inference_site.model_store.models import UNFINISHED, Pull, StoredModel
from inference_site.submission.loading import loading_of

_PULLS_SHOWN, _MOST_PULLS = dt.timedelta(days=1), 10
VIEW, CHANGE = "generations.view_generation", "generations.change_generation"


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model of the catalogue, with sums over all workers; ``note`` is what its state lacks."""

    id: str
    engine: str
    status: str
    workers: int
    busy: int
    slots: int
    waiting: int
    is_loadable: bool
    note: str


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One live worker; ``memory`` has one line of text for each device, in GiB."""

    worker: LiveWorker
    started_at: dt.datetime
    memory: list[str]


@dataclass(frozen=True, slots=True)
class HostRow:
    """A host, as one of its workers tells; ``busy`` of the ``slots`` of all its workers run."""

    name: str
    state: HostState
    release: str
    busy: int
    slots: int


def fleet_context(request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the page.

    Raise PermissionDenied if the user may not view it.
    """
    if not request.user.has_perm(VIEW):
        raise PermissionDenied
    context: dict[str, Any] = {"may_change": request.user.has_perm(CHANGE), **_pulls(request)}
    try:
        live = fleet.workers()
        context["models"] = _models(live)
    except redis.exceptions.RedisError:
        return {**context, "is_unreachable": True}
    context["workers"] = [_worker(worker) for worker in live]
    context["hosts"] = _hosts(live)
    return context


def _pulls(request: HttpRequest) -> dict[str, Any]:
    """Return the pulls that go on or have ended in the last day, newest first, and the entries of
    the database that are not served."""
    user = request.user
    recent = Pull.objects.filter(
        Q(state__in=UNFINISHED) | Q(finished_at__gt=timezone.now() - _PULLS_SHOWN)
    )
    faults = ((stored, entry_error(stored)) for stored in StoredModel.objects.all())
    return {
        "left_out": [(stored, fault) for stored, fault in faults if fault],
        "routes": list(catalogue().routes.values()),
        "may_add": user.has_perm("model_store.add_storedmodel"),
        "may_pull": user.has_perm("model_store.add_pull"),
        "pulls": recent[:_MOST_PULLS] if user.has_perm("model_store.view_pull") else [],
    }


def _hosts(live: list[LiveWorker]) -> list[HostRow]:
    told = {worker.host: worker for worker in live if worker.state is not None}
    rows = []
    for name, teller in sorted(told.items()):
        models = [model for worker in live if worker.host == name for model in worker.models]
        busy, slots = sum(m.busy for m in models), sum(m.slots for m in models)
        state = teller.state or HostState()
        rows.append(HostRow(name, state, teller.release, busy, slots))
    return rows


def stop_pull(request: HttpRequest, pk: int) -> HttpResponse:
    """Stop a pull, log it, and redirect to the page."""
    if not request.user.has_perm("model_store.add_pull"):
        raise PermissionDenied
    pull = get_object_or_404(Pull, pk=pk)
    if Pull.objects.cancel(pk):
        log_action(request, pull, "Stopped.")
        messages.success(request, f"Stopping the pull of {pull}…")
    else:
        messages.error(request, f"The pull of {pull} has ended.")
    return HttpResponseRedirect(reverse("admin:fleet"))


def _models(live: list[LiveWorker]) -> list[ModelRow]:
    specs = catalogue().models
    statuses = fleet.statuses_among(live, list(specs))
    queued = Generation.objects.filter(status=Status.QUEUED).values_list("model")
    waiting = dict(queued.annotate(Count("pk")).order_by())
    return [
        _model(spec, statuses[spec.id], live, waiting.get(spec.id, 0)) for spec in specs.values()
    ]


def _model(
    spec: ModelSpec, status: fleet.ModelStatus, live: list[LiveWorker], waiting: int
) -> ModelRow:
    having: list[ModelReport] = [m for worker in live if (m := worker.model(spec.id)) is not None]
    return ModelRow(
        id=spec.id,
        engine=spec.engine,
        status=status.value,
        workers=len(having),
        busy=sum(model.busy for model in having),
        slots=sum(model.slots for model in having),
        waiting=waiting,
        is_loadable=any(
            spec.id in worker.loadable and not worker.is_draining and worker.model(spec.id) is None
            for worker in live
        ),
        note=_note(spec, status, live),
    )


def _note(spec: ModelSpec, status: fleet.ModelStatus, live: list[LiveWorker]) -> str:
    """Return what a model waits for that is loading, or why it is not loaded."""
    if status == fleet.ModelStatus.LOADED:
        return ""
    if status != fleet.ModelStatus.LOADING:
        return fleet.why_absent(spec, live)
    loading = loading_of(spec.id, live)
    about = "" if loading.expected_s is None else f"In about {loading.expected_s} s."
    return f"{about} {loading.reason}".strip()


def _worker(worker: LiveWorker) -> WorkerRow:
    memory = [f"{device.name}: {free_memory(device)}" for device in worker.devices]
    started_at = dt.datetime.fromtimestamp(worker.started_at, dt.UTC)
    return WorkerRow(worker, started_at, memory)


def request_action(request: HttpRequest) -> HttpResponse:
    """Send the posted action to the worker or model, log it, and redirect to the page."""
    if not request.user.has_perm(CHANGE):
        raise PermissionDenied
    action, target = request.POST.get("action", ""), request.POST.get("target", "")
    try:
        run, text = _ACTIONS[action]
        run(target)
    except KeyError:
        messages.error(request, "There is no such action.")
    except fleet.FleetError as exc:
        messages.error(request, str(exc))
    except redis.exceptions.RedisError:
        messages.error(request, "Redis is not reachable.")
    else:
        log_action(request, target, f"{action.capitalize()} requested.")
        messages.success(request, text.format(target))
    return HttpResponseRedirect(reverse("admin:fleet"))


_ACTIONS: dict[str, tuple[Callable[[str], object], str]] = {
    "load": (lambda model: fleet.load(None, model), "Loading {}…"),
    "unload": (lambda model: fleet.unload(None, model), "Unloading {}…"),
    "drain": (fleet.drain, "Draining {}…"),
    "resume": (fleet.resume, "Resuming {}…"),
}
