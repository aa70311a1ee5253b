"""The state of a model for operators, with its reason, and what an action on it interrupts.

A model has the status of the fleet (loaded, loading, failed, unloaded), or one that says more about
a model that no worker serves:

- ``draining``: its last runs end, then its workers drop it
- ``missing``: neither this host nor a worker has its file
- ``broken``: the file on this host cannot be served
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from django.conf import settings
from django.template.defaultfilters import pluralize

from inference_site.catalogue.catalogue import catalogue, files_in
from inference_site.catalogue.fleet import fleet
from inference_site.catalogue.fleet.fleet import ModelStatus
from inference_site.catalogue.fleet.leases import LiveWorker, ModelState
from inference_site.catalogue.gguf_files import parts_of
from inference_site.catalogue.memory import side_files_of
from inference_site.catalogue.model_files import file_error, files_of
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.gateway.submission.model_access import load_progress
from inference_site.runs.models import Generation, Status

MISSING, BROKEN, DRAINING = "missing", "broken", "draining"
_MAX_FILES = 4096
_CHECKS_S = 0.5
"""For how long a page checks files; it shows the rest as unchecked, and the next page goes on."""


class FileChecks:
    """The errors of files. A file is read again only when it has changed. Thread-safe.

    A whole check takes 0.2 s for a large vocabulary, and a folder may have hundreds of files.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Path, bool], tuple[tuple[int, int, int], str]] = {}
        self._lock = Lock()

    def error_of(self, path: Path, is_gguf: bool, until: float) -> str:
        """Return the error of a file; an empty text also if it is unknown at the time ``until``."""
        try:
            found = path.stat()
        except OSError:
            return file_error(path, is_gguf)
        state = found.st_mtime_ns, found.st_ctime_ns, found.st_size
        known, error = self._known.get((path, is_gguf), (None, ""))
        if known == state or time.monotonic() > until:
            return error
        error = file_error(path, is_gguf)
        with self._lock:
            if len(self._known) >= _MAX_FILES:
                self._known.clear()
            self._known[path, is_gguf] = state, error
        return error


_checks = FileChecks()


@dataclass(frozen=True, slots=True)
class ModelCondition:
    """The state of a model, and why it is in it; the reason is empty for a model that is served."""

    state: str
    reason: str = ""


def conditions(specs: Sequence[ModelSpec], live: Sequence[LiveWorker]) -> dict[str, ModelCondition]:
    """Return the condition of each of these models, by id."""
    until = time.monotonic() + _CHECKS_S
    return {spec.id: _condition(spec, live, until) for spec in specs}


def condition(spec: ModelSpec, live: Sequence[LiveWorker]) -> ModelCondition:
    """Return the condition of a model in these workers."""
    return conditions([spec], live)[spec.id]


def broken_files() -> list[tuple[str, str]]:
    """Return name and error of the files in ``MODELS_DIR`` that no model uses and none can use."""
    folder, until = Path(settings.MODELS_DIR), time.monotonic() + _CHECKS_S
    used = {file for spec in catalogue().models.values() for file in files_of(spec)}
    found = []
    for file in files_in(folder):
        if file.parent.resolve() / file.name in used:
            continue
        errors = (_checks.error_of(part, True, until) for part in parts_of(file))
        if error := next(filter(None, errors), ""):
            found.append((file.relative_to(folder).as_posix(), _below(folder, error)))
    return found


def file_condition(spec: ModelSpec, until: float | None = None) -> ModelCondition | None:
    """Return the condition of a model that is due to its files on this host; None if they are fine.

    Files that are not checked ``until`` then count as fine.
    """
    if spec.file is None:
        return None
    until = time.monotonic() + _CHECKS_S if until is None else until
    is_gguf = spec.engine == "llama_cpp"
    for file in (*parts_of(spec.file), *side_files_of(spec)):
        if error := _checks.error_of(file, is_gguf, until):
            state = BROKEN if file.exists() else MISSING
            return ModelCondition(state, _below(Path(settings.MODELS_DIR), error))
    return None


def _below(folder: Path, error: str) -> str:
    return error.replace(f"{folder}/", "", 1)


def _condition(spec: ModelSpec, live: Sequence[LiveWorker], until: float) -> ModelCondition:
    status = fleet.status_among(live, spec.id)
    if status == ModelStatus.LOADED:
        return ModelCondition(status.value)
    if status == ModelStatus.LOADING:
        load = load_progress(spec.id, live)
        read = "" if load.progress is None else f"{load.progress:.0%} of its file is read."
        about = "" if load.expected_s is None else f"In about {load.expected_s} s."
        return ModelCondition(status.value, " ".join(filter(None, (read, about, load.reason))))
    if status == ModelStatus.FAILED:
        why = fleet.why_absent(spec, live) or "The log of its worker says why."
        return ModelCondition(status.value, why)
    # Workers that have the model and serve it no more.
    reports = [report for worker in live if (report := worker.model(spec.id)) is not None]
    if leaving := [one for one in reports if one.state == ModelState.DRAINING]:
        runs = sum(report.busy for report in leaving)
        ends = f"{_counted(runs, 'run')} of it end{'s' * (runs == 1)} first"
        return ModelCondition(DRAINING, f"It takes no new work; {ends}.")
    if any(report.state == ModelState.READY for report in reports):
        return ModelCondition(DRAINING, "Its workers take no new work until Resume.")
    has_file = any(spec.id in worker.loadable for worker in live)
    found = file_condition(spec, until)
    if found is not None and not (found.state == MISSING and has_file):
        where = ", and no worker has it" if found.state == MISSING else ""
        return ModelCondition(found.state, f"{found.reason}{where}.")
    return ModelCondition(status.value, _why_unloaded(spec, live))


def _why_unloaded(spec: ModelSpec, live: Sequence[LiveWorker]) -> str:
    if not live:
        return "No worker is online."
    if all(worker.is_draining for worker in live):
        return "All workers are draining."
    if why := fleet.why_no_host(spec, live):
        return why
    reports = (worker.model(spec.id) for worker in live)
    if any(report is not None and report.state == ModelState.SLEEPING for report in reports):
        return "Its server sleeps; a load wakes it."
    if spec.id in fleet.unloaded_on_purpose(live):
        return "It was unloaded by an operator."
    return "A request loads it." if fleet.is_on_demand(spec) else "No worker was told to load it."


def unload_question(model: str, live: Sequence[LiveWorker]) -> str:
    """Return the question before a model is unloaded, with the requests that this interrupts."""
    having = sum(worker.model(model) is not None for worker in live)
    rows = Generation.objects.filter(model=model)
    running = rows.filter(status=Status.RUNNING).count()
    waiting = rows.filter(status=Status.QUEUED).count()
    said = [f"Unload {model} from {_counted(having, 'worker')}?"]
    if running:
        verbs, stopped = ("runs and has", "it is") if running == 1 else ("run and have", "they are")
        limit = f"{settings.DRAIN_TIMEOUT_S} s to end before {stopped} stopped"
        said.append(f"{_counted(running, 'request')} {verbs} {limit}.")
    if waiting:
        verb = "waits" if waiting == 1 else "wait"
        said.append(f"{_counted(waiting, 'request')} {verb} until a worker loads it again.")
    return " ".join(said) if said[1:] else f"{said[0]} No request runs or waits."


def drain_question(worker: str, live: Sequence[LiveWorker]) -> str:
    """Return the question before a worker is drained, with the requests that this concerns."""
    running = Generation.objects.filter(worker=worker, status=Status.RUNNING).count()
    own = next((one for one in live if one.id == worker), None)
    served = () if own is None else tuple(report.id for report in own.models)
    others = [one for one in live if one.id != worker]
    only = [id_ for id_ in served if not any(one.serves(id_) for one in others)]
    waiting = Generation.objects.filter(model__in=only, status=Status.QUEUED).count()
    said = [f"Drain {worker}? It takes nothing new until Resume."]
    if running:
        verb = "ends" if running == 1 else "end"
        said.append(f"{_counted(running, 'request')} on it {verb} first.")
    if waiting:
        verb = "waits" if waiting == 1 else "wait"
        said.append(
            f"{_counted(waiting, 'request')} {verb} for models that no other worker serves."
        )
    return " ".join(said) if said[1:] else f"{said[0]} No request runs on it or waits for it."


QUESTIONS: dict[str, Callable[[str, Sequence[LiveWorker]], str]] = {
    "unload": unload_question,
    "drain": drain_question,
}
"""The questions before an action on a model or a worker."""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{pluralize(count)}"
