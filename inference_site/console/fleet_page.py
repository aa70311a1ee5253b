"""The page of models and workers, and its actions: load, unload, drain, resume, stop a pull."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis.exceptions
from django.contrib import messages
from django.contrib.auth.decorators import permission_required
from django.core.exceptions import PermissionDenied
from django.db.models import Count, Q
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.urls import reverse
from django.utils import timezone

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.fleet import fleet
from inference_site.catalogue.fleet.leases import HostState, LiveWorker
from inference_site.catalogue.model_store.entries import entry_error
from inference_site.catalogue.model_store.models import UNFINISHED, Pull, StoredModel
from inference_site.core.admin_pages.base_admin import log_action
from inference_site.core.admin_pages.labels import free_memory
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.gateway.submission.model_access import load_progress
from inference_site.runs.models import Generation, Status

VIEW, CHANGE = "generations.view_generation", "generations.change_generation"
_PULLS_SHOWN_FOR, _MAX_PULLS = dt.timedelta(days=1), 10


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model, with sums over all workers.

    ``note`` says what a model that loads waits for, or why a model is not loaded.
    """

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
    """A host as one of its workers describes it; ``busy`` and ``slots`` are sums of its workers."""

    name: str
    state: HostState
    release: str
    busy: int
    slots: int


def fleet_context(request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the page.

    Raise PermissionDenied if the user may not view it.
    """
    user = request.user
    if not user.has_perm(VIEW):
        raise PermissionDenied
    pulls = Pull.objects.filter(
        Q(state__in=UNFINISHED) | Q(finished_at__gt=timezone.now() - _PULLS_SHOWN_FOR)
    )
    faults = ((stored, entry_error(stored)) for stored in StoredModel.objects.all())
    context: dict[str, Any] = {
        "may_change": user.has_perm(CHANGE),
        "may_add": user.has_perm("model_store.add_storedmodel"),
        "may_pull": user.has_perm("model_store.add_pull"),
        "pulls": pulls[:_MAX_PULLS] if user.has_perm("model_store.view_pull") else [],
        "not_served": [(stored, fault) for stored, fault in faults if fault],
        "routes": list(catalogue().routes.values()),
    }
    try:
        live = fleet.workers()
        context["models"] = _model_rows(live)
    except redis.exceptions.RedisError:
        return {**context, "is_unreachable": True}
    context["workers"] = [
        WorkerRow(
            worker,
            started_at=dt.datetime.fromtimestamp(worker.started_at, dt.UTC),
            memory=[f"{device.name}: {free_memory(device)}" for device in worker.devices],
        )
        for worker in live
    ]
    context["hosts"] = _host_rows(live)
    return context


def _model_rows(live: list[LiveWorker]) -> list[ModelRow]:
    specs = catalogue().models
    statuses = {model: fleet.status_among(live, model) for model in specs}
    queued = Generation.objects.filter(status=Status.QUEUED).values_list("model")
    waiting = dict(queued.annotate(Count("pk")).order_by())
    rows = []
    for spec in specs.values():
        reports = [report for worker in live if (report := worker.model(spec.id)) is not None]
        row = ModelRow(
            id=spec.id,
            engine=spec.engine,
            status=statuses[spec.id].value,
            workers=len(reports),
            busy=sum(report.busy for report in reports),
            slots=sum(report.slots for report in reports),
            waiting=waiting.get(spec.id, 0),
            is_loadable=any(
                spec.id in worker.loadable
                and not worker.is_draining
                and worker.model(spec.id) is None
                for worker in live
            ),
            note=_note(spec, statuses[spec.id], live),
        )
        rows.append(row)
    return rows


def _note(spec: ModelSpec, status: fleet.ModelStatus, live: list[LiveWorker]) -> str:
    if status == fleet.ModelStatus.LOADED:
        return ""
    if status != fleet.ModelStatus.LOADING:
        return fleet.why_absent(spec, live)
    loading = load_progress(spec.id, live)
    about = "" if loading.expected_s is None else f"In about {loading.expected_s} s."
    return f"{about} {loading.reason}".strip()


def _host_rows(live: list[LiveWorker]) -> list[HostRow]:
    reporters = {worker.host: worker for worker in live if worker.state is not None}
    rows = []
    for name, reporter in sorted(reporters.items()):
        models = [model for worker in live if worker.host == name for model in worker.models]
        busy, slots = sum(m.busy for m in models), sum(m.slots for m in models)
        rows.append(HostRow(name, reporter.state or HostState(), reporter.release, busy, slots))
    return rows


@permission_required(CHANGE, raise_exception=True)
def request_action(request: HttpRequest) -> HttpResponse:
    """Send the posted action to the worker or model, log it, and redirect to the page."""
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


@permission_required("model_store.add_pull", raise_exception=True)
def stop_pull(request: HttpRequest, pk: int) -> HttpResponse:
    """Stop a pull, log it, and redirect to the page."""
    pull = get_object_or_404(Pull, pk=pk)
    if Pull.objects.cancel(pk):
        log_action(request, pull, "Stopped.")
        messages.success(request, f"Stopping the pull of {pull}…")
    else:
        messages.error(request, f"The pull of {pull} has ended.")
    return HttpResponseRedirect(reverse("admin:fleet"))
