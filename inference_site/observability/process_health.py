"""Whether a process without HTTP of its own is well."""

from __future__ import annotations

import time

from django.conf import settings
from prometheus_client import Gauge

from inference_site.observability.metrics import BUILD, MAINTENANCE_DONE
from inference_site.observability.telemetry import Health, serve_telemetry

_UNWELL_S = 15.0
"""After so long without a sign of life a process is ill; both give one every second or two."""


def watch_maintenance() -> None:
    """Serve the metrics and health of beat on ``METRICS_PORT``, if that is set."""
    BUILD.labels(settings.VERSION, "beat", "").set(1)
    serve_telemetry(fresh(MAINTENANCE_DONE, "maintenance has not come to an end"))


def fresh(sign: Gauge, fault: str) -> Health:
    """Return a health that is good while this timestamp is a fresh one."""

    def health() -> str:
        at = next(iter(sign.collect())).samples[0].value
        silent_s = time.time() - at
        return f"{fault} for {silent_s:.0f} s" if silent_s > _UNWELL_S else ""

    return health
