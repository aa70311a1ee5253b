"""OpenTelemetry traces across web and worker processes.

Traces are off, and OpenTelemetry is not imported, unless ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set.
The ``traceparent`` (W3C) is stored in the request document. The header of a Celery message cannot
carry it, because a wake-up names no generation.
"""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar
from typing import Any

from django.conf import settings

from inference_site.core.observability.logs import redacted

logger = logging.getLogger(__name__)

_tracer: Any = None

current_traceparent: ContextVar[str] = ContextVar("traceparent", default="")
"""The ``traceparent`` of the current request; empty without traces."""


def start_tracing(role: str) -> None:
    """Send the spans of this process to the collector, if the settings name one."""
    global _tracer  # noqa: PLW0603  # One tracer for the process, as in OpenTelemetry itself.
    endpoint = settings.OTEL_EXPORTER_OTLP_ENDPOINT
    if not endpoint:
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        logger.warning(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, but OpenTelemetry is not installed: no traces "
            "are sent. Install the extra 'otel' of pyproject.toml."
        )
        return
    name = settings.OTEL_SERVICE_NAME or f"inference-{role}"
    attributes = {"service.name": name, "service.version": settings.VERSION}
    provider = TracerProvider(resource=Resource.create(attributes))
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracer = provider.get_tracer("inference_site")


class Span:
    """An open span; it does nothing when traces are off. Times are Unix seconds."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: Any = None) -> None:
        self._span = span
        self.traceparent = ""
        if span is not None:
            from opentelemetry.trace import set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            carrier: dict[str, str] = {}
            TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
            self.traceparent = carrier.get("traceparent", "")

    def set(self, **attributes: Any) -> None:
        """Set attributes; a double underscore in a name becomes a dot."""
        if self._span is not None:
            for name, value in attributes.items():
                shown = redacted(value) if isinstance(value, str) else value
                self._span.set_attribute(name.replace("__", "."), shown)

    def end(self, error: str = "", at_s: float | None = None) -> None:
        """End the span, as failed if ``error`` is not empty."""
        if self._span is None:
            return
        if error:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(None if at_s is None else _nanoseconds(at_s))


def is_tracing() -> bool:
    """Whether spans are sent anywhere."""
    return _tracer is not None


def start_span(
    name: str,
    kind: str = "internal",
    parent: str = "",
    at_s: float | None = None,
    **attributes: Any,
) -> Span:
    """Start a span. ``kind`` is ``internal``, ``server``, ``producer`` or ``consumer``.

    ``parent`` is a ``traceparent``; if it is empty or malformed, the span starts a new trace. The
    span starts now, or at ``at_s``.
    """
    if _tracer is None:
        return _NO_SPAN
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({"traceparent": parent})
    span = Span(
        _tracer.start_span(
            name,
            context=context,
            kind=SpanKind[kind.upper()],
            start_time=_nanoseconds(time.time() if at_s is None else at_s),
        )
    )
    span.set(**attributes)
    return span


def trace_id(traceparent: str) -> str:
    """Return the trace id of a ``traceparent``, or an empty text without one."""
    return traceparent.split("-")[1] if traceparent else ""


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


_NO_SPAN = Span()
