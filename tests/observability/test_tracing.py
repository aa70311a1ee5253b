"""Traces that are not asked for cost nothing; those that are carry their parents along."""

from __future__ import annotations

import subprocess
import sys

import pytest
from django.test import override_settings

from inference_site.core.observability import tracing

_PROGRAM = """
import sys
import django
django.setup()
from inference_site.core.observability.tracing import start_span, start_tracing
start_tracing("web")
span = start_span("a", "server", "", model="demo")
span.set(status=200)
span.end("failed")
# redis-py imports some of it where it is installed; these are what traces need.
needed = ("opentelemetry.exporter", "opentelemetry.sdk.trace")
print([name for name in sys.modules if name.startswith(needed)], repr(span.traceparent))
"""


@pytest.mark.slow
def test_no_exporter_is_imported_without_a_collector() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={"DJANGO_SETTINGS_MODULE": "inference_site.settings", "SECRET_KEY": "x"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[] ''\n"


@override_settings(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
def test_a_collector_without_the_library_is_a_warning_with_a_fix(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    tracing.start_tracing("worker")
    assert "Install the extra 'otel' of pyproject.toml." in caplog.text
    assert tracing.start_span("a").traceparent == ""


def test_a_trace_is_known_by_its_id() -> None:
    assert tracing.trace_id("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01") == (
        "4bf92f3577b34da6a3ce929d0e0e4736"
    )
    assert tracing.trace_id("") == ""
