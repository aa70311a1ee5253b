"""What is refused before it waits for a thread, because its queue was full just now."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pytest_django.fixtures import Settings

from inference_site.errors.api_errors import ApiError
from inference_site.gateway import full_queues
from inference_site.gateway.full_queues import refuse_if_full
from inference_site.generations.places import Crowds

SCOPE: dict[str, Any] = {"headers": [(b"content-type", b"application/json")]}


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> Crowds:
    """The queue of the model ``m``, which is the default, is full."""
    settings.DEFAULT_MODEL = "m"
    crowds = Crowds()
    crowds.note_full("m")
    monkeypatch.setattr(full_queues, "crowds", crowds)
    return crowds


@pytest.mark.parametrize("body", [b'{"model": "m"}', b'{"messages": []}'])
def test_a_request_for_a_full_queue_is_refused(full: Crowds, body: bytes) -> None:
    with pytest.raises(ApiError) as refusal:
        refuse_if_full(SCOPE, body)
    assert (refusal.value.status, refusal.value.code) == (503, "queue_full")
    assert int(refusal.value.headers["Retry-After"]) > 0


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
def test_others_are_left_to_the_view(full: Crowds, body: bytes) -> None:
    refuse_if_full(SCOPE, body)


def test_so_is_one_that_may_be_a_repeated_one(full: Crowds) -> None:
    refuse_if_full({"headers": [(b"idempotency-key", b"k")]}, b'{"model": "m"}')


def test_it_is_so_for_a_moment(full: Crowds, monkeypatch: pytest.MonkeyPatch) -> None:
    later = time.monotonic() + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    refuse_if_full(SCOPE, b'{"model": "m"}')
