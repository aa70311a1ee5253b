"""Deltas → the output of a response, and the frames that tell readers of it while it is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import orjson

from inference_site.api.payload import WireObject
from inference_site.domain.deltas import (
    Delta,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
)
from inference_site.generations.queue import new_id
from responses_api.events import encode
from responses_api.item_events import ItemEvents
from responses_api.output import OpenItem, Output
from responses_api.wire.events import Event
from responses_api.wire.items import ItemStatus
from responses_api.wire.output import (
    Call,
    CustomToolCall,
    FunctionCall,
    LogprobEntry,
    Message,
    OutputItem,
    ReasoningItem,
    TopLogprob,
)

Frames = Sequence[bytes]


class DeltaFrames:
    """The frames of an item's deltas, as the wire model is encoded but for number and text.

    There is one for each token, so the rest is encoded once.
    """

    def __init__(self, item: OpenItem) -> None:
        event = ItemEvents(item.announced.id, item.index, count()).delta(item.announced, "")
        self._head, rest = encode(event).split(b"0", 1)  # The number: no type has a digit in it.
        self._middle, self._tail = rest.split(b'""', 1)

    def frame(self, number: int, text: str) -> bytes:
        """Return the frame with this number of this piece of text."""
        return b"%b%d%b%b%b" % (self._head, number, self._middle, orjson.dumps(text), self._tail)


class LiveOutput:
    """The output that an engine makes, after what the frames that were sent before say of it.

    ``emits`` is false when nobody reads events of it; ``seal_for`` is the project that reasoning is
    sealed for, if that was asked for. ``sent`` is how many events were sent before it, ``numbers``
    are those of the events to come.
    """

    def __init__(self, emits: bool, seal_for: int | None, sent: Frames = ()) -> None:
        self._emits, self._seal_for = emits, seal_for
        self._output = Output(sent)
        self._delta_frames: DeltaFrames | None = None
        self.sent, self.numbers = len(sent), count(len(sent))

    @property
    def items(self) -> list[OutputItem]:
        """The items that have ended."""
        return self._output.items

    @property
    def is_empty(self) -> bool:
        """Whether no item has begun."""
        return self._output.open is None and not self._output.items

    def encode(self, events: Iterable[Event]) -> list[bytes]:
        """Return the frames of these events, if they are wanted."""
        return [encode(event) for event in events] if self._emits else []

    def feed(self, delta: Delta) -> Frames:
        """Take the next delta; return the frames of what it adds."""
        match delta:
            case TextDelta(text):
                opened = () if self._is_open(Message) else self.begin_message()
                return (*opened, *self._piece(text, delta.logprobs))
            case ReasoningDelta(text):
                opened = () if self._is_open(ReasoningItem) else self._begin_reasoning()
                return (*opened, *self._piece(text))
            case ToolCallDelta(arguments=text):
                opened = self._begin_call(delta)
                return (*opened, *self._piece(text)) if text and self._is_open(Call) else opened
        return ()

    def _is_open(self, type_: type[WireObject]) -> bool:
        item = self._output.open
        return item is not None and isinstance(item.announced, type_)

    def begin_message(self) -> Frames:
        """Begin what the model says; return the frames that announce it."""
        id_ = new_id("msg_")
        return self._begin(Message(id=id_, status="in_progress", role="assistant", content=[]))

    def _begin_reasoning(self) -> Frames:
        item = ReasoningItem(id=new_id("rs_"), status="in_progress", summary=[], content=[])
        return self._begin(item, self._seal_for)

    def _begin_call(self, delta: ToolCallDelta) -> Frames:
        if delta.id is None or delta.name is None:
            return ()
        call = {"status": "in_progress", "call_id": delta.id, "name": delta.name}
        if delta.is_custom:
            return self._begin(CustomToolCall(id=new_id("ctc_"), input="", **call))
        return self._begin(FunctionCall(id=new_id("fc_"), arguments="", **call))

    def _begin(self, announced: OutputItem, seal_for: int | None = None) -> Frames:
        ended = self.end_item("completed")
        item = self._output.begin(announced, seal_for)
        if not self._emits:
            return ended
        self._delta_frames = DeltaFrames(item)
        return [*ended, *self.encode(self._events(item).opening(announced))]

    def end_item(self, status: ItemStatus) -> list[bytes]:
        """End the item that is open, if there is one; return the frames of that."""
        if (open_ := self._output.open) is None:
            return []
        ended = open_.ended(status)
        self._output.end(ended)
        return self.encode(self._events(open_).closing(ended, has_delta=bool(open_.pieces)))

    def _events(self, item: OpenItem) -> ItemEvents:
        return ItemEvents(item.announced.id, item.index, self.numbers)

    def _piece(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Frames:
        item = self._output.open
        assert item is not None
        item.pieces.append(text)
        if logprobs:
            entries = _entries(logprobs)
            item.logprobs += entries
            return self.encode([self._events(item).delta(item.announced, text, entries)])
        if self._delta_frames is None:
            return ()
        return (self._delta_frames.frame(next(self.numbers), text),)


def _entries(logprobs: Sequence[TokenLogprob]) -> list[LogprobEntry]:
    return [
        LogprobEntry(**_token(entry), top_logprobs=[TopLogprob(**_token(o)) for o in entry.top])
        for entry in logprobs
    ]


def _token(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.text_bytes)}
