"""The page of models and workers, with its actions: load, unload, drain, resume, stop a pull.

The page of one model shows its settings, its workers, its usage, its server logs and its errors.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import redis.exceptions
from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import permission_required
from django.core.exceptions import PermissionDenied
from django.db.models import Count
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.urls import reverse
from django.utils import timezone

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.engines.registry import model_capabilities
from inference_site.catalogue.fleet import fleet
from inference_site.catalogue.fleet.leases import (
    HostState,
    LiveWorker,
    ModelReport,
    ModelState,
    live_workers,
)
from inference_site.catalogue.fleet.orders import server_log
from inference_site.catalogue.model_files import FileFacts, file_facts
from inference_site.catalogue.model_labels import NO_PRICE, is_priced
from inference_site.catalogue.model_store.entries import entry_error
from inference_site.catalogue.model_store.models import UNFINISHED, Pull, StoredModel
from inference_site.console.model_estimate import settings_in_force
from inference_site.console.model_states import (
    QUESTIONS,
    ModelCondition,
    broken_files,
    condition,
    conditions,
)
from inference_site.console.tiles import LATEST, VIEW_REQUESTS, Tile, latest_errors, recent_tiles
from inference_site.core.admin_pages.base_admin import log_action
from inference_site.core.admin_pages.labels import free_memory, money, size
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.runs.models import Generation, Status
from inference_site.runs.usage.models import Period

_PULLS_SHOWN_FOR, _MAX_ENDED_PULLS = dt.timedelta(days=1), 10
_ACTIONS: dict[str, tuple[Callable[[str], object], str]] = {
    "load": (lambda model: fleet.load(None, model), "Loading {}…"),
    "unload": (lambda model: fleet.unload(None, model), "Unloading {}…"),
    "drain": (fleet.drain, "Draining {}…"),
    "resume": (fleet.resume, "Resuming {}…"),
}
USAGE, CHANGE = "usage.view_usagerollup", "generations.change_generation"


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model, with sums over all workers.

    ``note`` is the reason of its ``status`` (see ``model_states``).
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
    if not user.has_perm(VIEW_REQUESTS):
        raise PermissionDenied
    unfinished = Pull.objects.filter(state__in=UNFINISHED)  # All: only here they can be stopped.
    ended = Pull.objects.filter(finished_at__gt=timezone.now() - _PULLS_SHOWN_FOR)
    faults = ((stored, entry_error(stored)) for stored in StoredModel.objects.all())
    context: dict[str, Any] = {
        "may_change": user.has_perm(CHANGE),
        "may_add": user.has_perm("model_store.add_storedmodel"),
        "may_pull": user.has_perm("model_store.add_pull"),
        "pulls": [*unfinished, *ended[:_MAX_ENDED_PULLS]]
        if user.has_perm("model_store.view_pull")
        else [],
        "not_served": [(stored, fault) for stored, fault in faults if fault],
        "routes": list(catalogue().routes.values()),
        "broken_files": broken_files(),
    }
    try:
        live = live_workers()
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
    reporters = {worker.host: worker for worker in live if worker.state is not None}
    context["hosts"] = hosts = []
    for name, reporter in sorted(reporters.items()):
        models = [model for worker in live if worker.host == name for model in worker.models]
        busy, slots = sum(m.busy for m in models), sum(m.slots for m in models)
        hosts.append(HostRow(name, reporter.state or HostState(), reporter.release, busy, slots))
    return context


def _model_rows(live: list[LiveWorker]) -> list[ModelRow]:
    specs = catalogue().models
    found = conditions(list(specs.values()), live)
    queued = Generation.objects.filter(status=Status.QUEUED).values_list("model")
    waiting = dict(queued.annotate(Count("pk")).order_by())
    rows = []
    for spec in specs.values():
        reports = [report for worker in live if (report := worker.model(spec.id)) is not None]
        row = ModelRow(
            id=spec.id,
            engine=spec.engine,
            status=found[spec.id].state,
            workers=len(reports),
            busy=sum(report.busy for report in reports),
            slots=sum(report.slots for report in reports),
            waiting=waiting.get(spec.id, 0),
            is_loadable=_is_loadable(spec.id, live),
            note=found[spec.id].reason,
        )
        rows.append(row)
    return rows


def _is_loadable(model: str, live: list[LiveWorker]) -> bool:
    """Whether a worker that does not have the model, or failed to load it, can load it."""
    able = [one for one in live if model in one.loadable and not one.is_draining]
    reports = [one.model(model) for one in able]
    return any(report is None or report.state == ModelState.FAILED for report in reports)


@permission_required(CHANGE, raise_exception=True)
def request_action(request: HttpRequest) -> HttpResponse:
    """Send the posted action to the worker or model, log it, and redirect to the page.

    The page is that of the posted ``model``, if there is such a model.
    """
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
    model = request.POST.get("model", "")
    if model in catalogue().models:
        return HttpResponseRedirect(reverse("admin:model", args=[model]))
    return HttpResponseRedirect(reverse("admin:fleet"))


@permission_required(CHANGE, raise_exception=True)
def ask_before(request: HttpRequest) -> HttpResponse:
    """Return the question before an action, as a text: what the action interrupts now."""
    ask = QUESTIONS.get(request.GET.get("action", ""))
    if ask is None:
        raise Http404("There is no such question.")
    try:
        live = live_workers()
    except redis.exceptions.RedisError:
        live = []
    question = ask(request.GET.get("target", ""), live)
    answer = HttpResponse(question, content_type="text/plain; charset=utf-8")
    answer["Cache-Control"] = "no-store"
    return answer


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


@dataclass(frozen=True, slots=True)
class Replica:
    """The model on one worker, as the worker reports it."""

    worker: LiveWorker
    report: ModelReport
    since: dt.datetime

    @property
    def telemetry(self) -> list[tuple[str, str]]:
        """Names and values that the model's server reports."""
        values = self.report.telemetry
        return [(name.replace("_", " "), f"{value:,.4g}") for name, value in values.items()]


def model_context(request: HttpRequest, model: str) -> dict[str, Any]:
    """Return the template context of the page.

    Raise PermissionDenied if the user may not view it, Http404 if there is no such model.
    """
    if not request.user.has_perm(VIEW_REQUESTS):
        raise PermissionDenied
    spec = catalogue().models.get(model)
    if spec is None:
        raise Http404(f"There is no model '{model}'.")
    try:
        live, is_unreachable = live_workers(), False
        shown = condition(spec, live)
    except redis.exceptions.RedisError:
        live, is_unreachable, shown = [], True, ModelCondition("unknown")
    replicas = [
        Replica(worker, report, dt.datetime.fromtimestamp(report.since, dt.UTC))
        for worker in live
        if (report := worker.model(model)) is not None
    ]
    logs: list[tuple[str, list[str]]] = []
    if request.user.has_perm(CHANGE):
        logs = [(replica.worker.id, server_log(replica.worker.id, model)) for replica in replicas]
    tiles: list[Tile] = []
    if request.user.has_perm(USAGE):
        tiles = recent_tiles(Period.HOUR, dt.timedelta(days=1), models=[model], user=request.user)
    return {
        "title": f"Model {model}",
        "spec": spec,
        "condition": shown,
        "may_change": request.user.has_perm(CHANGE) and not is_unreachable,
        "is_loadable": _is_loadable(model, live),
        "is_tried": "chat" in fleet.capabilities_of(spec) if live else False,
        "is_unreachable": is_unreachable,
        "details": _details(spec, [replica.report for replica in replicas]),
        "settings": settings_in_force(
            spec, _stored_entry(model), [replica.report for replica in replicas]
        ),
        "replicas": replicas,
        "logs": [(worker, lines) for worker, lines in logs if lines],
        "tiles": tiles,
        "errors": latest_errors(Generation.objects.filter(model=model)),
        "latest": f"{LATEST:,}",
        "edit": _edit_address(request, model),
    }


def _details(spec: ModelSpec, reports: list[ModelReport]) -> list[tuple[str, str]]:
    """Return names and values: from a worker's report, or else from the file on this host."""
    report = next((one for one in reports if one.size_bytes), None)
    facts: FileFacts
    if report is None:
        facts = file_facts(spec)
    else:
        facts = {
            "size_bytes": report.size_bytes,
            "memory_bytes": report.memory_bytes,
            "memory_parts": report.memory_parts,
            "architecture": report.architecture,
            "quantisation": report.quantisation,
            "trained_context": report.trained_context,
        }
    library = next((one.library for one in reports if one.library), "")
    reported = next((one.capabilities for one in reports if one.capabilities), None)
    capabilities = model_capabilities(spec) if reported is None else reported
    trained, parts = facts.get("trained_context", 0), facts.get("memory_parts")
    context = f"{fleet.context_among(spec, reports):,} tokens in each slot"
    memory = size(facts.get("memory_bytes", 0))
    price = NO_PRICE
    if is_priced(spec.id):
        price = f"input {money(spec.price.input)}, cached {money(spec.price.cached)}"
        price += f", output {money(spec.price.output)} for a million tokens"
    return [
        ("Source", _source(spec)),
        ("Engine", f"{spec.engine} ({library})" if library else spec.engine),
        ("File", "—" if spec.file is None else str(spec.file)),
        ("Size", size(facts.get("size_bytes", 0))),
        ("Architecture", facts.get("architecture") or "—"),
        ("Quantisation", facts.get("quantisation") or "—"),
        ("Context", f"{context}; trained with {trained:,}" if trained else context),
        ("Slots", f"{spec.slots} in each worker"),
        ("Memory needed (about)", f"{memory}: {parts}" if parts else memory),
        ("Price", price),
        ("Aliases", ", ".join(spec.aliases) or "—"),
        ("Projects", ", ".join(spec.projects) or "all"),
        ("Capabilities", ", ".join(sorted(capabilities)) or "—"),
    ]


def _stored_entry(model: str) -> dict[str, Any] | None:
    """Return the entry of a model of the database; None for another one."""
    if not catalogue().is_stored(model):
        return None
    entry = StoredModel.objects.filter(model_id=model).values_list("entry", flat=True).first()
    return entry if isinstance(entry, dict) else None


def _source(spec: ModelSpec) -> str:
    known = catalogue()
    if known.is_stored(spec.id):
        return "the database"
    if known.is_fixed(spec.id):
        return "the models file, or the product itself: read-only here"
    return "a file in MODELS_DIR, without an entry"


def _edit_address(request: HttpRequest, model: str) -> str:
    """Return the address at which the user can edit the model or add an entry for it, or ""."""
    known = catalogue()
    if known.is_fixed(model):
        return ""
    stored = StoredModel.objects.filter(model_id=model).first()
    if stored is not None and request.user.has_perm("model_store.change_storedmodel"):
        return reverse("admin:model_store_storedmodel_change", args=[stored.pk])
    if stored is None and request.user.has_perm("model_store.add_storedmodel"):
        file, folder = known.models[model].file, Path(settings.MODELS_DIR)
        if file is not None and file.is_relative_to(folder):
            file = file.relative_to(folder)
        initial = {"model_id": model, "file": "" if file is None else file.as_posix()}
        return f"{reverse('admin:model_store_storedmodel_add')}?{urlencode(initial)}"
    return ""
