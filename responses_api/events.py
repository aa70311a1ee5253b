"""Frames of a response's events, and the events of the response itself: its states, its error.

The number of an event is the number of its frame in the event log, so that a reader who asks for
what follows an event is served from the log as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice, zip_longest
from typing import Any, Final, Literal

import orjson
from pydantic import TypeAdapter
from pydantic_core import to_json

from inference_site.api.schema import ErrorDetail, LostErrorDetail
from responses_api.wire import objects as wire
from responses_api.wire.input_items import ItemStatus
from responses_api.wire.objects import (
    Call,
    CustomToolCall,
    ErrorEvent,
    Event,
    FunctionCall,
    LogprobEntry,
    Message,
    OutputItem,
    OutputText,
    ReasoningItem,
    ResponseEvent,
    ResponseObject,
    ResponseStateEvent,
    StateEventType,
    TextPart,
    changed,
)

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


Logprobs = Sequence[LogprobEntry]
_EMPTY: dict[str, OutputText | TextPart] = {
    "message": OutputText(text="", annotations=[], logprobs=[]),
    "reasoning": TextPart(type="reasoning_text", text=""),
}


def emptied(item: OutputItem) -> OutputItem:
    """Return the item as it is announced."""
    match item:
        case Message():
            return changed(item, status="in_progress", content=[])
        case ReasoningItem():
            return changed(item, status="in_progress", content=[], encrypted_content=None)
        case FunctionCall():
            return changed(item, status="in_progress", arguments="")
        case CustomToolCall():
            return changed(item, status="in_progress", input="")


def filled(item: OutputItem, text: str, logprobs: Logprobs, status: ItemStatus) -> OutputItem:
    """Return the item with this text. A function that is called without arguments gets ``{}``."""
    match item:
        case Message():
            said = OutputText(text=text, annotations=[], logprobs=list(logprobs))
            return changed(item, status=status, content=[said])
        case ReasoningItem():
            thought = TextPart(type="reasoning_text", text=text)
            return changed(item, status=status, content=[thought])
        case FunctionCall():
            return changed(item, status=status, arguments=text or "{}")
        case CustomToolCall():
            return changed(item, status=status, input=text)


def _text(item: OutputItem) -> tuple[str, Logprobs]:
    match item:
        case Message(content=[OutputText(text=text, logprobs=logprobs)]):
            return text, logprobs
        case ReasoningItem(content=[TextPart(text=text)]):
            return text, ()
        case FunctionCall(arguments=text) | CustomToolCall(input=text):
            return text, ()
    raise ValueError(f"The item {item.id} has not the parts of one that a model made.")


class ItemEvents:
    """Makes the events of one item, at its place in the output, with the next of the numbers."""

    def __init__(self, item_id: str, output_index: int, numbers: Iterator[int]) -> None:
        self._index, self._numbers = output_index, numbers
        self._item_place = {"item_id": item_id, "output_index": output_index}
        self._part_place = {**self._item_place, "content_index": 0}

    def whole(
        self, item: OutputItem, sizes: Sequence[int] | None = None, counts: Sequence[int] = ()
    ) -> Iterator[wire.Event]:
        """Yield all events of an item that has ended, its text in deltas of these sizes.

        ``counts`` is how many log probabilities each has. Without sizes there is one delta.
        """
        yield from self.opening(emptied(item))
        text, logprobs = _text(item)
        if sizes is None or (sum(sizes) != len(text) and sizes):
            sizes, counts = [len(text)] if text else [], [len(logprobs)]
        at = entry = 0
        for size, entries in zip_longest(sizes, counts[: len(sizes)], fillvalue=0):
            yield self.delta(item, text[at : at + size], logprobs[entry : entry + entries])
            at, entry = at + size, entry + entries
        yield from self.closing(item, has_delta=bool(sizes))

    def opening(self, item: OutputItem) -> Iterator[wire.Event]:
        """Yield the events that announce an item, which is empty."""
        yield self._item_event("response.output_item.added", item)
        if not isinstance(item, Call):
            yield self._part_event("response.content_part.added", _EMPTY[item.type])

    def delta(self, item: OutputItem, text: str, logprobs: Logprobs = ()) -> wire.DeltaEvent:
        """Return the event of a piece of the item's text."""
        match item:
            case Message():
                entries = list(logprobs)
                return wire.OutputTextDelta(**self._in_part(), delta=text, logprobs=entries)
            case ReasoningItem():
                return wire.ReasoningTextDelta(**self._in_part(), delta=text)
            case FunctionCall():
                return wire.FunctionCallArgumentsDelta(**self._in_item(), delta=text)
            case CustomToolCall():
                return wire.CustomToolCallInputDelta(**self._in_item(), delta=text)

    def closing(self, item: OutputItem, *, has_delta: bool) -> Iterator[wire.Event]:
        """Yield the events that end an item, which has all of its text."""
        text, logprobs = _text(item)
        if isinstance(item, Call) and not has_delta:
            yield self.delta(item, text)
        match item:
            case Message(content=[OutputText() as part]):
                yield wire.OutputTextDone(**self._in_part(), text=text, logprobs=list(logprobs))
                yield self._part_event("response.content_part.done", part)
            case ReasoningItem(content=[TextPart() as part]):
                yield wire.ReasoningTextDone(**self._in_part(), text=text)
                yield self._part_event("response.content_part.done", part)
            case FunctionCall(name=name):
                place = self._in_item()
                yield wire.FunctionCallArgumentsDone(**place, arguments=text, name=name)
            case CustomToolCall():
                yield wire.CustomToolCallInputDone(**self._in_item(), input=text)
        yield self._item_event("response.output_item.done", item)

    def _item_event(
        self,
        type_: Literal["response.output_item.added", "response.output_item.done"],
        item: OutputItem,
    ) -> wire.Event:
        number, index = next(self._numbers), self._index
        return wire.OutputItemEvent(
            type=type_, sequence_number=number, output_index=index, item=item
        )

    def _part_event(
        self,
        type_: Literal["response.content_part.added", "response.content_part.done"],
        part: OutputText | TextPart,
    ) -> wire.Event:
        return wire.ContentPartEvent(type=type_, **self._in_part(), part=part)

    def _in_item(self) -> dict[str, Any]:
        return {"sequence_number": next(self._numbers), **self._item_place}

    def _in_part(self) -> dict[str, Any]:
        return {"sequence_number": next(self._numbers), **self._part_place}
