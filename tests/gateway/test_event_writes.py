"""Events that are written together are the same bytes as events that are written one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import daphne.server  # noqa: F401  # Has to be first: it installs the reactor.
import pytest
from twisted.internet.testing import StringTransport

from inference_site.gateway.daphne_protocols import BoundedChannel, BoundedRequest
from inference_site.gateway.daphne_server import pieces_of
from inference_site.gateway.delivery import EVENTS

_LARGE = b"data: " + b"x" * 70_000 + b"\n\n"
_EVENTS = [b"data: 1\n\n", b"", b"data: two\n\n", _LARGE, b": ping\n\n", b"data: 3\n\n"]


class _Request(BoundedRequest):
    """One that has no server behind it, and whose end is none of its business."""

    def __init__(self, channel: Any, queued: bool = False) -> None:
        super().__init__(channel, queued)
        self.client_addr = ("127.0.0.1", 1)

    def process(self) -> None:
        """Run no application."""

    def finish(self) -> None:
        """Leave the connection open."""


def _written(version: bytes, messages: list[dict[str, Any]], method: bytes = b"GET") -> bytes:
    """Return what a client gets for these parts of an answer."""
    channel: Any = _untyped(BoundedChannel)()
    transport: Any = _untyped(StringTransport)()
    channel.factory = SimpleNamespace(server=Mock(server_name=""))
    channel.requestFactory = _Request
    channel.makeConnection(transport)
    channel.dataReceived(method + b" / " + version + b"\r\nHost: a\r\n\r\n")
    [request] = channel.requests
    request._stop_timer()
    request.clientproto = version
    request.application_queue = None
    head = [(b"content-type", b"text/event-stream"), (b"date", b"now")]
    request.handle_reply({"type": "http.response.start", "status": 200, "headers": head})
    for message in messages:
        for part in pieces_of(message):
            request.handle_reply(part)
    channel.setTimeout(None)
    written: bytes = transport.value()
    return written


def _untyped(found: Any) -> Any:
    """Return what Twisted has no types for."""
    return found


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
def test_events_of_one_message_are_written_like_those_of_many(version: bytes) -> None:
    small = [event for event in _EVENTS if event is not _LARGE]
    together = [{"type": EVENTS, "events": small, "more_body": True}] * 2
    alone = [{"type": "http.response.body", "body": e, "more_body": True} for e in small * 2]
    assert _written(version, together) == _written(version, alone)


def test_what_is_written_at_once_is_bounded_and_nothing_is_left_out() -> None:
    [*parts] = pieces_of({"type": EVENTS, "events": _EVENTS * 9, "more_body": True})
    sizes = [sum(map(len, part.get("events", [part.get("body", b"")]))) for part in parts]
    assert max(sizes) <= 64 * 1024
    pieces = [piece for part in parts for piece in part.get("events", [part.get("body", b"")])]
    assert b"".join(pieces) == b"".join(_EVENTS * 9)


@pytest.mark.parametrize("kind", ["http.response.body", EVENTS])
def test_the_answer_to_head_ends_with_its_head_however_long_the_body_is(kind: str) -> None:
    part = {"events": [_LARGE]} if kind == EVENTS else {"body": _LARGE}
    messages = [{"type": kind, "more_body": True, **part}] * 3
    head, blank, rest = _written(b"HTTP/1.1", messages, b"HEAD").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert (blank, rest) == (b"\r\n\r\n", b"")
