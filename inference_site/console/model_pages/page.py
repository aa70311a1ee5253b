"""The page of one model: what it is, where it runs, how fast it is, and what has failed."""

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
from django.utils import timezone

from inference_site.admin_pages.labels import money, size
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.engines.registry import model_capabilities
from inference_site.catalogue.model_files import FileFacts, file_facts
from inference_site.catalogue.model_labels import NO_PRICE, is_priced
from inference_site.console.usage_page.tiles import LATEST, Tile, latest_errors, tiles_over
from inference_site.domain.model_spec import ModelSpec
from inference_site.fleet import fleet
from inference_site.fleet.commands import server_log
from inference_site.fleet.leases import LiveWorker, ModelReport
from inference_site.generations.models import Generation
from inference_site.model_store.models import StoredModel
from inference_site.usage.models import Period
from inference_site.usage.queries import LENGTH, Span, floor

VIEW, USAGE = "generations.view_generation", "usage.view_usagerollup"
CHANGE = "generations.change_generation"
_DAY = dt.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Place:
    """A worker that has the model."""

    worker: LiveWorker
    report: ModelReport
    since: dt.datetime

    @property
    def told(self) -> list[tuple[str, str]]:
        """What its server tells of itself: names and values."""
        telemetry = self.report.telemetry
        return [(name.replace("_", " "), f"{value:,.4g}") for name, value in telemetry.items()]


def model_context(request: HttpRequest, model: str) -> dict[str, Any]:
    """Return the template context of the page. Raise PermissionDenied, or Http404."""
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
    places = _places(model, live)
    return {
        "title": f"Model {model}",
        "spec": spec,
        "state": state,
        "is_unreachable": is_unreachable,
        "details": _details(spec, places),
        "places": places,
        "logs": _logs(model, places) if request.user.has_perm(CHANGE) else [],
        "tiles": _tiles(model) if request.user.has_perm(USAGE) else [],
        "errors": latest_errors(Generation.objects.filter(model=model)),
        "latest": f"{LATEST:,}",
        "edit": _edit_address(request, model),
    }


def _places(model: str, live: list[LiveWorker]) -> list[Place]:
    having = ((worker, worker.model(model)) for worker in live)
    return [
        Place(worker, report, dt.datetime.fromtimestamp(report.since, dt.UTC))
        for worker, report in having
        if report is not None
    ]


def _logs(model: str, places: list[Place]) -> list[tuple[str, list[str]]]:
    """Return the workers whose servers have written something, each with the last lines of it."""
    told = ((place.worker.id, server_log(place.worker.id, model)) for place in places)
    return [(worker, lines) for worker, lines in told if lines]


def _details(spec: ModelSpec, places: list[Place]) -> list[tuple[str, str]]:
    """Return names and values, as a worker tells them; without one, as this host's file says."""
    report = next((place.report for place in places if place.report.size_bytes), None)
    facts = file_facts(spec) if report is None else _facts_of(report)
    library = next((place.report.library for place in places if place.report.library), "")
    return [
        ("Source", _source(spec)),
        ("Engine", f"{spec.engine} ({library})" if library else spec.engine),
        ("File", "—" if spec.file is None else str(spec.file)),
        ("Size", size(facts.get("size_bytes", 0))),
        ("Architecture", facts.get("architecture") or "—"),
        ("Quantisation", facts.get("quantisation") or "—"),
        ("Context", _context(spec, facts)),
        ("Slots", f"{spec.slots} in each worker"),
        ("Memory needed (about)", _memory(facts)),
        ("Price", _price(spec)),
        ("Aliases", ", ".join(spec.aliases) or "—"),
        ("Projects", ", ".join(spec.projects) or "all"),
        ("Capabilities", ", ".join(sorted(_capabilities(spec, places))) or "—"),
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


def _memory(facts: FileFacts) -> str:
    parts = facts.get("memory_parts")
    return size(facts.get("memory_bytes", 0)) + (f": {parts}" if parts else "")


def _source(spec: ModelSpec) -> str:
    known = catalogue()
    if known.is_stored(spec.id):
        return "the database"
    if known.is_fixed(spec.id):
        return "the models file, or the product itself: read-only here"
    return "a file in MODELS_DIR, without an entry"


def _context(spec: ModelSpec, facts: FileFacts) -> str:
    trained = facts.get("trained_context", 0)
    told = f"; trained with {trained:,}" if trained else ""
    return f"{spec.context_length:,} tokens in each slot{told}"


def _price(spec: ModelSpec) -> str:
    if not is_priced(spec.id):
        return NO_PRICE
    price = spec.price
    shown = f"input {money(price.input)}, cached {money(price.cached)}"
    return f"{shown}, output {money(price.output)} for a million tokens"


def _capabilities(spec: ModelSpec, places: list[Place]) -> frozenset[str]:
    announced = (place.report.capabilities for place in places if place.report.capabilities)
    first = next(announced, None)
    return model_capabilities(spec) if first is None else frozenset(first)


def _tiles(model: str) -> list[Tile]:
    """Return the usage of the last 24 hours."""
    end = floor(timezone.now(), Period.HOUR) + LENGTH[Period.HOUR]
    span = Span(Period.HOUR, end - _DAY, end, models=[model])
    return tiles_over(span)


def _edit_address(request: HttpRequest, model: str) -> str:
    """Return where the model is edited, or added with this ID; empty where it cannot be."""
    known = catalogue()
    if known.is_fixed(model):
        return ""
    stored = StoredModel.objects.filter(model_id=model).first()
    if stored is not None and request.user.has_perm("model_store.change_storedmodel"):
        return reverse("admin:model_store_storedmodel_change", args=[stored.pk])
    if stored is None and request.user.has_perm("model_store.add_storedmodel"):
        file = known.models[model].file
        given = {"model_id": model, "file": "" if file is None else _below_models_dir(file)}
        return f"{reverse('admin:model_store_storedmodel_add')}?{urlencode(given)}"
    return ""


def _below_models_dir(file: Path) -> str:
    folder = Path(settings.MODELS_DIR)
    return file.relative_to(folder).as_posix() if file.is_relative_to(folder) else str(file)
