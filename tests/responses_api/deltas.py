"""Deltas of an engine, and their streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from inference_site.core.domain.deltas import Delta, TokenLogprob, ToolCallDelta
from inference_site.runs.streams.batches import Ending, Sent
from responses_api import stored_responses
from responses_api.assembler import ResponseAssembler, ResponseAssembly
from responses_api.events import DONE, decode
from responses_api.wire.requests import ResponseRequest
from tests.responses_api.validation import StreamCheck

RESPONSE_ID = "resp_" + "0" * 32


def new_response(**fields: Any) -> dict[str, Any]:
    """The object of an accepted response."""
    body = ResponseRequest.model_validate({"input": "x", **fields})
    response = stored_responses.new_response(
        body,
        response_id=RESPONSE_ID,
        created_at=1_700_000_000,
        model="m",
        previous_response_id=None,
        conversation_id=None,
        metadata={},
    )
    return response.model_dump()


def new_assembler(
    response: dict[str, Any] | None = None,
    of: type[ResponseAssembly] = ResponseAssembly,
    **options: Any,
) -> ResponseAssembler:
    """The assembler of an accepted response, with these fields of its assembly."""
    return ResponseAssembler(of(response or new_response(), **options))


def begun(assembler: ResponseAssembler, deltas: Iterable[Delta]) -> list[bytes]:
    """The frames of a stream before its end."""
    frames = list(assembler.begin())
    for delta in deltas:
        frames += assembler.feed(delta)
    return frames


def whole(
    deltas: Iterable[Delta],
    error: Exception | None = None,
    response: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[bytes], Ending]:
    """The frames and the ending of a stream, which fails with ``error`` if given."""
    assembler = new_assembler(response, **options)
    frames = begun(assembler, deltas)
    ending = assembler.complete() if error is None else assembler.fail(error)
    return [*frames, *ending.frames], ending


def read(frames: Sequence[bytes]) -> list[dict[str, Any]]:
    """The events of a whole stream, checked against the schemas."""
    check = StreamCheck()
    events = [decode(frame) for frame in frames if frame != DONE]
    for event in events:
        check.take(event)
    check.end()
    return events


def final(frames: Sequence[bytes]) -> dict[str, Any]:
    """The response object in the last event of a stream."""
    response: dict[str, Any] = read(frames)[-1]["response"]
    return response


def call(number: int, name: str, *arguments: str, is_custom: bool = False) -> list[Delta]:
    """The deltas of one call."""
    first = ToolCallDelta(number, "", id=f"call_{number}", name=name, is_custom=is_custom)
    pieces = (ToolCallDelta(number, piece, is_custom=is_custom) for piece in arguments)
    return [first, *pieces]


def logprob(token: str, value: float = -0.5, *others: str) -> TokenLogprob:
    """A token and its likeliest alternatives."""
    top = tuple(TokenLogprob(text, value - i, text.encode()) for i, text in enumerate(others))
    return TokenLogprob(token, value, token.encode(), top)


def sent(frames: Sequence[bytes]) -> Sent:
    """What a stream has sent, if its log has these frames."""
    return Sent(frames, len(frames))
