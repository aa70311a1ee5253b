"""The output of a response that has not ended, as its deltas or the frames sent so far tell it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from responses_api.output.events import events_of
from responses_api.output.item_events import filled
from responses_api.output.sealing import seal
from responses_api.wire import events as wire
from responses_api.wire.items import ItemStatus
from responses_api.wire.output import LogprobEntry, OutputItem, ReasoningItem, changed

_LOGPROBS = TypeAdapter(list[LogprobEntry])


@dataclass(frozen=True, slots=True)
class Cut:
    """How the text of an item was sent: the number of the item's first event, the characters of
    each delta, and, if it has any, how many log probabilities came with each."""

    first: int | None
    sizes: list[int]
    logprob_counts: list[int]


@dataclass(slots=True)
class OpenItem:
    """An item that is being made: as it was announced, its place, and its text so far.

    ``seal_for`` is the project that reasoning is sealed for, if that was asked for. ``first`` is
    the number of its first event; ``logprob_counts`` has how many of the ``logprobs`` came with
    each of the ``pieces``.
    """

    announced: OutputItem
    index: int
    seal_for: int | None = None
    first: int | None = None
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    logprob_counts: list[int] = field(default_factory=list)

    def take(self, text: str, logprobs: list[dict[str, Any]]) -> None:
        """Add a piece."""
        self.pieces.append(text)
        self.logprobs += logprobs
        self.logprob_counts.append(len(logprobs))

    @property
    def cut(self) -> Cut:
        """How its text was sent."""
        counts = self.logprob_counts if self.logprobs else []
        return Cut(self.first, list(map(len, self.pieces)), counts)

    def as_is(self, status: ItemStatus) -> OutputItem:
        """Return the item with its text so far."""
        logprobs = _LOGPROBS.validate_python(self.logprobs) if self.logprobs else ()
        return filled(self.announced, "".join(self.pieces), logprobs, status)

    def ended(self, status: ItemStatus) -> OutputItem:
        """Return the item with all of its text."""
        item = self.as_is(status)
        if self.seal_for is None or not isinstance(item, ReasoningItem):
            return item
        return changed(item, encrypted_content=seal("".join(self.pieces), self.seal_for))


class Output:
    """Items in their order, of which the last may be open."""

    def __init__(self, frames: Sequence[bytes] = ()) -> None:
        self.items: list[OutputItem] = []
        self.cuts: list[Cut] = []
        self.open: OpenItem | None = None
        self.next_index = 0
        for event in events_of(frames):
            self._take(event)

    @property
    def pieces(self) -> int:
        """In how many pieces the texts of its items came."""
        return sum(len(cut.sizes) for cut in self.cuts) + len(self.open.pieces if self.open else ())

    def begin(self, announced: OutputItem, seal_for: int | None = None) -> OpenItem:
        """Add an item at the next place; return it."""
        self.open = OpenItem(announced, self.next_index, seal_for)
        self.next_index += 1
        return self.open

    def end(self, item: OutputItem) -> None:
        """Replace the open item by what it has come to."""
        self.items.append(item)
        if self.open is not None:
            self.cuts.append(self.open.cut)
        self.open = None

    def clear(self) -> None:
        """Forget the items that have ended."""
        self.items, self.cuts = [], []

    def so_far(self) -> list[OutputItem]:
        """Return the items, with what there is of the one that is open."""
        return [*self.items, *([self.open.as_is("in_progress")] if self.open else [])]

    def _take(self, event: wire.ResponseEvent) -> None:
        match event:
            case wire.ResponseStateEvent(type="response.in_progress"):
                self.clear()  # What was made before is of an attempt that was begun anew.
            case wire.OutputItemEvent(type="response.output_item.added"):
                self.next_index = event.output_index
                self.begin(event.item).first = event.sequence_number
            case wire.OutputItemEvent():
                self.end(event.item)
            case (
                wire.OutputTextDelta()
                | wire.ReasoningTextDelta()
                | wire.FunctionCallArgumentsDelta()
                | wire.CustomToolCallInputDelta()
            ) if self.open is not None:
                logprobs = event.logprobs if isinstance(event, wire.OutputTextDelta) else []
                self.open.take(event.delta, [entry.model_dump() for entry in logprobs])
