"""``GET /metrics``: the metrics of this web process and the gauges of the whole site."""

from __future__ import annotations

import os
import socket

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from prometheus_client import REGISTRY

from inference_site.errors.api_errors import AuthenticationError
from inference_site.observability.metrics import BUILD
from inference_site.observability.telemetry import is_forwarded, may_scrape, rendered
from inference_site.status.site_metrics import SiteMetrics


@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    """Answer peers that send ``METRICS_TOKEN`` or are in ``METRICS_ALLOWED_NETWORKS``."""
    meta = request.META
    forwarded = is_forwarded(request.headers)
    if not may_scrape(meta.get("REMOTE_ADDR", ""), meta.get("HTTP_AUTHORIZATION", ""), forwarded):
        raise AuthenticationError("Send METRICS_TOKEN in 'Authorization: Bearer'.")
    body, content_type = rendered(meta.get("HTTP_ACCEPT", ""))
    return HttpResponse(body, content_type=content_type)


def register() -> None:
    """Add the build information and the site's gauges to the metrics of this process."""
    BUILD.labels(settings.VERSION, "web", f"{socket.gethostname()}:{os.getpid()}").set(1)
    REGISTRY.register(SiteMetrics())
