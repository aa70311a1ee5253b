"""Whether a process without HTTP of its own is well."""

from __future__ import annotations

import time

from django.conf import settings
from prometheus_client import Gauge

from inference_site.observability.metrics import BUILD, MAINTENANCE_DONE
from inference_site.observability.telemetry import Health, serve_telemetry

_UNWELL_S = 15.0
"""After so long without a sign of life a process counts as ill; both beat every second or two."""


def watch_upkeep() -> None:
    """Have the metrics and health of the maintenance worker told there."""
    BUILD.labels(settings.VERSION, "beat", "").set(1)
    serve_telemetry(_beating(MAINTENANCE_DONE, "upkeep has not come to an end"))


def _beating(sign: Gauge, fault: str) -> Health:
    """Return a health that wants this timestamp to be a fresh one."""

    def health() -> str:
        at = next(iter(sign.collect())).samples[0].value
        silent_s = time.time() - at
        return f"{fault} for {silent_s:.0f} s" if silent_s > _UNWELL_S else ""

    return health
