"""The models, the workers that serve them, and maintenance."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from django.conf import settings

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.gguf_file import GgufInfo, read_gguf
from inference_site.doctor.finding import Finding, Level, judged
from inference_site.domain.model_spec import ModelSpec
from inference_site.fleet.leases import live_workers
from inference_site.generations.maintenance import last_maintained

_MAINTENANCE_S = 10.0


def check_models() -> Iterator[Finding]:
    """Look at the file of each model of the catalogue."""
    read = cache(read_gguf)  # Models may share a file, and a large one takes seconds.
    for spec in catalogue().models.values():
        yield _of_model(spec, read)


def _of_model(spec: ModelSpec, read: Callable[[Path], GgufInfo]) -> Finding:
    what = f"model {spec.id}"
    if spec.file is None:
        return Finding(Level.OK, what, f"needs no file ({spec.engine})")
    fix = (
        "Correct `file` in the models file, fetch it by `manage.py pull`, or let this user read it."
    )
    if not spec.file.is_file() or not os.access(spec.file, os.R_OK):
        return Finding(Level.FAIL, what, f"{spec.file} cannot be read", fix)
    size = f"{spec.file.stat().st_size / 2**20:,.0f} MiB"
    if spec.engine == "llama_cpp":
        try:
            size = f"{read(spec.file).architecture}, {size}"
        except (OSError, ValueError, KeyError, IndexError) as exc:
            return Finding(Level.FAIL, what, f"{spec.file} is no GGUF file: {exc}", fix)
    return Finding(Level.OK, what, f"{spec.file} ({size})")


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
    for model in catalogue().models:
        if workers and not any(worker.serves(model) for worker in workers):
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
