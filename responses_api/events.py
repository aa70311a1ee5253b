"""Events of a response's stream: one counter, one frame each. Source: API reference, "Streaming".

The number of an event is the number of its frame in the event log, so that a reader who asks for
what follows an event is served from the log as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

Event = tuple[str, dict[str, Any]]
"""Type of an event, and its fields without the counter."""
DONE = b"data: [DONE]\n\n"
ACCEPTED = 2
"""So many events of the opening are true once a response is accepted."""
IN_PROGRESS = "response.in_progress"
"""An attempt begins: whatever the stream has before it is no part of the output."""
_DATA = b"\ndata: "


def encode(type_: str, number: int, fields: dict[str, Any]) -> bytes:
    """Return the frame of one event."""
    name = type_.encode()
    return b'event: %b\ndata: {"type":"%b","sequence_number":%d%b\n\n' % (
        name,
        name,
        number,
        _rest(fields),
    )


def _rest(fields: dict[str, Any]) -> bytes:
    return b"," + orjson.dumps(fields)[1:] if fields else b"}"


def decode(frame: bytes) -> dict[str, Any]:
    """Return the event of a frame; an empty one for the frame that ends a stream."""
    event: dict[str, Any] = {} if frame == DONE else orjson.loads(payload(frame))
    return event


def payload(frame: bytes) -> bytes:
    """Return the JSON of a frame."""
    return frame[frame.index(_DATA) + len(_DATA) :].rstrip()


def error_event(error: dict[str, Any]) -> Event:
    """Return the event of an error: flat and nested, for readers want the one or the other."""
    flat = {"code": error["code"] or error["type"]}
    flat |= {"message": error["message"], "param": error["param"]}
    return "error", {**flat, "error": error}


def opening(response: dict[str, Any], first: int = 0) -> Sequence[bytes]:
    """Return the frames that a stream begins with, from this number on.

    A response in the background is queued first; in the foreground it counts as in progress.
    """
    began = {**response, "status": "in_progress"}
    events = [("response.created", began), (IN_PROGRESS, began)]
    if response["background"]:
        queued = {**response, "status": "queued"}
        events = [
            ("response.created", queued),
            ("response.queued", queued),
            (IN_PROGRESS, began),
        ]
    return [
        encode(type_, number, {"response": shown})
        for number, (type_, shown) in enumerate(events)
        if number >= first
    ]


def accepted(response: dict[str, Any]) -> Sequence[bytes]:
    """Return those of the opening that are true once a response is accepted."""
    return opening(response)[:ACCEPTED]
