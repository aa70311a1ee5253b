"""Assemblers of the three kinds of generations: responses, token counts and compactions.

An assembler folds the deltas of an engine into the frames of the stream and the final object. The
fold is pure: the same deltas give the same events.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any, Literal

from django.conf import settings
from pydantic import TypeAdapter
from pydantic_core import to_json

from inference_site.core.domain.compaction import SUMMARY_HEADING, CompactedContext
from inference_site.core.domain.deltas import (
    CompactionDelta,
    Delta,
    Finish,
    FinishReason,
    ToolCallDelta,
    Usage,
)
from inference_site.core.domain.request import GenerationRequest
from inference_site.core.domain.site_tools import SiteCall, Source, ToolResult
from inference_site.core.errors.api_errors import ApiError
from inference_site.core.storage.cipher import seal
from inference_site.gateway.request_fields.moderation import MODERATION, AnswerModeration
from inference_site.runs.kinds import (
    Assembler,
    PromptCountAssembler,
    WholeAnswerAssembler,
    error_ending,
    error_with_names,
)
from inference_site.runs.queue import new_id
from inference_site.runs.streams.batches import Ending, Sent
from inference_site.runs.streams.request_documents import Assembly
from responses_api import events
from responses_api.client_tools import TOOL_ITEMS
from responses_api.items import SealedContext, new_item, seal_context, unseal_context
from responses_api.output import OutputWriter
from responses_api.site_tools import FirstCall, Route
from responses_api.turns import ResponseTurns, SitePlan
from responses_api.wire.input_items import ItemStatus
from responses_api.wire.objects import (
    Compaction,
    IncompleteDetails,
    InputTokensDetails,
    Moderation,
    OutputItem,
    OutputTokensDetails,
    ResponseObject,
    ResponseUsage,
    changed,
)

RESPONSE, INPUT_TOKENS, COMPACTION = "response", "response.input_tokens", "response.compaction"
"""Names of the kinds of generations."""
_INCOMPLETE_REASONS: dict[FinishReason, Literal["max_output_tokens", "content_filter"]] = {
    "length": "max_output_tokens",
    "content_filter": "content_filter",
}
"""``incomplete_details.reason`` by the finish reason of the model."""
_NOTHING_SENT = Sent()
_ITEMS = TypeAdapter(list[OutputItem])


@dataclass(frozen=True)
class ResponseAssembly(Assembly):
    """The arguments of ``ResponseAssembler``, as the request document holds them.

    ``response`` is the response object as it was accepted. ``emits`` is false when no client can
    read the stream. ``seal_for`` is the project to encrypt the reasoning for, if the request
    includes encrypted reasoning. ``routes`` are the fields of the tools that the names of calls
    lead to; a name without a route is a function. ``first_calls`` are the fields of the calls
    before the first turn, and ``most_calls`` is how many calls of the model are run.
    ``compacts_for`` is the project to seal a compaction for, if the request may be compacted, and
    ``tool_items`` are the items of its context that the seal keeps.
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
        requires_any = self.response["tool_choice"] == "required"
        return SitePlan(tools, calls, self.most_calls, requires_any)

    def seal_compaction(self, context: CompactedContext, output: Sequence[OutputItem]) -> str:
        """Return the content of a compaction's item, which follows this output."""
        assert self.compacts_for is not None
        found = (one for one in output if one.type in TOOL_ITEMS)
        new = [one.model_dump(mode="json", exclude={"id"}) for one in found]
        return seal_context(SealedContext(context, [*self.tool_items, *new]), self.compacts_for)

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
        self._turns = None if plan is None else ResponseTurns(self._routes, plan)
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
        if self._turns is not None and self._saved is not None:
            items = _ITEMS.validate_python(self._saved["items"])
            for item in items[len(output.items) :]:
                frames += self._judged_first(output.add_whole(item))
            sealed = [item.encrypted_content for item in items if isinstance(item, Compaction)]
            compacted = self._assembly.unseal_compaction(sealed[-1]) if sealed else None
            self._turns.restore(self._saved["turns"], compacted)
            self._finish_reason, self._has_turn_ended = "tool_calls", True
            for delta in self._turns.calling_deltas():
                frames += self._judged_first(output.feed(delta))
        elif self._turns is not None and self._plan is not None and self._plan.first_calls:
            for delta in self._turns.first(self._plan.first_calls):
                frames += self.feed(delta)
        return frames

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
        return () if self._turns is None or self._is_cut else self._turns.waiting

    @property
    def _is_last_turn(self) -> bool:
        return self._turns is None or self._is_cut or self._turns.is_last

    @property
    def _is_cut(self) -> bool:
        """Whether the turn has ended before the model was done."""
        return self._finish_reason in _INCOMPLETE_REASONS

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
            if moderation.withholds():
                return ()
            frames, self._unjudged = self._unjudged, []
            return frames
        assert self._turns is not None
        self._turns.add_result(result)
        return self._judged_first(self._output.end_call(result))

    def _judged_first(self, frames: Sequence[bytes]) -> Sequence[bytes]:
        """Return the frames that may be sent now; the others wait until the output was judged."""
        if self._moderation is None or not self._moderation.withholds():
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
        if self._turns is None or self._is_last_turn:
            return None
        following = self._turns.next_request(request)
        if following is None:
            self._finish_reason = "length"
        self._has_turn_ended = following is None
        return following

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta; return its events, encoded."""
        if isinstance(delta, Finish):
            self._finish_reason, self._has_turn_ended = delta.reason, True
        elif isinstance(delta, Usage):
            self._usage = delta
        elif isinstance(delta, CompactionDelta):
            if self._turns is not None:
                self._turns.compact(delta.context)
            ended = self._output.end_item("completed")
            sealed = self._assembly.seal_compaction(delta.context, self._output.items)
            item = Compaction(id=new_id("cmp_"), encrypted_content=sealed)
            return self._judged_first([*ended, *self._output.add_whole(item)])
        if self._turns is not None:
            self._turns.take(delta)
            if isinstance(delta, ToolCallDelta) and self._turns.ignores:
                return ()
        frames = self._judged_first(self._output.feed(delta))
        if isinstance(delta, Finish) and self._is_cut:
            self._output.cut()
        return frames

    def complete(self) -> Ending:
        """End the response as completed, or as incomplete after the token limit or a filter."""
        is_blocked = self._moderation is not None and self._moderation.is_blocked
        opened = self._output.begin_message() if self._output.is_empty and not is_blocked else ()
        reason = _INCOMPLETE_REASONS.get(self._finish_reason)
        if reason is None:
            # The clock of the web process, which wrote ``created_at``, may be ahead.
            completed_at = max(self.response.created_at, int(time.time()))
            frames = self._end("completed", "completed", completed_at=completed_at)
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
            if moderation.withholds():
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
    frames = [events.encode(events.error_event(client_error.envelope["error"], count(first)))]
    if settings.RESPONSES_SEND_DONE:
        frames.append(events.DONE)
    return _failed_ending(client_error, frames, is_early=True)


def _failed_ending(
    error: ApiError, frames: list[bytes], *, is_early: bool, **partial: Any
) -> Ending:
    body = to_json({"error": {**error.envelope["error"], **partial}})
    return error_ending(error, body, frames, is_early=is_early)


_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
"""Fields by the names of chats, which engines know, and their names here."""


def _client_error(error: Exception) -> ApiError:
    """Return the API error, with the names that the fields have in requests for responses."""
    return error_with_names(error, "input", _NAMES)


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
            "object": COMPACTION,
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
