"""The output of a response while its items are generated: what is sent, and what it has become.

The fold is pure: the same deltas give the same events.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import compress, count
from typing import Any

import orjson
from pydantic import TypeAdapter

from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
)
from inference_site.core.domain.site_tools import Source, ToolResult
from inference_site.core.storage.cipher import seal
from inference_site.runs.queue import new_id
from inference_site.runs.streams.batches import Sent
from responses_api import events
from responses_api.client_tools import CLIENT_TOOLS, ClientTool, new_call, typed_call
from responses_api.events import (
    ItemEvents,
    as_refusal,
    encode,
    events_of,
    summary_of,
    with_text,
)
from responses_api.site_tools import Route, SiteToolType, site_tools, with_citations
from responses_api.turns import SitePlan
from responses_api.wire import objects as wire
from responses_api.wire.input_items import ItemStatus
from responses_api.wire.objects import (
    CustomToolCall,
    Event,
    FunctionCall,
    LogprobEntry,
    McpApprovalRequest,
    McpCall,
    Message,
    OutputItem,
    ReasoningItem,
    RefusalMessage,
    SiteCallItem,
    changed,
)

Frames = Sequence[bytes]

_LOGPROBS = TypeAdapter(list[LogprobEntry])
_OUTCOME_UNKNOWN = {
    "type": "mcp_protocol_error",
    "code": -32000,
    "message": "Outcome unknown: the response ended before the result of the call was stored.",
}


@dataclass(frozen=True, slots=True)
class SentDeltas:
    """How the text of an item was divided into delta events.

    ``first`` is the number of the item's first event, ``sizes`` the characters of each delta, and
    ``logprob_counts``, if there are log probabilities, the number of them in each delta.
    ``StoredResponse.deltas`` holds these fields, so their names are a storage format.
    """

    first: int | None
    sizes: list[int]
    logprob_counts: list[int]


@dataclass(slots=True)
class OpenItem:
    """An item that has begun and not ended.

    ``announced`` is the item in its ``response.output_item.added`` event, ``index`` its output
    index, ``first`` the number of its first event. ``pieces`` are the texts of its deltas;
    ``logprob_counts`` says how many of ``logprobs`` came with each.

    The events of an item that ``is_silent`` are sent when it has ended: the item of a typed
    ``tool`` of the client is made from the whole arguments. The call of a ``site_tool`` stays open
    until its result is there; ``is_called``: its arguments are whole; ``is_cut``: its turn was cut
    off, so the call is not made.
    ``options`` are those of the site tool. ``summary`` is how the reasoning is to be summarised.
    """

    announced: OutputItem
    index: int
    seal_for: int | None = None
    tool: ClientTool | None = None
    summary: str | None = None
    site_tool: SiteToolType | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    is_silent: bool = False
    is_called: bool = False
    is_cut: bool = False
    first: int | None = None
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    logprob_counts: list[int] = field(default_factory=list)

    @property
    def is_call(self) -> bool:
        """Whether it is a call that is written as JSON arguments or a text."""
        return isinstance(self.announced, (FunctionCall, CustomToolCall, SiteCallItem))

    def append(self, text: str, logprobs: list[dict[str, Any]]) -> None:
        """Add the text of a delta."""
        self.pieces.append(text)
        self.logprobs += logprobs
        self.logprob_counts.append(len(logprobs))

    def so_far(self, status: ItemStatus) -> OutputItem:
        """Return the item with its text so far; reasoning is not encrypted yet."""
        logprobs = _LOGPROBS.validate_python(self.logprobs) if self.logprobs else ()
        return with_text(self.announced, "".join(self.pieces), logprobs, status)

    def ended(self, status: ItemStatus) -> OutputItem:
        """Return the item with all of its text."""
        item = self.so_far(status)
        if self.is_called and not self.is_cut and isinstance(item, McpCall):
            return changed(item, error=_OUTCOME_UNKNOWN)
        if self.tool is not None and isinstance(item, FunctionCall):
            return typed_call(self.tool, item, status)
        if not isinstance(item, ReasoningItem):
            return item
        text, fields = "".join(self.pieces), dict[str, Any]()
        if self.summary is not None:
            fields["summary"] = summary_of(text, self.summary)
        if self.seal_for is not None:
            fields["encrypted_content"] = seal(text, self.seal_for)
        return changed(item, **fields)


class Output:
    """The output items that the frames sent so far contain; the last item may be open."""

    def __init__(self, frames: Sequence[bytes] = ()) -> None:
        self.items: list[OutputItem] = []
        self.sent_deltas: list[SentDeltas] = []
        self.open_item: OpenItem | None = None
        self._next_index = 0
        for event in events_of(frames):
            match event:
                case wire.ResponseStateEvent(type="response.in_progress"):
                    # Other items before it are of an earlier attempt.
                    self.clear([item.id for item in event.response.output])
                case wire.OutputItemEvent(type="response.output_item.added"):
                    self._next_index = event.output_index
                    self._start(event.item).first = event.sequence_number
                case wire.OutputItemEvent():
                    self._finish(event.item)
                case (
                    wire.OutputTextDelta()
                    | wire.RefusalDelta()
                    | wire.ReasoningTextDelta()
                    | wire.FunctionCallArgumentsDelta()
                    | wire.CustomToolCallInputDelta()
                    | wire.McpCallArgumentsDelta()
                ) if self.open_item is not None:
                    logprobs = event.logprobs if isinstance(event, wire.OutputTextDelta) else []
                    if isinstance(event, wire.RefusalDelta):
                        self.open_item.announced = as_refusal(self.open_item.announced)
                    self.open_item.append(event.delta, [entry.model_dump() for entry in logprobs])
                case wire.McpCallArgumentsDone() if self.open_item is not None:
                    self.open_item.is_called = True

    @property
    def is_empty(self) -> bool:
        """Whether no item has begun."""
        return self.open_item is None and not self.items

    @property
    def pieces(self) -> int:
        """The number of deltas of all items."""
        ended = sum(len(sent.sizes) for sent in self.sent_deltas)
        return ended + len(self.open_item.pieces if self.open_item else ())

    def clear(self, kept: Collection[str] = ()) -> None:
        """Drop the ended items but those with these ids; later items get higher output indexes."""
        stay = [item.id in kept for item in self.items]
        self.items = list(compress(self.items, stay))
        self.sent_deltas = list(compress(self.sent_deltas, stay))

    def text(self) -> str:
        """Return the texts of the messages, and the arguments of calls, one a line."""
        texts: list[str] = []
        for item in self.so_far():
            match item:
                case Message() | RefusalMessage():
                    parts = [part.model_dump() for part in item.content]
                    texts += [part.get("text") or part.get("refusal") or "" for part in parts]
                case FunctionCall():
                    texts.append(item.arguments)
                case CustomToolCall():
                    texts.append(item.input)
        return "\n".join(texts)

    def so_far(self) -> list[OutputItem]:
        """Return the items; the open one with the status ``in_progress``."""
        return [*self.items, *([self.open_item.so_far("in_progress")] if self.open_item else [])]

    def _start(
        self, announced: OutputItem, seal_for: int | None = None, summary: str | None = None
    ) -> OpenItem:
        self.open_item = OpenItem(announced, self._next_index, seal_for, summary=summary)
        self._next_index += 1
        return self.open_item

    def _finish(self, item: OutputItem) -> None:
        """Add the final form of the open item."""
        self.items.append(item)
        if (ended := self.open_item) is not None:
            counts = ended.logprob_counts if ended.logprobs else []
            sizes = [len(piece) for piece in ended.pieces]
            self.sent_deltas.append(SentDeltas(ended.first, sizes, counts))
        self.open_item = None


class OutputWriter(Output):
    """Adds the deltas of an engine to the output, and encodes the events of that.

    It continues after the frames ``sent`` by earlier attempts: ``first_number`` is the number of
    its first event, ``numbers`` counts on from there. ``summary`` is how reasoning is summarised.
    For the other parameters see ``ResponseAssembly``.
    """

    def __init__(
        self,
        emits: bool,
        seal_for: int | None,
        routes: Mapping[str, Route],
        summary: str | None,
        sent: Sent,
        plan: SitePlan | None,
    ) -> None:
        super().__init__(sent.frames)
        self._emits, self._seal_for, self._routes, self._plan = emits, seal_for, routes, plan
        self.sources: Sequence[Source] = ()
        """The places that the results of site-run calls so far quote."""
        self._held: list[Delta] = []
        """What came after the call of a site-run tool that waits for its result."""
        self._summary = summary
        self._open_type: type[OutputItem] | None = None
        self._delta_frame = (b"", b"", b"")
        self.first_number, self.numbers = sent.next, count(sent.next)
        self.has_lost_frames = len(sent.frames) < sent.next

    def encode(self, events: Iterable[Event]) -> list[bytes]:
        """Return the frames of events; none if no client can read them."""
        return [encode(event) for event in events] if self._emits else []

    def feed(self, delta: Delta) -> Frames:
        """Take the next delta; return its frames.

        Items do not overlap: what follows the call of a site-run tool is held until its result is
        there.
        """
        if self._held or (self._waits_for_result and _begins_item(delta)):
            self._held.append(delta)
            return self._called()
        opened: Frames = ()
        if isinstance(delta, TextDelta):
            if self._open_type is not Message:
                opened = self.begin_message()
            return self._append(opened, delta.text, delta.logprobs)
        if isinstance(delta, RefusalDelta):
            if self._open_type is not RefusalMessage:
                opened = self.begin_message(RefusalMessage)
            return self._append(opened, delta.text)
        if isinstance(delta, ReasoningDelta):
            if self._open_type is not ReasoningItem:
                id_ = new_id("rs_")
                item = ReasoningItem(id=id_, status="in_progress", summary=[], content=[])
                opened = self._begin(item, self._seal_for, summary=self._summary)
            return self._append(opened, delta.text)
        if isinstance(delta, ToolCallDelta):
            if delta.id is not None and delta.name is not None:
                opened = self._begin_call(delta.id, delta.name, is_custom=delta.is_custom)
            if delta.arguments and self.open_item and self.open_item.is_call:
                return self._append(opened, delta.arguments)
        if isinstance(delta, Finish) and self._waits_for_result:
            return self._called()
        return opened

    def cut(self) -> None:
        """Record that the turn was cut off: the calls of the site in it are not made."""
        if self.open_item is not None:
            self.open_item.is_cut = True

    @property
    def _waits_for_result(self) -> bool:
        return self.open_item is not None and self.open_item.site_tool is not None

    def _begin_call(self, call_id: str, name: str, *, is_custom: bool) -> Frames:
        route = self._routes.get(name) or Route("function", name)
        type_ = None if self._plan is None else site_tools().get(route.type)
        if type_ is None or self._plan is None:
            tool = CLIENT_TOOLS.get(route.type)
            call = new_call(route, call_id, is_custom=is_custom)
            return self._begin(call, tool=tool, is_silent=tool is not None)
        options = self._plan.options_for(name, route)
        item: Any = changed(type_.begin(route, options), **self._plan.fields_of(name))
        is_run = type_.is_run(route, options)
        opened = self._begin(item, site_tool=type_ if is_run else None, is_silent=not is_run)
        if self.open_item is not None:
            self.open_item.options = options
        return opened

    def _called(self) -> Frames:
        """Return the events of the open site-run call when its arguments are whole, once."""
        open_ = self.open_item
        if open_ is None or open_.is_called:
            return ()
        open_.is_called = True
        item_events = ItemEvents(open_.announced.id, open_.index, self.numbers)
        return self.encode(item_events.called(open_.so_far("in_progress")) if self._emits else ())

    def end_call(self, result: ToolResult) -> Frames:
        """End the open call of a site-run tool.

        Return its frames, those of the items that follow it, and those that were held.
        """
        open_ = self.open_item
        assert open_ is not None
        assert open_.site_tool is not None
        called = self._called()
        item: Any = open_.so_far("in_progress")
        ended: Any = open_.site_tool.end(item, "".join(open_.pieces) or "{}", result)
        frames = [*called, *self._close(ended)]
        for item in open_.site_tool.following(ended, open_.options, result):
            frames += self.add_whole(item)
        held, self._held = self._held, []
        return [*frames, *(frame for delta in held for frame in self.feed(delta))]

    def add_whole(self, item: OutputItem) -> list[bytes]:
        """Add an item that has ended; return its frames. No item is open."""
        open_ = self._start(item)
        item_events = ItemEvents(item.id, open_.index, self.numbers)
        frames = list(item_events.whole(item)) if self._emits else []
        open_.first = frames[0].sequence_number if frames else None
        self._finish(item)
        return self.encode(frames)

    def begin_message(self, kind: type[Message] = Message) -> Frames:
        """Begin a message, of text or a refusal; return the frames that announce it."""
        id_ = new_id("msg_")
        return self._begin(kind(id=id_, status="in_progress", role="assistant", content=[]))

    def discard(self, frames: Sequence[bytes]) -> None:
        """Drop all items; ``frames``, their events, were not sent."""
        self.clear()
        self.open_item, self._open_type, self._held = None, None, []
        if frames:
            self.numbers = count(events.decode(frames[0])["sequence_number"])

    def end_item(self, status: ItemStatus) -> list[bytes]:
        """End the open item, if there is one; return the frames of that.

        A call that was to be approved and is not whole is dropped: nothing of it was sent.
        """
        if (open_ := self.open_item) is None:
            return []
        self._held = []
        if isinstance(open_.announced, McpApprovalRequest) and status != "completed":
            self.open_item, self._open_type = None, None
            self._next_index -= 1
            return []
        return self._close(with_citations(open_.ended(status), self.sources))

    def _close(self, ended: OutputItem) -> list[bytes]:
        """End the open item, which has this form now; return the frames of that."""
        open_ = self.open_item
        assert open_ is not None
        item_events = ItemEvents(ended.id, open_.index, self.numbers)
        called: Frames = ()
        if open_.is_silent:
            closing = list(item_events.whole(ended)) if self._emits else []
            open_.first = closing[0].sequence_number if closing else None
        else:
            called = self._called() if isinstance(ended, SiteCallItem) else ()
            has_delta = bool(open_.pieces)
            closing = list(item_events.closing(ended, has_delta=has_delta)) if self._emits else []
        if open_.is_silent or not _has_deltas(ended):
            open_.pieces, open_.logprob_counts = [], []
        self._finish(ended)
        self._open_type = None
        return [*called, *self.encode(closing)]

    def _begin(
        self,
        announced: OutputItem,
        seal_for: int | None = None,
        tool: ClientTool | None = None,
        site_tool: SiteToolType | None = None,
        *,
        is_silent: bool = False,
        summary: str | None = None,
    ) -> Frames:
        ended = self.end_item("completed")
        item = self._start(announced, seal_for, summary)
        item.tool, item.site_tool, item.is_silent = tool, site_tool, is_silent
        self._open_type = type(announced)
        if is_silent:
            return ended
        if _has_deltas(announced):
            head, middle, tail = _delta_frame(self._open_type)
            self._delta_frame = head, middle % (announced.id.encode(), item.index), tail
        item_events = ItemEvents(announced.id, item.index, self.numbers)
        opening = list(item_events.opening(announced)) if self._emits else []
        item.first = next((event.sequence_number for event in opening), None)
        return [*ended, *self.encode(opening)]

    def _append(self, opened: Frames, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Frames:
        """Add text to the open item; return its frame after those that opened the item."""
        item = self.open_item
        assert item is not None
        # Plain dicts in the shape of LogprobEntry: models would cost too much for each token.
        entries = [
            {**_token(entry), "top_logprobs": [_token(other) for other in entry.top]}
            for entry in logprobs
        ]
        item.append(text, entries)
        if item.is_silent or not _has_deltas(item.announced):
            return opened
        head, middle, tail = self._delta_frame
        if entries:
            tail = tail.replace(b"[]", orjson.dumps(entries))
        if not self._emits:
            return ()
        number = next(self.numbers)
        return (*opened, b"%b%d%b%b%b" % (head, number, middle, orjson.dumps(text), tail))


def _has_deltas(item: OutputItem) -> bool:
    """Whether the text of such an item is sent in pieces."""
    return isinstance(item, McpCall) or not isinstance(item, SiteCallItem)


def _begins_item(delta: Delta) -> bool:
    if isinstance(delta, ToolCallDelta):
        return delta.name is not None
    return isinstance(delta, TextDelta | ReasoningDelta | RefusalDelta)


def _token(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.text_bytes)}


@cache
def _delta_frame(item_type: type[Any]) -> tuple[bytes, bytes, bytes]:
    """Return the bytes of a delta's frame before its number, before its text, and after its text.

    The second has placeholders for the item's id and output index. There is a delta for each token,
    so the wire model is encoded once for each type of item.
    """
    event = ItemEvents("%b", 0, count()).delta(item_type.model_construct(), "")
    head, rest = encode(event).split(b"0", 1)  # The number: no event type contains a digit.
    middle, tail = rest.split(b'""', 1)
    return head, middle.replace(b'"output_index":0', b'"output_index":%d'), tail
