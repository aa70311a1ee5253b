"""Assemblers of the three kinds of generations: responses, token counts and compactions.

An assembler folds the deltas of an engine into the frames of the stream and the final object. The
fold is pure: the same deltas give the same events.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import compress, count
from typing import Any, Literal

import orjson
from django.conf import settings
from pydantic import TypeAdapter
from pydantic_core import to_json

from inference_site.core.domain.compaction import SUMMARY_HEADING, CompactedContext
from inference_site.core.domain.deltas import (
    CompactionDelta,
    Delta,
    Finish,
    FinishReason,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from inference_site.core.domain.errors import ContextLengthExceeded
from inference_site.core.domain.request import GenerationRequest
from inference_site.core.domain.site_tools import SiteCall, Source, ToolResult
from inference_site.core.errors.api_errors import ApiError
from inference_site.core.errors.exceptions import api_error
from inference_site.core.storage.cipher import seal
from inference_site.gateway.request_fields.moderation import MODERATION, AnswerModeration
from inference_site.runs.kinds import (
    Assembler,
    PromptCountAssembler,
    WholeAnswerAssembler,
    error_ending,
)
from inference_site.runs.queue import new_id
from inference_site.runs.streams.batches import Ending, Sent
from inference_site.runs.streams.request_documents import Assembly
from responses_api import events
from responses_api.client_tools import CLIENT_TOOLS, ClientTool, Route, new_call, typed_call
from responses_api.events import (
    ItemEvents,
    as_refusal,
    encode,
    events_of,
    summary_of,
    with_text,
)
from responses_api.items import SealedContext, new_item, seal_context, unseal_context
from responses_api.site_tools import FirstCall, SiteToolType, site_tools, with_citations
from responses_api.turns import SitePlan, TokensSpent, Turns
from responses_api.wire import objects as wire
from responses_api.wire.input_items import ItemStatus
from responses_api.wire.objects import (
    Compaction,
    CustomToolCall,
    Event,
    FunctionCall,
    IncompleteDetails,
    InputTokensDetails,
    LogprobEntry,
    McpCall,
    Message,
    Moderation,
    OutputItem,
    OutputTokensDetails,
    ReasoningItem,
    RefusalMessage,
    ResponseObject,
    ResponseUsage,
    SiteCallItem,
    changed,
)

RESPONSE, INPUT_TOKENS, COMPACTION = "response", "response.input_tokens", "response.compaction"
"""Names of the kinds of generations."""
_INCOMPLETE_REASONS: dict[FinishReason, Literal["max_output_tokens", "content_filter"]] = {
    "length": "max_output_tokens",
    "content_filter": "content_filter",
}
"""``incomplete_details.reason`` by the finish reason of the model."""
_LOGPROBS = TypeAdapter(list[LogprobEntry])
_NOTHING_SENT = Sent()

Frames = Sequence[bytes]

_ITEMS = TypeAdapter(list[OutputItem])
_OUTCOME_UNKNOWN = {
    "type": "mcp_protocol_error",
    "code": -32000,
    "message": "Outcome unknown: the response ended before the result of the call was stored.",
}


@dataclass(frozen=True)
class ResponseAssembly(Assembly):
    """The arguments of ``ResponseAssembler``, as the request document holds them.

    ``response`` is the response object as it was accepted. ``emits`` is false when no client can
    read the stream. ``seal_for`` is the project to encrypt the reasoning for, if the request
    includes encrypted reasoning. ``routes`` are the fields of the tools that the names of calls
    lead to; a name without a route is a function. ``first_calls`` are the fields of the calls
    before the first turn, and ``most_calls`` is how many calls of the model are run.
    ``compacts_for`` is the project to seal a compaction for, if the request may be compacted, and
    ``tool_items`` are the items that the seal keeps.
    """

    response: dict[str, Any]
    emits: bool = True
    sends_done: bool = True
    seal_for: int | None = None
    routes: dict[str, dict[str, Any]] = field(default_factory=dict)
    first_calls: list[dict[str, Any]] = field(default_factory=list)
    most_calls: int = 0
    compacts_for: int | None = None
    tool_items: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_stored(self) -> bool:
        """Whether the response is stored."""
        return self.response.get("store") is not False

    def plan(self) -> SitePlan | None:
        """Return what the site runs for the response; None if it runs no tools."""
        # The moderation is the last one: the places of the others are those in ``site_tools``.
        tools = [options for options in self.site_tools if options["type"] != MODERATION]
        if not tools:
            return None
        calls = [FirstCall(**{**c, "route": Route(**c["route"])}) for c in self.first_calls]
        return SitePlan(tools, calls, self.most_calls)

    def seal_compaction(self, context: CompactedContext) -> str:
        """Return the content of a compaction's item."""
        assert self.compacts_for is not None
        return seal_context(SealedContext(context, self.tool_items), self.compacts_for)

    def unseal_compaction(self, sealed: str) -> CompactedContext:
        """Read the content of a compaction's item after a restart."""
        assert self.compacts_for is not None
        return unseal_context(sealed, self.compacts_for, "output").context


class ResponseAssembler(Assembler):
    """Assembles one response.

    ``response`` is the response object: at first as it was accepted, after the end the final one.
    ``error`` is the error that the client gets. ``deltas`` is the value for
    ``StoredResponse.deltas``.
    """

    def __init__(self, assembly: ResponseAssembly) -> None:
        accepted = {**assembly.response, "status": "in_progress"}
        self.response = ResponseObject.model_validate(accepted)
        self.error: dict[str, Any] | None = None
        self.deltas: dict[str, Any] | None = None
        self._assembly = assembly
        self._routes = {name: Route(**route) for name, route in assembly.routes.items()}
        self._plan = plan = assembly.plan()
        self._turns = None if plan is None else Turns(self._routes, plan)
        self._saved: Mapping[str, Any] | None = None
        self._summary = self.response.reasoning.summary
        self._output = self._new_output()
        self._finish_reason: FinishReason = "stop"
        self._usage = Usage()
        self._moderation = AnswerModeration.of(assembly.site_tools)
        self._has_turn_ended = False
        self._unjudged: list[bytes] = []
        """Frames that are sent once the output was judged."""

    def _new_output(self, sent: Sent = _NOTHING_SENT) -> OutputWriter:
        emits, seal_for = self._assembly.emits, self._assembly.seal_for
        output = OutputWriter(emits, seal_for, self._routes, self._summary, sent, self._plan)
        if self._turns is not None:
            output.sources = self._turns.sources
        return output

    @property
    def sources(self) -> Sequence[Source]:
        """The places that the results so far quote (see ``Assembler``)."""
        return self._output.sources

    def restart(self, sent: Sent, saved: Mapping[str, Any] | None = None) -> Sequence[bytes]:
        """Continue the stream of an earlier attempt with a new answer.

        The item that the earlier attempt left open is ended. Its items are not part of the output,
        but keep their output indexes; those of turns that are ``saved`` stay in the output, if they
        were sent as they are saved. One more ``response.in_progress`` marks the restart, and has
        the items that stay.
        """
        self.recover(sent)
        closing = self._output.end_item("incomplete")
        self._saved = saved = saved if saved and saved["turns"] is not None else None
        kept = [] if saved is None else saved["items"]
        output = self._output
        output.clear([item.id for item in output.items if item.model_dump(mode="json") in kept])
        if sent.next <= events.ACCEPTED_EVENTS:  # The earlier attempt has sent nothing.
            return closing
        shown = changed(self.response, output=self._output.items)
        again = events.state_event(events.IN_PROGRESS, shown, self._output.numbers)
        return [*closing, *self._output.encode([again])]

    def recover(self, sent: Sent) -> None:
        """Continue with the output that the frames sent so far contain."""
        self._output = self._new_output(sent)
        self.pieces = self._output.pieces

    def begin(self) -> Sequence[bytes]:
        """Return those opening events that were not sent at acceptance, and the first calls.

        After a restart, the calls of the last saved turn are announced again in their place.
        """
        output = self._output
        frames = output.encode(
            events.opening_events(self.response, output.numbers, output.first_number)
        )
        deltas: list[Delta] = []
        if self._turns is not None and self._saved is not None:
            items = _ITEMS.validate_python(self._saved["items"])
            for item in items[len(output.items) :]:
                frames += output.add_whole(item)
            sealed = [item.encrypted_content for item in items if isinstance(item, Compaction)]
            compacted = self._assembly.unseal_compaction(sealed[-1]) if sealed else None
            deltas = self._turns.restore(self._saved["turns"], compacted)
        elif self._turns is not None and self._plan is not None and self._plan.first_calls:
            deltas = self._turns.first(self._plan.first_calls)
        return [*frames, *(frame for delta in deltas for frame in self.feed(delta))]

    def calls(self) -> Sequence[SiteCall]:
        """Return the calls to run (see ``Assembler``).

        The tool calls of an answer that was cut off are not run.
        """
        moderation = self._moderation
        if moderation is not None and (moderation.is_blocked or moderation.input_calls()):
            return [] if moderation.is_blocked else moderation.input_calls()
        if calls := self._tool_calls:
            return calls
        if moderation is None or not self._has_turn_ended or not self._is_last_turn:
            return ()
        return moderation.output_calls([self._output.text()])

    @property
    def _tool_calls(self) -> Sequence[SiteCall]:
        is_cut = self._finish_reason in _INCOMPLETE_REASONS
        return () if self._turns is None or is_cut else self._turns.calls

    @property
    def _is_last_turn(self) -> bool:
        is_cut = self._finish_reason in _INCOMPLETE_REASONS
        return self._turns is None or is_cut or self._turns.is_last

    def save(self) -> Mapping[str, Any]:
        """Return the items of ended turns, and the state of the turns (see ``Assembler``).

        While the input or the output is judged, the state is that of the last calls of tools.
        """
        if self._turns is None or not self._tool_calls:
            return self._saved or {"items": [], "turns": None}
        items = [item.model_dump(mode="json") for item in self._output.items]
        self._saved = {"items": items, "turns": self._turns.save()}
        return self._saved

    def add_result(self, result: ToolResult) -> Sequence[bytes]:
        """End the item of the first of the calls; return its events, and those that waited."""
        moderation = self._moderation
        if moderation is not None and (moderation.input_calls() or not self._tool_calls):
            moderation.take(result)
            if "output" not in moderation.judged or moderation.is_blocked:
                return ()
            frames, self._unjudged = self._unjudged, []
            return frames
        assert self._turns is not None
        self._turns.add_result(result)
        return self._judged_first(self._output.end_call(result))

    def _judged_first(self, frames: Sequence[bytes]) -> Sequence[bytes]:
        """Return the frames that may be sent now; the others wait until the output was judged."""
        if self._moderation is None or not self._moderation.blocks_output:
            return frames
        self._unjudged += frames
        return ()

    def next_request(self, request: GenerationRequest) -> GenerationRequest | None:
        """Return the request of the next turn (see ``Assembler``)."""
        if self._moderation is not None and self._moderation.is_blocked:
            self._finish_reason = "content_filter"
            return None
        if not self._has_turn_ended:
            return request  # That of the first turn, after the input was judged.
        if self._turns is None or self._finish_reason in _INCOMPLETE_REASONS:
            return None
        try:
            following = self._turns.next_request(request, self._usage.output_tokens)
        except TokensSpent:
            self._finish_reason = "length"
            return None
        self._has_turn_ended = following is None
        return following

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta; return its events, encoded."""
        return self._judged_first(self._feed(delta))

    def _feed(self, delta: Delta) -> Sequence[bytes]:
        if isinstance(delta, Finish):
            self._finish_reason, self._has_turn_ended = delta.reason, True
        elif isinstance(delta, Usage):
            self._usage = delta
        elif isinstance(delta, CompactionDelta):
            if self._turns is not None:
                self._turns.compact(delta.context)
            sealed = self._assembly.seal_compaction(delta.context)
            output = self._output
            ended = output.end_item("completed")
            item = Compaction(id=new_id("cmp_"), encrypted_content=sealed)
            return [*ended, *output.add_whole(item)]
        if self._turns is not None and not self._turns.take(delta):
            return ()
        return self._output.feed(delta)

    def complete(self) -> Ending:
        """End the response as completed, or as incomplete after the token limit or a filter."""
        is_blocked = self._moderation is not None and self._moderation.is_blocked
        opened = self._output.begin_message() if self._output.is_empty and not is_blocked else ()
        reason = _INCOMPLETE_REASONS.get(self._finish_reason)
        if reason is None:
            frames = self._end("completed", "completed", completed_at=int(time.time()))
        else:
            details = IncompleteDetails(reason=reason)
            frames = self._end("incomplete", "incomplete", incomplete_details=details)
        body = to_json(self.response)
        return Ending([*opened, *frames], 200, body, finish_reason=self._finish_reason)

    def cancel(self) -> Ending:
        """End the response as cancelled, with its output so far."""
        return Ending(self._end("cancelled", "incomplete"), 200, to_json(self.response))

    def fail(self, error: Exception) -> Ending:
        """End the response as failed, with its output so far."""
        client_error = _client_error(error)
        is_early = self._output.is_empty
        self.error = client_error.envelope["error"]
        details = events.response_error(self.error)
        frames = self._end("failed", "incomplete", error=details)
        partial = {} if is_early else {"partial_response": self.response}
        return _failed_ending(client_error, frames, is_early=is_early, **partial)

    def _end(self, status: str, last_item: ItemStatus, **fields: Any) -> list[bytes]:
        """End the open item and complete the object; return the last frames of the stream."""
        output = self._output
        if (moderation := self._moderation) is not None:
            if moderation.blocks_output and (
                moderation.is_blocked or "output" not in moderation.judged
            ):
                output.discard(self._unjudged)
            fields["moderation"] = Moderation(
                input=moderation.shown("input")[0], output=moderation.shown("output")[0]
            )
        frames = output.end_item(last_item)
        if self.error is not None:
            frames += output.encode([events.error_event(self.error, output.numbers)])
        usage = response_usage(self._usage)
        fields |= {"status": status, "output": output.items, "usage": usage}
        self.response = changed(self.response, **fields)
        last = events.terminal_event(self.response, output.numbers)
        if self._assembly.emits and not output.has_lost_frames:
            sent_deltas = [asdict(sent) for sent in output.sent_deltas]
            self.deltas = {"end": last.sequence_number, "items": sent_deltas}
        frames += output.encode([last])
        return [*frames, events.DONE] if self._assembly.sends_done else frames


def failure(error: Exception, *, first: int = 0) -> Ending:
    """Fail a response without its object: the stream ends with an error event, numbered ``first``.

    See ``inference_site.runs.kinds.Failure``.
    """
    client_error = _client_error(error)
    frames = [encode(events.error_event(client_error.envelope["error"], count(first)))]
    if settings.RESPONSES_SEND_DONE:
        frames.append(events.DONE)
    return _failed_ending(client_error, frames, is_early=True)


def _failed_ending(
    error: ApiError, frames: list[bytes], *, is_early: bool, **partial: Any
) -> Ending:
    body = to_json({"error": {**error.envelope["error"], **partial}})
    return error_ending(error, body, frames, is_early=is_early)


def _client_error(error: Exception) -> ApiError:
    """Return the API error; the field that engines know as ``messages`` is ``input`` here."""
    if isinstance(error, ContextLengthExceeded):  # Its message names the field too.
        error = error.of("input")
    client_error = api_error(error)
    if client_error.param == "messages":
        client_error.param = "input"
    return client_error


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
    until its result is there; ``is_called``: its arguments are whole.
    ``summary`` is how the reasoning is to be summarised.
    """

    announced: OutputItem
    index: int
    seal_for: int | None = None
    tool: ClientTool | None = None
    summary: str | None = None
    site_tool: SiteToolType | None = None
    is_silent: bool = False
    is_called: bool = False
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
        if self.is_called and isinstance(item, McpCall):
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
        return self._begin(item, site_tool=type_ if is_run else None, is_silent=not is_run)

    def _called(self) -> Frames:
        """Return the events of the open site-run call when its arguments are whole, once."""
        open_ = self.open_item
        if open_ is None or open_.is_called:
            return ()
        open_.is_called = True
        item_events = ItemEvents(open_.announced.id, open_.index, self.numbers)
        return self.encode(item_events.called(open_.so_far("in_progress")) if self._emits else ())

    def end_call(self, result: ToolResult) -> Frames:
        """End the open call of a site-run tool; return its frames and those that were held."""
        open_ = self.open_item
        assert open_ is not None
        assert open_.site_tool is not None
        called = self._called()
        item: Any = open_.so_far("in_progress")
        ended: Any = open_.site_tool.end(item, "".join(open_.pieces) or "{}", result)
        frames = [*called, *self._close(ended)]
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
        """End the open item, if there is one; return the frames of that."""
        if (open_ := self.open_item) is None:
            return []
        self._held = []
        return self._close(with_citations(open_.ended(status), self.sources))

    def _close(self, ended: OutputItem) -> list[bytes]:
        """End the open item, which has this form now; return the frames of that."""
        open_ = self.open_item
        assert open_ is not None
        item_events = ItemEvents(ended.id, open_.index, self.numbers)
        if open_.is_silent:
            closing = item_events.whole(ended)
        else:
            called = self._called() if isinstance(ended, SiteCallItem) else ()
            closing = item_events.closing(ended, has_delta=bool(open_.pieces))
        frames = list(closing) if self._emits else []
        if open_.is_silent:
            called = ()
            open_.first = frames[0].sequence_number if frames else None
        if open_.is_silent or not _has_deltas(ended):
            open_.pieces, open_.logprob_counts = [], []
        self._finish(ended)
        self._open_type = None
        return [*called, *self.encode(frames)]

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


class InputTokensAssembler(PromptCountAssembler):
    """Assembles the answer of ``POST /v1/responses/input_tokens``."""

    def answer(self) -> dict[str, Any]:
        """Return the object ``response.input_tokens``."""
        return {"object": INPUT_TOKENS, "input_tokens": self.count}

    def fail(self, error: Exception) -> Ending:
        """End with the error."""
        return super().fail(_client_error(error))


@dataclass(frozen=True)
class CompactionAssembly(Assembly):
    """The arguments of a compaction; ``kept`` are the user's messages, as the API shows them."""

    response_id: str
    created_at: int
    kept: list[dict[str, Any]]
    project_id: int


class CompactionAssembler(WholeAnswerAssembler):
    """Assembles a compaction: the user's messages, and an encrypted summary of the rest."""

    def __init__(self, assembly: CompactionAssembly) -> None:
        self._assembly = assembly
        self._summary, self._usage = "", Usage()

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta."""
        match delta:
            case CompactionDelta(context):
                self._summary = context.summary
            case Usage():
                self._usage = delta
        return ()

    def answer(self) -> dict[str, Any]:
        """Return the object ``response.compaction``."""
        sealed = seal(SUMMARY_HEADING + self._summary, self._assembly.project_id)
        compaction = new_item({"type": "compaction", "encrypted_content": sealed})
        return {
            "id": self._assembly.response_id,
            "object": "response.compaction",
            "created_at": self._assembly.created_at,
            "output": [*self._assembly.kept, compaction.wire()],
            "usage": response_usage(self._usage).model_dump(),
        }

    def fail(self, error: Exception) -> Ending:
        """End with the error."""
        return super().fail(_client_error(error))


def response_usage(usage: Usage) -> ResponseUsage:
    """Return ``usage`` of the API: cached ⊂ input, reasoning ⊂ output."""
    return ResponseUsage(
        input_tokens=usage.input_tokens,
        input_tokens_details=InputTokensDetails(
            cached_tokens=usage.cached_tokens, cache_write_tokens=usage.cache_write_tokens
        ),
        output_tokens=usage.output_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
        total_tokens=usage.input_tokens + usage.output_tokens,
    )
