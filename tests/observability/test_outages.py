"""What is logged about a server that is away."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from inference_site.core.observability import outages
from inference_site.core.observability.outages import OutageLog


def test_an_outage_has_a_line_at_its_beginning_one_a_minute_and_one_at_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(outages, "time", SimpleNamespace(monotonic=lambda: now))
    log = OutageLog(logging.getLogger("tests"), "event log")
    log.succeeded()
    for _ in range(600):
        log.failed("refused")
        now += 0.2
    now += 3600
    log.succeeded()
    log.succeeded()
    log.failed(TimeoutError())
    now += 3600
    log.succeeded()
    assert [record.getMessage() for record in caplog.records] == [
        "event log: refused",
        "event log: for 60 s now: refused",
        "event log: works again, after 119.8 s of failures",
        "event log: TimeoutError",
        "event log: works again, after one failure",
    ]
