"""The events of an output item, in their order: of one being made, one stored, and one sent before.

    item added → part added → deltas → text done → part done → item done

A call has no part, and always a delta: readers expect one, also of a call without arguments. An
item that is interrupted ends like any other, with the status ``incomplete``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, Literal

from responses_api.wire import events as wire
from responses_api.wire.items import ItemStatus
from responses_api.wire.output import (
    Call,
    CustomToolCall,
    FunctionCall,
    LogprobEntry,
    Message,
    OutputItem,
    OutputText,
    ReasoningItem,
    TextPart,
    changed,
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
        for size, count in zip_longest(sizes, counts[: len(sizes)], fillvalue=0):
            yield self.delta(item, text[at : at + size], logprobs[entry : entry + count])
            at, entry = at + size, entry + count
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
