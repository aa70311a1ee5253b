"""Deltas → the events and the final object of a response (see ``generations.kinds``).

A pure fold: the same deltas give the same events, whoever reads them and however often.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from django.conf import settings

from inference_site.domain.deltas import (
    Delta,
    Finish,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from inference_site.errors.api_errors import ApiError
from inference_site.errors.exceptions import api_error
from inference_site.generations.kinds import Assembler
from inference_site.streams.ending import Ending
from responses_api.events import ACCEPTED, DONE, IN_PROGRESS, Event, encode, error_event, opening
from responses_api.objects import wire_usage
from responses_api.output import (
    AnyItem,
    CallItem,
    ItemStatus,
    MessageItem,
    ReasoningItem,
    delta_start,
    wire_logprobs,
)
from responses_api.transcript import Transcript

RESPONSE = "response"
"""Name of this kind of generation."""


class ResponseAssembler(Assembler):
    """Assembles one response.

    ``response`` is the object, before anything ran and in the end; ``error`` is what a client is
    told of a failure. ``emits`` is false when nobody will ever read events of it; ``seal_for`` is
    the project that reasoning is sealed for, if that was asked for.
    """

    def __init__(
        self,
        response: dict[str, Any],
        emits: bool = True,
        sends_done: bool = True,
        seal_for: int | None = None,
    ) -> None:
        self.response = {**response, "status": "in_progress"}
        self.error: dict[str, Any] | None = None
        self._emits, self._sends_done, self._seal_for = emits, sends_done, seal_for
        self._number = 0
        self._next_index = 0
        self._output: list[dict[str, Any]] = []
        self._open: AnyItem | None = None
        self._head = b""
        self._finish: FinishReason = "stop"
        self._usage = Usage()

    def restart(self, frames: Sequence[bytes]) -> Sequence[bytes]:
        """Go on after these frames, from the beginning of the answer.

        The item that an earlier attempt left open is ended, and none of its items is part of the
        output; their places in it stay theirs. Readers are told by one more ``in_progress``.
        """
        sent = Transcript(frames)
        self._number, self._next_index = len(frames), sent.next_index
        self._open = sent.open_item
        closing = self._closed("incomplete")
        self._output = []
        if self._number <= ACCEPTED:  # No attempt has sent anything yet.
            return closing
        return [*closing, *self._encoded([(IN_PROGRESS, {"response": self.response})])]

    def recover(self, frames: Sequence[bytes]) -> None:
        """Go on after these frames, in order to end what the worker that sent them did not."""
        sent = Transcript(frames)
        self._number, self._next_index = len(frames), sent.next_index
        self._open, self._output = sent.open_item, sent.output

    def begin(self) -> Sequence[bytes]:
        """Return what the opening of the stream still lacks."""
        if not self._emits:
            return ()
        frames = opening(self.response, self._number)
        self._number += len(frames)
        return frames

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta; return the events it makes."""
        match delta:
            case TextDelta(text):
                opened = () if isinstance(self._open, MessageItem) else self._opened(MessageItem)
                assert isinstance(self._open, MessageItem)
                if delta.logprobs:
                    told = wire_logprobs(delta.logprobs)
                    self._open.logprobs += told
                    return (*opened, *self._piece(self._open, text, _tail(told)))
                return (*opened, *self._piece(self._open, text, self._open.tail))
            case ReasoningDelta(text):
                opened = () if isinstance(self._open, ReasoningItem) else self._think()
                assert self._open is not None
                return (*opened, *self._piece(self._open, text, self._open.tail))
            case ToolCallDelta():
                return self._call(delta)
            case Finish(reason):
                self._finish = reason
            case Usage():
                self._usage = delta
        return ()

    def complete(self) -> Ending:
        """End at the model's end, or at the token limit."""
        is_cut = self._finish == "length"
        frames: list[bytes] = []
        if self._open is None and not self._output:
            frames += self._opened(MessageItem)
        frames += self._closed("incomplete" if is_cut else "completed")
        if is_cut:
            details = {"reason": "max_output_tokens"}
            last = self._settle("incomplete", incomplete_details=details)
        else:
            last = self._settle("completed", completed_at=int(time.time()))
        return self._ending([*frames, *last], self._finish)

    def cancel(self) -> Ending:
        """End because the client or an operator stopped it."""
        frames = [*self._closed("incomplete"), *self._settle("cancelled")]
        return self._ending(frames, "")

    def fail(self, error: Exception) -> Ending:
        """End because of this error; what was made until then is kept."""
        told = _told(error)
        is_early = self._open is None and not self._output
        self.error = told.envelope["error"]
        frames = [*self._closed("incomplete"), *self._encoded([error_event(self.error)])]
        code = told.code or told.type
        frames += self._settle("failed", error={"code": code, "message": told.message})
        return Ending(
            [*frames, *self._done_frames()],
            told.status,
            self._error_body(told, is_early),
            error_code=code,
            is_early=is_early,
            retry_after_s=told.retry_after_s,
        )

    def _opened(self, kind: type[MessageItem]) -> list[bytes]:
        return self._open_item(kind(self._next_index))

    def _think(self) -> list[bytes]:
        return self._open_item(ReasoningItem(self._next_index, self._seal_for))

    def _call(self, delta: ToolCallDelta) -> Sequence[bytes]:
        opened: list[bytes] = []
        if delta.id is not None and delta.name is not None:
            call = CallItem(self._next_index, delta.id, delta.name, delta.is_custom)
            opened = self._open_item(call)
        if not delta.arguments or not isinstance(self._open, CallItem):
            return opened
        return (*opened, *self._piece(self._open, delta.arguments, self._open.tail))

    def _open_item(self, item: AnyItem) -> list[bytes]:
        frames = self._closed("completed")
        self._open = item
        self._next_index += 1
        self._head = delta_start(item)
        return [*frames, *self._encoded(item.opening())]

    def _closed(self, status: ItemStatus) -> list[bytes]:
        item, self._open = self._open, None
        if item is None:
            return []
        frames = self._encoded(item.closing(status))
        self._output.append(item.wire(status))
        return frames

    def _piece(self, item: AnyItem, text: str, tail: bytes) -> Sequence[bytes]:
        item.pieces.append(text)
        if not self._emits:
            return ()
        number, self._number = self._number, self._number + 1
        kind = item.delta_type
        return (
            b'event: %b\ndata: {"type":"%b","sequence_number":%d%b%b%b'
            % (kind, kind, number, self._head, orjson.dumps(text), tail),
        )

    def _encoded(self, events: Iterable[Event]) -> list[bytes]:
        if not self._emits:
            return []
        frames = []
        for type_, fields in events:
            frames.append(encode(type_, self._number, fields))
            self._number += 1
        return frames

    def _settle(self, status: str, **changed: Any) -> list[bytes]:
        """Fix the object; return its terminal event."""
        usage = wire_usage(self._usage)
        self.response |= {"status": status, "output": self._output, "usage": usage, **changed}
        name = status if status in ("completed", "incomplete") else "failed"
        return self._encoded([(f"response.{name}", {"response": self.response})])

    def _ending(self, frames: Sequence[bytes], finish_reason: str) -> Ending:
        body = orjson.dumps(self.response)
        return Ending([*frames, *self._done_frames()], 200, body, finish_reason=finish_reason)

    def _done_frames(self) -> list[bytes]:
        return [DONE] if self._sends_done else []

    def _error_body(self, told: ApiError, is_early: bool) -> bytes:
        envelope = told.envelope
        if not is_early:
            envelope["error"]["partial_response"] = self.response
        return orjson.dumps(envelope)


def failure(error: Exception, *, first: int = 0) -> Ending:
    """End a response of which nothing else is known with the event of an error, of this number."""
    told = _told(error)
    envelope = told.envelope
    type_, fields = error_event(envelope["error"])
    done = [DONE] if settings.RESPONSES_SEND_DONE else []
    return Ending(
        [encode(type_, first, fields), *done],
        told.status,
        orjson.dumps(envelope),
        error_code=told.code or told.type,
        is_early=True,
        retry_after_s=told.retry_after_s,
    )


def _tail(logprobs: list[dict[str, Any]]) -> bytes:
    return b',"logprobs":' + orjson.dumps(logprobs) + b"}\n\n"


def _told(error: Exception) -> ApiError:
    """Return what the client is told; what an engine knows as messages came as ``input``."""
    told = api_error(error)
    if told.param == "messages":
        told.param = "input"
    return told
