"""The page of one model: its settings, its workers, its usage, its server logs and its errors."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import redis.exceptions
from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest
from django.urls import reverse

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.engines.registry import model_capabilities
from inference_site.catalogue.fleet import fleet
from inference_site.catalogue.fleet.leases import LiveWorker, ModelReport
from inference_site.catalogue.fleet.orders import server_log
from inference_site.catalogue.model_files import FileFacts, file_facts
from inference_site.catalogue.model_labels import NO_PRICE, is_priced
from inference_site.catalogue.model_store.models import StoredModel
from inference_site.console.tiles import LATEST, Tile, latest_errors, recent_tiles
from inference_site.core.admin_pages.labels import money, size
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.runs.models import Generation
from inference_site.runs.usage.models import Period

VIEW, USAGE = "generations.view_generation", "usage.view_usagerollup"
CHANGE = "generations.change_generation"


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
    if not request.user.has_perm(VIEW):
        raise PermissionDenied
    spec = catalogue().models.get(model)
    if spec is None:
        raise Http404(f"There is no model '{model}'.")
    try:
        live, is_unreachable = fleet.workers(), False
        state = fleet.status_among(live, model).value
    except redis.exceptions.RedisError:
        live, is_unreachable, state = [], True, "unknown"
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
        tiles = recent_tiles(Period.HOUR, dt.timedelta(days=1), models=[model])
    return {
        "title": f"Model {model}",
        "spec": spec,
        "state": state,
        "is_unreachable": is_unreachable,
        "details": _details(spec, [replica.report for replica in replicas]),
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
    facts = file_facts(spec) if report is None else _facts_of(report)
    library = next((one.library for one in reports if one.library), "")
    reported = next((one.capabilities for one in reports if one.capabilities), None)
    capabilities = model_capabilities(spec) if reported is None else reported
    trained, parts = facts.get("trained_context", 0), facts.get("memory_parts")
    context = f"{fleet.context_among(spec, reports):,} tokens in each slot"
    memory = size(facts.get("memory_bytes", 0))
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
        ("Price", _price(spec)),
        ("Aliases", ", ".join(spec.aliases) or "—"),
        ("Projects", ", ".join(spec.projects) or "all"),
        ("Capabilities", ", ".join(sorted(capabilities)) or "—"),
    ]


def _facts_of(report: ModelReport) -> FileFacts:
    return {
        "size_bytes": report.size_bytes,
        "memory_bytes": report.memory_bytes,
        "memory_parts": report.memory_parts,
        "architecture": report.architecture,
        "quantisation": report.quantisation,
        "trained_context": report.trained_context,
    }


def _source(spec: ModelSpec) -> str:
    known = catalogue()
    if known.is_stored(spec.id):
        return "the database"
    if known.is_fixed(spec.id):
        return "the models file, or the product itself: read-only here"
    return "a file in MODELS_DIR, without an entry"


def _price(spec: ModelSpec) -> str:
    if not is_priced(spec.id):
        return NO_PRICE
    price = spec.price
    inputs = f"input {money(price.input)}, cached {money(price.cached)}"
    return f"{inputs}, output {money(price.output)} for a million tokens"


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
