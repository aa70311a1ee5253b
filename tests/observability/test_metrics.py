"""The meter of a run, and who may read metrics."""

from __future__ import annotations

import time
from ipaddress import ip_network

import pytest
from django.test import override_settings
from prometheus_client import REGISTRY, CollectorRegistry, Gauge

from inference_site.core.domain.deltas import Usage
from inference_site.core.observability.metrics import Meter, may_scrape, timestamp_check


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_gaps_between_deltas_are_a_histogram(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.5, 10.504, 10.534, 13.534, 13.6])
    monkeypatch.setattr(
        "inference_site.core.observability.metrics.time.perf_counter", lambda: next(clock)
    )
    meter = Meter("gaps", attempt=1, waited_s=0.25)
    for _ in range(4):
        meter.tick()
    meter.end("chat.completion", "completed", "", Usage(input_tokens=7, output_tokens=4))
    name = "inference_inter_token_seconds"
    assert value(f"{name}_count", model="gaps") == 3
    assert value(f"{name}_sum", model="gaps") == pytest.approx(3.034)
    assert value(f"{name}_bucket", model="gaps", le="0.005") == 1
    assert value(f"{name}_bucket", model="gaps", le="0.03") in (1, 2)  # 30 ms, but for rounding.
    assert value(f"{name}_bucket", model="gaps", le="2.5") == 2
    assert value(f"{name}_bucket", model="gaps", le="+Inf") == 3
    first = value("inference_time_to_first_token_seconds_sum", model="gaps")
    assert first == pytest.approx(0.75)
    assert value("inference_tokens_total", model="gaps", sort="output") == 4


def test_another_attempt_is_no_second_wait() -> None:
    for attempt in (1, 2):
        meter = Meter("again", attempt, waited_s=attempt)
        meter.tick()
        meter.end("response", "completed", "", Usage())
    assert value("inference_queue_wait_seconds_count", model="again") == 1
    assert value("inference_time_to_first_token_seconds_count", model="again") == 1
    assert value("inference_run_seconds_count", model="again") == 2


def test_a_run_without_a_token_has_no_time_to_it() -> None:
    Meter("silent", 1, 0.0).end("response", "failed", "server_error", Usage())
    assert value("inference_time_to_first_token_seconds_count", model="silent") == 0
    ended = {"model": "silent", "kind": "response", "status": "failed"}
    assert value("inference_generations_total", **ended, error_code="server_error") == 1


@pytest.mark.parametrize(
    ("address", "authorization", "forwarded", "may"),
    [
        ("10.1.2.3", "", False, True),
        ("10.1.2.3", "", True, False),
        ("::ffff:10.1.2.3", "", False, True),
        ("192.0.2.1", "", False, False),
        ("192.0.2.1", "Bearer right", False, True),
        ("192.0.2.1", "Bearer right", True, True),
        ("192.0.2.1", "Bearer wrong", False, False),
        ("192.0.2.1", "Bearer", False, False),
        ("", "", False, False),
    ],
)
def test_who_may_read_metrics(address: str, authorization: str, forwarded: bool, may: bool) -> None:
    networks = [ip_network("10.0.0.0/8")]
    with override_settings(METRICS_TOKEN="right", METRICS_ALLOWED_NETWORKS=networks):
        assert may_scrape(address, authorization, forwarded) is may


def test_no_token_opens_to_no_token() -> None:
    with override_settings(METRICS_TOKEN="", METRICS_ALLOWED_NETWORKS=[]):
        assert not may_scrape("127.0.0.1", "Bearer ", False)


@pytest.mark.parametrize(("ahead_s", "is_well"), [(0, True), (-60, False), (3_600, False)])
def test_a_timestamp_that_is_old_or_of_the_future_is_a_fault(ahead_s: int, is_well: bool) -> None:
    """A clock that was set back must not hide for an hour that a process hangs."""
    timestamp = Gauge("renewed", "When it was renewed.", registry=CollectorRegistry())
    timestamp.set(time.time() + ahead_s)
    assert (timestamp_check(timestamp, "it was not renewed")() == "") is is_well
