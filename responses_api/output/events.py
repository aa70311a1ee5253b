"""Frames of a response's events, and the events of the response itself: its states, its error.

The number of an event is the number of its frame in the event log, so that a reader who asks for
what follows an event is served from the log as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any, Final

import orjson
from pydantic import TypeAdapter
from pydantic_core import to_json

from inference_site.api.schema import ErrorDetail, LostErrorDetail
from responses_api.wire.events import (
    ErrorEvent,
    Event,
    ResponseEvent,
    ResponseStateEvent,
    StateEventType,
)
from responses_api.wire.output import changed
from responses_api.wire.response import ResponseObject

DONE = b"data: [DONE]\n\n"
ACCEPTED = 2
"""So many events of the opening are true once a response is accepted."""
IN_PROGRESS: Final = "response.in_progress"
"""An attempt begins: whatever the stream has before it is no part of the output."""
_DATA = b"\ndata: "
_EVENT: TypeAdapter[ResponseEvent] = TypeAdapter(ResponseEvent)


def encode(event: Event) -> bytes:
    """Return the frame of an event."""
    return b"event: %b\ndata: %b\n\n" % (event.type.encode(), to_json(event))


def events_of(frames: Sequence[bytes]) -> Iterator[ResponseEvent]:
    """Yield the events of the frames of a stream."""
    return (_EVENT.validate_json(payload(frame)) for frame in frames if frame != DONE)


def decode(frame: bytes) -> dict[str, Any]:
    """Return the JSON object of a frame; an empty one for the frame that ends a stream."""
    event: dict[str, Any] = {} if frame == DONE else orjson.loads(payload(frame))
    return event


def payload(frame: bytes) -> bytes:
    """Return the JSON of a frame."""
    return frame[frame.index(_DATA) + len(_DATA) :].rstrip()


def state_event(
    type_: StateEventType, response: ResponseObject, numbers: Iterator[int]
) -> ResponseStateEvent:
    """Return the event of a state of the response."""
    return ResponseStateEvent(type=type_, sequence_number=next(numbers), response=response)


def opening(
    response: ResponseObject, numbers: Iterator[int], sent: int = 0
) -> Iterator[ResponseStateEvent]:
    """Yield the events that a stream begins with, but for so many that were sent already.

    The response is in progress; one in the background is queued first.
    """
    states: list[tuple[StateEventType, ResponseObject]] = [("response.created", response)]
    if response.background:
        queued = changed(response, status="queued")
        states = [("response.created", queued), ("response.queued", queued)]
    for type_, shown in [*states, (IN_PROGRESS, response)][sent:]:
        yield state_event(type_, shown, numbers)


def accepted(response: dict[str, Any]) -> Sequence[bytes]:
    """Return the frames of those events that are true once a response is accepted."""
    opened = opening(ResponseObject.model_validate(response), count())
    return [encode(event) for event in islice(opened, ACCEPTED)]


def terminal(response: ResponseObject, numbers: Iterator[int]) -> ResponseStateEvent:
    """Return the last event of a response. One that was cancelled has that of a failure."""
    match response.status:
        case "completed":
            return state_event("response.completed", response, numbers)
        case "incomplete":
            return state_event("response.incomplete", response, numbers)
        case _:
            return state_event("response.failed", response, numbers)


def error_event(error: dict[str, Any], numbers: Iterator[int]) -> ErrorEvent:
    """Return the event of an error, which is given as the body of an answer has it."""
    return ErrorEvent(
        sequence_number=next(numbers),
        code=error["code"] or error["type"],
        message=error["message"],
        param=error["param"],
        error=LostErrorDetail(**error) if "usage" in error else ErrorDetail(**error),
    )
