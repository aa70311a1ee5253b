"""The events of a response's stream: their frames, and the events of the response and its items.

The number of an event is the number of its frame in the event log. So a client that continues after
an event (``starting_after``) is served from the log without decoding it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice, zip_longest
from typing import Any, Final, Literal

import orjson
from pydantic import TypeAdapter
from pydantic_core import to_json

from inference_site.gateway.api.schema import ErrorDetail, LostErrorDetail
from responses_api.wire import objects as wire
from responses_api.wire.input_items import ItemStatus
from responses_api.wire.objects import (
    ApplyPatchCall,
    Call,
    Compaction,
    CustomToolCall,
    ErrorEvent,
    Event,
    FileSearchCall,
    FunctionCall,
    HostedToolSearchCall,
    LogprobEntry,
    McpApprovalRequest,
    McpCall,
    McpListTools,
    Message,
    NamedCall,
    OutputItem,
    OutputText,
    ReasoningItem,
    Refusal,
    RefusalMessage,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponseStateEvent,
    ShellCall,
    SiteCallItem,
    StateEventType,
    TextPart,
    ToolSearchOutput,
    WebSearchCall,
    changed,
)

DONE = b"data: [DONE]\n\n"
ACCEPTED_EVENTS = 2
"""The number of opening events that are sent when a response is accepted."""
IN_PROGRESS: Final = "response.in_progress"
"""Starts an attempt: items that the stream has before it are not part of the output."""
_ERROR_CODES = frozenset(
    {
        *("server_error", "rate_limit_exceeded", "invalid_prompt", "data_residency_mismatch"),
        *("bio_policy", "vector_store_timeout", "invalid_image", "invalid_image_format"),
        *("invalid_base64_image", "invalid_image_url", "image_too_large", "image_too_small"),
        *("image_parse_error", "image_content_policy_violation", "invalid_image_mode"),
        *("image_file_too_large", "unsupported_image_media_type", "empty_image_file"),
        *("failed_to_download_image", "image_file_not_found"),
        # Not in OpenAI's document, but sent by its servers; Codex does not try again then.
        "context_length_exceeded",
    }
)
"""The codes that ``error`` of a response may have."""
_CODES_OF_TYPES = {
    "invalid_request_error": "invalid_prompt",
    "requests": "rate_limit_exceeded",
    "insufficient_quota": "rate_limit_exceeded",
}
"""By the type of an error whose code is none of ``_ERROR_CODES``: the code that the response shows.
For other types it is ``server_error``."""
_DATA = b"\ndata: "
_EVENT: TypeAdapter[ResponseEvent] = TypeAdapter(ResponseEvent)
_LAST_EVENTS: dict[str, StateEventType] = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
}
_EMPTY_PARTS: dict[str, OutputText | TextPart] = {
    "message": OutputText(text="", annotations=[], logprobs=[]),
    "reasoning": TextPart(type="reasoning_text", text=""),
}
_STATES = frozenset({"web_search_call", "file_search_call", "mcp_call", "mcp_list_tools"})
"""Items with events of their state."""

_PARAGRAPHS = re.compile(r"\n[ \t]*\n")
_SENTENCE = re.compile(r".+?(?:[.!?](?=\s)|$)", re.DOTALL)

Logprobs = Sequence[LogprobEntry]


def encode(event: Event) -> bytes:
    """Return the frame of an event."""
    return b"event: %b\ndata: %b\n\n" % (event.type.encode(), to_json(event))


def events_of(frames: Sequence[bytes]) -> Iterator[ResponseEvent]:
    """Yield the events of frames."""
    return (_EVENT.validate_json(payload(frame)) for frame in frames if frame != DONE)


def decode(frame: bytes) -> dict[str, Any]:
    """Return the JSON object of a frame; an empty one for ``[DONE]``."""
    event: dict[str, Any] = {} if frame == DONE else orjson.loads(payload(frame))
    return event


def payload(frame: bytes) -> bytes:
    """Return the JSON text of a frame."""
    return frame[frame.index(_DATA) + len(_DATA) :].rstrip()


def state_event(
    type_: StateEventType, response: ResponseObject, numbers: Iterator[int]
) -> ResponseStateEvent:
    """Return an event that contains the response object."""
    return ResponseStateEvent(type=type_, sequence_number=next(numbers), response=response)


def opening_events(
    response: ResponseObject, numbers: Iterator[int], skip: int = 0
) -> Iterator[ResponseStateEvent]:
    """Yield the first events of a stream but for the first ``skip``, which were sent before.

    ``response`` is in progress. The events of a background response show it as queued first.
    """
    states: list[tuple[StateEventType, ResponseObject]] = [("response.created", response)]
    if response.background:
        queued = changed(response, status="queued")
        states = [("response.created", queued), ("response.queued", queued)]
    for type_, shown in [*states, (IN_PROGRESS, response)][skip:]:
        yield state_event(type_, shown, numbers)


def accepted_frames(response: dict[str, Any]) -> Sequence[bytes]:
    """Return the frames to send when a response is accepted."""
    opening = opening_events(ResponseObject.model_validate(response), count())
    return [encode(event) for event in islice(opening, ACCEPTED_EVENTS)]


def terminal_event(response: ResponseObject, numbers: Iterator[int]) -> ResponseStateEvent:
    """Return the last event of a response; ``response.failed`` also for a cancelled one."""
    return state_event(_LAST_EVENTS.get(response.status, "response.failed"), response, numbers)


def error_event(error: dict[str, Any], numbers: Iterator[int]) -> ErrorEvent:
    """Return the event of an error, given as in the body of an error response."""
    return ErrorEvent(
        sequence_number=next(numbers),
        code=error["code"] or error["type"],
        message=error["message"],
        param=error["param"],
        error=LostErrorDetail(**error) if "usage" in error else ErrorDetail(**error),
    )


def response_error(error: Mapping[str, Any]) -> ResponseError:
    """Return ``error`` of a response, from that of an error body: its code is one of OpenAI's."""
    code = error["code"]
    if code not in _ERROR_CODES:
        code = _CODES_OF_TYPES.get(error["type"], "server_error")
    return ResponseError(code=code, message=error["message"])


def as_refusal(item: OutputItem) -> OutputItem:
    """Return a message, which has no content yet, as one that is a refusal."""
    return RefusalMessage(**dict(item)) if isinstance(item, Message) else item


def summary_of(text: str, kind: str) -> list[TextPart]:
    """Return the summary of reasoning, which is made without the model.

    A ``concise`` one is the first sentence of each paragraph; other summaries are the whole text.
    """
    if kind == "concise":
        paragraphs = (part.strip() for part in _PARAGRAPHS.split(text))
        firsts = (_SENTENCE.match(part) for part in paragraphs)
        text = " ".join(first[0] for first in firsts if first is not None)
    return [TextPart(type="summary_text", text=text.strip())] if text.strip() else []


def with_text(item: OutputItem, text: str, logprobs: Logprobs, status: ItemStatus) -> OutputItem:
    """Return the item with this text; a function call without arguments gets ``{}``.

    A call whose fields are no text keeps them. A call that the site runs has no result yet.
    """
    match item:
        case RefusalMessage():
            return changed(item, status=status, content=[Refusal(refusal=text)] if text else [])
        case Message():
            part = OutputText(text=text, annotations=[], logprobs=list(logprobs))
            return changed(item, status=status, content=[part])
        case ReasoningItem():
            reasoning = TextPart(type="reasoning_text", text=text)
            return changed(item, status=status, content=[reasoning])
        case FunctionCall():
            return changed(item, status=status, arguments=text or "{}")
        case CustomToolCall():
            return changed(item, status=status, input=text)
        case Compaction():
            return item
        case ApplyPatchCall():
            return changed(item, status="completed" if status == "completed" else "in_progress")
        case McpCall():
            state = status if status == "in_progress" else "incomplete"
            return changed(item, arguments=text or "{}", status=state)
        case McpApprovalRequest():
            return changed(item, arguments=text or "{}")
        case WebSearchCall() | FileSearchCall():
            return changed(item, status=status if status == "in_progress" else "failed")
        case McpListTools():
            error = (
                None
                if status == "in_progress"
                else "The response ended before the tools were listed."
            )
            return changed(item, error=error)
        case _:
            return changed(item, status=status)


_UNKNOWN_ACTIONS: dict[str, dict[str, Any]] = {
    "search": {"type": "search", "query": "", "queries": []},
    "open_page": {"type": "open_page", "url": None},
    "find_in_page": {"type": "find_in_page", "url": "", "pattern": ""},
}
"""Actions of searches whose arguments are not known yet."""


def _announced(item: OutputItem) -> OutputItem:
    """Return the item without its text, as ``response.output_item.added`` shows it.

    A call whose fields have no delta events is shown with all of them.
    """
    match item:
        case Message(content=[Refusal()]):
            return as_refusal(changed(item, status="in_progress", content=[]))
        case Message():
            return changed(item, status="in_progress", content=[])
        case ReasoningItem():
            empty: dict[str, Any] = {"summary": [], "content": [], "encrypted_content": None}
            return changed(item, status="in_progress", **empty)
        case Compaction():
            return changed(item, encrypted_content="")
        case FunctionCall():
            return changed(item, status="in_progress", arguments="")
        case CustomToolCall():
            return changed(item, status="in_progress", input="")
        case ShellCall(action=action):
            return changed(item, status="in_progress", action=changed(action, commands=[]))
        case WebSearchCall(action=action):
            unknown = _UNKNOWN_ACTIONS[action["type"]]
            return changed(item, status="in_progress", action=unknown)
        case FileSearchCall():
            return changed(item, status="in_progress", queries=[], results=None)
        case HostedToolSearchCall():
            return changed(item, status="in_progress", arguments={})
        case ToolSearchOutput():
            return changed(item, status="in_progress", tools=[])
        case McpCall():
            return changed(item, status="in_progress", arguments="", output=None, error=None)
        case McpListTools():
            return changed(item, tools=[], error=None)
        case SiteCallItem():
            return item
        case _:
            return changed(item, status="in_progress")


def _text(item: OutputItem) -> tuple[str, Logprobs]:
    match item:
        case Message(content=[OutputText(text=text, logprobs=logprobs)]):
            return text, logprobs
        case Message(content=[Refusal(refusal=text)]):
            return text, ()
        case Message(content=[]):
            return "", ()
        case ReasoningItem(content=[TextPart(text=text)]):
            return text, ()
        case FunctionCall(arguments=text) | CustomToolCall(input=text) | McpCall(arguments=text):
            return text, ()
        case Call() | Compaction() | SiteCallItem():
            return "", ()
    raise ValueError(f"The item {item.id} has other parts than a model's output.")


class ItemEvents:
    """Makes the events of one output item.

    item added → part added → deltas → annotations → text done → part done → item done

    A call and a compaction have no part. The summary of reasoning comes after its part, when it has
    ended. A call of a function or a custom tool always has at least one delta, because
    clients expect one also of a call without arguments. The commands of a shell call have their own
    events. An interrupted item ends in the same way, with the status ``incomplete``.

    A call that the site runs: item added → in progress → deltas of the arguments → called →
    completed or failed → item done. ``called`` is sent when the arguments are whole.
    """

    def __init__(self, item_id: str, output_index: int, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._item_fields: dict[str, Any] = {"item_id": item_id, "output_index": output_index}
        self._part_fields = {**self._item_fields, "content_index": 0}

    def whole(
        self, item: OutputItem, sizes: Sequence[int] | None = None, counts: Sequence[int] = ()
    ) -> Iterator[Event]:
        """Yield all events of an ended item.

        ``sizes`` are the characters of each delta, ``counts`` its numbers of log probabilities.
        Without ``sizes``, or if they do not add up to the text, there is one delta.
        """
        yield from self.opening(_announced(item))
        text, logprobs = _text(item)
        if sizes is None or (sum(sizes) != len(text) and sizes):
            sizes, counts = [len(text)] if text else [], [len(logprobs)]
        start = first = 0
        for size, entries in zip_longest(sizes, counts[: len(sizes)], fillvalue=0):
            piece = text[start : start + size]
            yield self.delta(item, piece, logprobs[first : first + entries])
            start, first = start + size, first + entries
        if isinstance(item, SiteCallItem):
            yield from self.called(item)
        yield from self.closing(item, has_delta=bool(sizes))

    def opening(self, item: OutputItem) -> Iterator[Event]:
        """Yield the events that announce an item, which has no text yet."""
        yield self._item_event("response.output_item.added", item)
        if isinstance(item, SiteCallItem):
            if item.type in _STATES:
                yield self._state(item, "in_progress")
        elif isinstance(item, RefusalMessage):
            yield self._part_event("response.content_part.added", Refusal(refusal=""))
        elif not isinstance(item, Call | Compaction):
            yield self._part_event("response.content_part.added", _EMPTY_PARTS[item.type])

    def delta(self, item: OutputItem, text: str, logprobs: Logprobs = ()) -> wire.DeltaEvent:
        """Return the event of a piece of the item's text."""
        match item:
            case RefusalMessage() | Message(content=[Refusal()]):
                return wire.RefusalDelta(**self._in_part(), delta=text)
            case Message():
                entries = list(logprobs)
                return wire.OutputTextDelta(**self._in_part(), delta=text, logprobs=entries)
            case ReasoningItem():
                return wire.ReasoningTextDelta(**self._in_part(), delta=text)
            case FunctionCall():
                return wire.FunctionCallArgumentsDelta(**self._in_item(), delta=text)
            case CustomToolCall():
                return wire.CustomToolCallInputDelta(**self._in_item(), delta=text)
            case McpCall():
                return wire.McpCallArgumentsDelta(**self._in_item(), delta=text)
            case _:
                raise TypeError(f"A {item.type} has no deltas.")

    def called(self, item: OutputItem) -> Iterator[Event]:
        """Yield the events of a call that the site runs when its arguments are whole."""
        match item:
            case McpCall(arguments=text):
                yield wire.McpCallArgumentsDone(**self._in_item(), arguments=text)
            case WebSearchCall() | FileSearchCall():
                yield self._state(item, "searching")

    def closing(self, item: OutputItem, *, has_delta: bool) -> Iterator[Event]:
        """Yield the events that end an item, which has all of its text."""
        text, logprobs = _text(item)
        if isinstance(item, NamedCall) and not has_delta:
            yield self.delta(item, text)
        match item:
            case Message(content=[OutputText() as part]):
                for index, annotation in enumerate(part.annotations):
                    yield wire.AnnotationAdded(
                        **self._in_part(), annotation_index=index, annotation=annotation
                    )
                yield wire.OutputTextDone(**self._in_part(), text=text, logprobs=list(logprobs))
                yield self._part_event("response.content_part.done", part)
            case Message(content=[Refusal() as part]):
                yield wire.RefusalDone(**self._in_part(), refusal=text)
                yield self._part_event("response.content_part.done", part)
            case ReasoningItem(content=[TextPart() as part]):
                yield wire.ReasoningTextDone(**self._in_part(), text=text)
                yield self._part_event("response.content_part.done", part)
                yield from self._summary(item)
            case FunctionCall(name=name):
                fields = self._in_item()
                yield wire.FunctionCallArgumentsDone(**fields, arguments=text, name=name)
            case CustomToolCall():
                yield wire.CustomToolCallInputDone(**self._in_item(), input=text)
            case ShellCall(action=action):
                yield from self._commands(action.commands)
            case McpCall(status=("completed" | "failed") as status):
                yield self._state(item, status)
            case McpListTools(error=error):
                yield self._state(item, "completed" if error is None else "failed")
            case WebSearchCall(status="completed") | FileSearchCall(status="completed"):
                yield self._state(item, "completed")
        yield self._item_event("response.output_item.done", item)

    def _summary(self, item: ReasoningItem) -> Iterator[Event]:
        for index, part in enumerate(item.summary):
            place = {**self._item_fields, "summary_index": index}
            empty = changed(part, text="")
            yield wire.SummaryPartEvent(
                type="response.reasoning_summary_part.added",
                sequence_number=next(self._numbers),
                **place,
                part=empty,
            )
            yield wire.SummaryTextDelta(
                sequence_number=next(self._numbers), **place, delta=part.text
            )
            yield wire.SummaryTextDone(sequence_number=next(self._numbers), **place, text=part.text)
            yield wire.SummaryPartEvent(
                type="response.reasoning_summary_part.done",
                sequence_number=next(self._numbers),
                **place,
                part=part,
                status="incomplete" if item.status == "incomplete" else None,
            )

    def _commands(self, commands: Sequence[str]) -> Iterator[Event]:
        for index, command in enumerate(commands):
            place = {
                "output_index": self._item_fields["output_index"],
                "command_index": index,
            }
            yield wire.ShellCommandAdded(sequence_number=next(self._numbers), **place, command="")
            yield wire.ShellCommandDelta(
                sequence_number=next(self._numbers), **place, delta=command
            )
            yield wire.ShellCommandDone(
                sequence_number=next(self._numbers), **place, command=command
            )

    def _state(self, item: SiteCallItem, state: str) -> wire.SiteCallEvent:
        type_: Any = f"response.{item.type}.{state}"
        return wire.SiteCallEvent(type=type_, **self._in_item())

    def _item_event(
        self,
        type_: Literal["response.output_item.added", "response.output_item.done"],
        item: OutputItem,
    ) -> Event:
        number, index = next(self._numbers), self._item_fields["output_index"]
        return wire.OutputItemEvent(
            type=type_, sequence_number=number, output_index=index, item=item
        )

    def _part_event(
        self,
        type_: Literal["response.content_part.added", "response.content_part.done"],
        part: OutputText | Refusal | TextPart,
    ) -> Event:
        return wire.ContentPartEvent(type=type_, **self._in_part(), part=part)

    def _in_item(self) -> dict[str, Any]:
        return {"sequence_number": next(self._numbers), **self._item_fields}

    def _in_part(self) -> dict[str, Any]:
        return {"sequence_number": next(self._numbers), **self._part_fields}
