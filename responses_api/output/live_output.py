"""Deltas → the output of a response, and the frames that tell readers of it while it is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import count
from typing import Any

import orjson

from inference_site.domain.deltas import (
    Delta,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
)
from inference_site.generations.queue import new_id
from inference_site.streams.batches import Sent
from responses_api.output.events import encode
from responses_api.output.item_events import ItemEvents
from responses_api.output.sent_output import Cut, OpenItem, Output
from responses_api.wire.events import Event
from responses_api.wire.items import ItemStatus
from responses_api.wire.output import (
    CustomToolCall,
    FunctionCall,
    Message,
    OutputItem,
    ReasoningItem,
)

Frames = Sequence[bytes]
_NOTHING = Sent()


@cache
def _delta_frame(item_type: type[Any]) -> tuple[bytes, bytes, bytes]:
    """Return what the frame of a delta has before its number, before its text, and after it.

    The second is a template for the item's id and index. There is a delta for each token, so the
    wire model is encoded only once, for an item that has no fields.
    """
    event = ItemEvents("%b", 0, count()).delta(item_type.model_construct(), "")
    head, rest = encode(event).split(b"0", 1)  # The number: no type has a digit in it.
    middle, tail = rest.split(b'""', 1)
    return head, middle.replace(b'"output_index":0', b'"output_index":%d'), tail


class LiveOutput:
    """The output that an engine makes, after what the frames that were sent before say of it.

    ``emits`` is false when nobody reads events of it; ``seal_for`` is the project that reasoning is
    sealed for, if that was asked for. ``sent`` is the number of the first event to come,
    ``numbers`` are those of all that come. ``is_torn``: some that were sent are lost.
    """

    def __init__(self, emits: bool, seal_for: int | None, sent: Sent = _NOTHING) -> None:
        self._emits, self._seal_for = emits, seal_for
        self._output = Output(sent.frames)
        self._open_type: type[OutputItem] | None = None
        self._delta_frame = (b"", b"", b"")
        self.sent, self.numbers = sent.next, count(sent.next)
        self.is_torn = len(sent.frames) < sent.next

    @property
    def items(self) -> list[OutputItem]:
        """The items that have ended."""
        return self._output.items

    @property
    def cuts(self) -> list[Cut]:
        """How their texts were sent."""
        return self._output.cuts

    @property
    def pieces(self) -> int:
        """In how many pieces the texts of its items came."""
        return self._output.pieces

    def clear(self) -> None:
        """Forget the items that have ended; their places stay theirs."""
        self._output.clear()

    @property
    def is_empty(self) -> bool:
        """Whether no item has begun."""
        return self._output.open is None and not self._output.items

    def encode(self, events: Iterable[Event]) -> list[bytes]:
        """Return the frames of these events, if they are wanted."""
        return [encode(event) for event in events] if self._emits else []

    def feed(self, delta: Delta) -> Frames:
        """Take the next delta; return the frames of what it adds."""
        if isinstance(delta, TextDelta):
            opened = () if self._open_type is Message else self.begin_message()
            return self._piece(opened, delta.text, delta.logprobs)
        if isinstance(delta, ReasoningDelta):
            opened = () if self._open_type is ReasoningItem else self._begin_reasoning()
            return self._piece(opened, delta.text)
        if isinstance(delta, ToolCallDelta):
            opened = self._begin_call(delta)
            is_call = self._open_type in (FunctionCall, CustomToolCall)
            return self._piece(opened, delta.arguments) if delta.arguments and is_call else opened
        return ()

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
        self._open_type = type(announced)
        head, middle, tail = _delta_frame(self._open_type)
        self._delta_frame = head, middle % (announced.id.encode(), item.index), tail
        opening = list(self._events(item).opening(announced)) if self._emits else []
        item.first = next((event.sequence_number for event in opening), None)
        return [*ended, *self.encode(opening)]

    def end_item(self, status: ItemStatus) -> list[bytes]:
        """End the item that is open, if there is one; return the frames of that."""
        if (open_ := self._output.open) is None:
            return []
        ended = open_.ended(status)
        self._output.end(ended)
        self._open_type = None
        return self.encode(self._events(open_).closing(ended, has_delta=bool(open_.pieces)))

    def _events(self, item: OpenItem) -> ItemEvents:
        return ItemEvents(item.announced.id, item.index, self.numbers)

    def _piece(self, opened: Frames, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Frames:
        item = self._output.open
        assert item is not None
        entries = _entries(logprobs)
        item.take(text, entries)
        head, middle, tail = self._delta_frame
        if entries:
            tail = tail.replace(b"[]", orjson.dumps(entries))
        if not self._emits:
            return ()
        number = next(self.numbers)
        return (*opened, b"%b%d%b%b%b" % (head, number, middle, orjson.dumps(text), tail))


def _entries(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return log probabilities as ``LogprobEntry`` has them, which are many for each token."""
    return [
        {**_token(entry), "top_logprobs": [_token(other) for other in entry.top]}
        for entry in logprobs
    ]


def _token(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.text_bytes)}
