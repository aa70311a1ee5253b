"""The models, the workers that serve them, and maintenance."""

from __future__ import annotations

import time
from collections.abc import Iterator

from django.conf import settings

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.gguf_files import parts_of
from inference_site.catalogue.model_files import model_file_error
from inference_site.doctor.finding import Finding, Level, judged
from inference_site.fleet.leases import live_workers
from inference_site.fleet.placement import why_no_host
from inference_site.generations.maintenance import last_maintained
from inference_site.model_store.entries import entry_error, private_address_error
from inference_site.model_store.models import StoredModel
from inference_site.model_store.refresh import refresh_catalogue

_MAINTENANCE_S = 10.0
_FIX_FILE = (
    "Correct `file` in the models file or the console, fetch it by `manage.py pull`, or let this "
    "user read it."
)

_FIX_ENTRY = "Edit it in the console, or move it into the models file, which may name anything."
_FIX_ADDRESS = (
    "Set UPSTREAM_ALLOWED_HOSTS or UPSTREAM_ALLOWED_NETWORKS, or move it into the models file."
)


def check_models() -> Iterator[Finding]:
    """Look at the files of each model of the catalogue, also of those in the database."""
    refresh_catalogue()
    for spec in catalogue().models.values():
        what, fault = f"model {spec.id}", model_file_error(spec)
        if fault:
            yield Finding(Level.FAIL, what, fault, _FIX_FILE)
        elif spec.file is None:
            yield Finding(Level.OK, what, f"needs no file ({spec.engine})")
        else:
            size = sum(part.stat().st_size for part in parts_of(spec.file))
            yield Finding(Level.OK, what, f"{spec.file} ({size / 2**20:,.0f} MiB)")
    yield from _check_entries()


def _check_entries() -> Iterator[Finding]:
    """Look for entries of the database that are not served, or that could not be saved again."""
    for stored in StoredModel.objects.all():
        what = f"model {stored.model_id}"
        if fault := entry_error(stored):
            yield Finding(Level.FAIL, what, f"it is not served: {fault}", _FIX_ENTRY)
        elif stored.any_address and (fault := private_address_error(stored)):
            yield Finding(Level.WARN, what, f"served until it is edited: {fault}", _FIX_ADDRESS)


def check_workers() -> Iterator[Finding]:
    """Look for live workers, what they serve, and whether they run this release."""
    workers = live_workers()
    yield judged(
        "workers",
        f"{len(workers)} live",
        "Start `manage.py worker` on a host with the models; see its log when it ends.",
        fail=not workers,
    )
    for worker in workers:
        served = ", ".join(f"{m.id} {m.state} {m.busy}/{m.slots}" for m in worker.models)
        yield judged(
            f"worker {worker.id}",
            f"release {worker.release or 'unknown'}: {served or 'no model'}",
            f"Restart it with this release, {settings.VERSION}.",
            warn=worker.release != settings.VERSION,
        )
    for model, spec in catalogue().models.items():
        if workers and (why := why_no_host(spec, workers)):
            fix = "Name it in the WORKER_LABELS of a worker, or change `hosts` of the entry."
            yield Finding(Level.WARN, f"model {model}", why, fix)
        elif workers and not any(worker.serves(model) for worker in workers):
            yield Finding(
                Level.WARN,
                f"model {model}",
                "no live worker serves it",
                f"Start one with `manage.py worker --models {model}`, or load it in the admin.",
            )


def check_maintenance() -> Iterator[Finding]:
    """Look when maintenance was last done."""
    at = last_maintained()
    ago_s = None if at is None else time.time() - at
    yield judged(
        "maintenance",
        "not done for a minute" if ago_s is None else f"done {ago_s:.1f} s ago",
        "Start `manage.py beat`; without it nobody notices dead workers and lost wake-ups.",
        fail=ago_s is None or ago_s > _MAINTENANCE_S,
    )
