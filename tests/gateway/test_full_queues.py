"""What is refused before it waits for a thread, because its queue was full just now."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pytest_django.fixtures import Settings

from inference_site.core.domain.errors import ProjectQueueFull, QueueFull
from inference_site.core.errors.api_errors import ApiError
from inference_site.gateway import relay
from inference_site.gateway.relay import refuse_if_full
from inference_site.runs.queue_position import CachedQueueCounts

SCOPE: dict[str, Any] = {"headers": [(b"content-type", b"application/json")]}


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> CachedQueueCounts:
    """The queue of the model ``m``, which is the default, is full; that of ``n`` for a project."""
    settings.DEFAULT_MODEL = "m"
    crowds = CachedQueueCounts()
    crowds.note_refusal("m", 1, QueueFull, is_background=False)
    crowds.note_refusal("n", 1, ProjectQueueFull, is_background=True)
    monkeypatch.setattr(relay, "queue_counts", crowds)
    return crowds


@pytest.mark.parametrize("body", [b'{"model": "m"}', b'{"messages": []}'])
def test_a_request_for_a_full_queue_is_refused(full: CachedQueueCounts, body: bytes) -> None:
    with pytest.raises(ApiError) as refusal:
        refuse_if_full(SCOPE, body, 2)
    assert (refusal.value.status, refusal.value.code) == (503, "queue_full")
    assert int(refusal.value.headers["Retry-After"]) > 0


LATE = b'{"model": "n", "background": true}'


@pytest.mark.parametrize("body", [LATE, b'{"model": "n", "service_tier": "flex"}'])
def test_a_project_with_its_share_in_the_background_is_refused(
    full: CachedQueueCounts, body: bytes
) -> None:
    with pytest.raises(ApiError) as refusal:
        refuse_if_full(SCOPE, body, 1)
    assert (refusal.value.status, refusal.value.code) == (429, "project_queue_full")
    assert int(refusal.value.headers["Retry-After"]) > 0
    refuse_if_full(SCOPE, body, 2)
    refuse_if_full(SCOPE, body, None)
    refuse_if_full(SCOPE, b'{"model": "n"}', 1)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "another"}',
        b'{"model": ["m"]}',
        b"[]",
        b"no JSON",
        b'{"model": "m", "x": "%b"}' % (b"x" * 70_000),
    ],
)
def test_others_are_left_to_the_view(full: CachedQueueCounts, body: bytes) -> None:
    refuse_if_full(SCOPE, body, 1)


def test_so_is_one_that_may_be_a_repeated_one(full: CachedQueueCounts) -> None:
    refuse_if_full({"headers": [(b"idempotency-key", b"k")]}, b'{"model": "m"}', 1)


def test_it_is_so_for_a_moment(full: CachedQueueCounts, monkeypatch: pytest.MonkeyPatch) -> None:
    later = time.monotonic() + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    refuse_if_full(SCOPE, b'{"model": "m"}', 1)
