"""Deltas → the events and the final object of a response (see ``generations.kinds``).

A pure fold: the same deltas give the same events, whoever reads them and however often.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, Literal

from django.conf import settings
from pydantic_core import to_json

from inference_site.domain.deltas import Delta, Finish, FinishReason, Usage
from inference_site.errors.api_errors import ApiError
from inference_site.errors.exceptions import api_error
from inference_site.generations.kinds import Assembler
from inference_site.streams.batches import Ending, Sent
from inference_site.streams.request_documents import Assembly
from responses_api.output import events
from responses_api.output.live_output import LiveOutput
from responses_api.output.objects import response_usage
from responses_api.wire.events import ResponseStateEvent
from responses_api.wire.items import ItemStatus
from responses_api.wire.output import changed
from responses_api.wire.response import IncompleteDetails, ResponseError, ResponseObject

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
