"""The output of a response that has not ended, as its deltas or the frames sent so far tell it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import count
from typing import Any, Literal

import orjson
from django.conf import settings
from pydantic import TypeAdapter
from pydantic_core import to_json

from inference_site.domain.deltas import (
    Delta,
    Finish,
    FinishReason,
    PromptDelta,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from inference_site.errors.api_errors import ApiError
from inference_site.errors.exceptions import api_error
from inference_site.generations.kinds import Assembler
from inference_site.generations.queue import new_id
from inference_site.generations.whole_answer import WholeAnswerAssembler
from inference_site.streams.batches import Sent
from inference_site.streams.ending import Ending
from inference_site.streams.request_documents import Assembly
from responses_api import events
from responses_api.events import ItemEvents, encode, events_of, filled
from responses_api.items import new_item
from responses_api.sealing import seal
from responses_api.wire import objects as wire
from responses_api.wire.input_items import ItemStatus
from responses_api.wire.objects import (
    CustomToolCall,
    Event,
    FunctionCall,
    IncompleteDetails,
    InputTokensDetails,
    LogprobEntry,
    Message,
    OutputItem,
    OutputTokensDetails,
    ReasoningItem,
    ResponseError,
    ResponseObject,
    ResponseStateEvent,
    ResponseUsage,
    changed,
)

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


RESPONSE = "response"
"""Name of this kind of generation."""
_INCOMPLETE: dict[FinishReason, Literal["max_output_tokens", "content_filter"]] = {
    "length": "max_output_tokens",
    "content_filter": "content_filter",
}
"""Why a response is incomplete whose model has ended so."""


@dataclass(frozen=True)
class ResponseAssembly(Assembly):
    """How a response is written (see ``ResponseAssembler``); ``response`` is a JSON object."""

    response: dict[str, Any]
    emits: bool = True
    sends_done: bool = True
    seal_for: int | None = None

    @property
    def is_stored(self) -> bool:
        """Whether the response is stored."""
        return self.response.get("store") is not False

    def assembler(self) -> ResponseAssembler:
        """Return the assembler that writes it so."""
        return ResponseAssembler(self.response, self.emits, self.sends_done, self.seal_for)


class ResponseAssembler(Assembler):
    """Assembles one response.

    ``response`` is the object, before anything ran and in the end; ``error`` is what a client is
    told of a failure; ``deltas`` is how its texts were sent (see ``StoredResponse``). ``emits`` is
    false when nobody will ever read events of it; ``seal_for`` is the project that reasoning is
    sealed for, if that was asked for.
    """

    def __init__(
        self,
        response: dict[str, Any],
        emits: bool = True,
        sends_done: bool = True,
        seal_for: int | None = None,
    ) -> None:
        self.response = ResponseObject.model_validate({**response, "status": "in_progress"})
        self.error: dict[str, Any] | None = None
        self.deltas: dict[str, Any] | None = None
        self._emits, self._sends_done, self._seal_for = emits, sends_done, seal_for
        self._output = LiveOutput(emits, seal_for)
        self._finish: FinishReason = "stop"
        self._usage = Usage()

    def restart(self, sent: Sent) -> Sequence[bytes]:
        """Go on after what was sent, from the beginning of the answer.

        The item that an earlier attempt left open is ended, and none of its items is part of the
        output; their places in it stay theirs. Readers are told by one more ``in_progress``.
        """
        self.recover(sent)
        closing = self._output.end_item("incomplete")
        self._output.clear()
        if sent.next <= events.ACCEPTED:  # No attempt has sent anything yet.
            return closing
        again = events.state_event(events.IN_PROGRESS, self.response, self._output.numbers)
        return [*closing, *self._output.encode([again])]

    def recover(self, sent: Sent) -> None:
        """Go on after what was sent, in order to end what the worker that sent it did not."""
        self._output = LiveOutput(self._emits, self._seal_for, sent)
        self.pieces = self._output.pieces

    def begin(self) -> Sequence[bytes]:
        """Return what the opening of the stream still lacks."""
        output = self._output
        return output.encode(events.opening(self.response, output.numbers, output.sent))

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta; return the events it makes."""
        if isinstance(delta, Finish):
            self._finish = delta.reason
        elif isinstance(delta, Usage):
            self._usage = delta
        return self._output.feed(delta)

    def complete(self) -> Ending:
        """End at the model's end, or at the token limit."""
        opened = self._output.begin_message() if self._output.is_empty else ()
        reason = _INCOMPLETE.get(self._finish)
        if reason is not None:
            details = IncompleteDetails(reason=reason)
            ended = self._end("incomplete", "incomplete", incomplete_details=details)
        else:
            ended = self._end("completed", "completed", completed_at=int(time.time()))
        return self._ending([*opened, *ended], self._finish)

    def cancel(self) -> Ending:
        """End because the client or an operator stopped it."""
        return self._ending(self._end("cancelled", "incomplete"), "")

    def fail(self, error: Exception) -> Ending:
        """End because of this error; what was made until then is kept."""
        problem = _problem(error)
        is_early = self._output.is_empty
        self.error = problem.envelope["error"]
        details = ResponseError(code=problem.code or problem.type, message=problem.message)
        frames = self._end("failed", "incomplete", error=details)
        partial = {} if is_early else {"partial_response": self.response}
        return _failure(problem, [*frames, *self._done()], is_early=is_early, **partial)

    def _end(self, status: str, last_item: ItemStatus, **fields: Any) -> list[bytes]:
        """End the item that is open, and fix the object; return the events of both."""
        output = self._output
        frames = output.end_item(last_item)
        if self.error is not None:
            frames += output.encode([events.error_event(self.error, output.numbers)])
        usage = response_usage(self._usage)
        fields |= {"status": status, "output": output.items, "usage": usage}
        self.response = changed(self.response, **fields)
        return [*frames, *output.encode([self._terminal()])]

    def _terminal(self) -> ResponseStateEvent:
        event = events.terminal(self.response, self._output.numbers)
        if self._emits and not self._output.is_torn:
            cuts = [asdict(cut) for cut in self._output.cuts]
            self.deltas = {"end": event.sequence_number, "items": cuts}
        return event

    def _ending(self, frames: Sequence[bytes], finish_reason: str) -> Ending:
        body = to_json(self.response)
        return Ending([*frames, *self._done()], 200, body, finish_reason=finish_reason)

    def _done(self) -> list[bytes]:
        return [events.DONE] if self._sends_done else []


def failure(error: Exception, *, first: int = 0) -> Ending:
    """End a response of which nothing else is known with the event of an error, of this number."""
    problem = _problem(error)
    event = events.encode(events.error_event(problem.envelope["error"], count(first)))
    done = [events.DONE] if settings.RESPONSES_SEND_DONE else []
    return _failure(problem, [event, *done], is_early=True)


def _failure(problem: ApiError, frames: list[bytes], *, is_early: bool, **partial: Any) -> Ending:
    return Ending(
        frames,
        problem.status,
        to_json({"error": {**problem.envelope["error"], **partial}}),
        error_code=problem.code or problem.type,
        is_early=is_early,
        retry_after_s=problem.retry_after_s,
    )


def _problem(error: Exception) -> ApiError:
    """Return what the client is told; what an engine knows as messages came as ``input``."""
    problem = api_error(error)
    if problem.param == "messages":
        problem.param = "input"
    return problem


INPUT_TOKENS = "response.input_tokens"
"""Name of this kind of generation."""


class CountAssembler(WholeAnswerAssembler):
    """Assembles the answer of ``POST /v1/responses/input_tokens``."""

    def __init__(self, _: Assembly) -> None:
        self._count = 0

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta."""
        if isinstance(delta, PromptDelta):
            self._count = len(delta.tokens)
        return ()

    def answer(self) -> dict[str, Any]:
        """Return the count."""
        return {"object": INPUT_TOKENS, "input_tokens": self._count}


COMPACTION = "response.compaction"
"""Name of this kind of generation."""

_HEAD = "Summary of the conversation so far:\n"


@dataclass(frozen=True)
class CompactionAssembly(Assembly):
    """How a compaction is written; ``kept`` are the user's messages, as the API shows them."""

    response_id: str
    created_at: int
    kept: list[dict[str, Any]]
    project_id: int


class CompactionAssembler(WholeAnswerAssembler):
    """Assembles a compaction: the user's messages as they are, and the summary of the rest."""

    def __init__(self, assembly: CompactionAssembly) -> None:
        self._assembly = assembly
        self._text: list[str] = []
        self._usage = Usage()

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta."""
        match delta:
            case TextDelta(text):
                self._text.append(text)
            case Usage():
                self._usage = delta
        return ()

    def answer(self) -> dict[str, Any]:
        """Return the object."""
        sealed = seal(_HEAD + "".join(self._text), self._assembly.project_id)
        compaction = new_item({"type": "compaction", "encrypted_content": sealed})
        return {
            "id": self._assembly.response_id,
            "object": "response.compaction",
            "created_at": self._assembly.created_at,
            "output": [*self._assembly.kept, compaction.wire()],
            "usage": response_usage(self._usage).model_dump(),
        }


def response_usage(usage: Usage) -> ResponseUsage:
    """Return the counts as responses have them: cached ⊂ input, reasoning ⊂ output."""
    return ResponseUsage(
        input_tokens=usage.input_tokens,
        input_tokens_details=InputTokensDetails(
            cached_tokens=usage.cached_tokens, cache_write_tokens=0
        ),
        output_tokens=usage.output_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
        total_tokens=usage.input_tokens + usage.output_tokens,
    )
