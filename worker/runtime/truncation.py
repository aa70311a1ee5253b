"""Truncation: a conversation that exceeds the context loses its oldest turns.

The number of tokens of a prompt is known only after the engine has refused it. So the turns to drop
are estimated from the lengths of their texts, and the engine is asked again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from inference_site.core.domain.errors import ContextLengthExceeded
from inference_site.core.domain.messages import Message, TextPart, drop_oldest_turns
from inference_site.core.domain.request import GenerationRequest
from worker.engines.base import Engine, Sink

_MEDIA_CHARACTERS = 2_000
"""Counted for an image or a sound: it has about as many tokens as a text of this length."""


def start_truncating(
    engine: Engine,
    request: GenerationRequest,
    sink: Sink,
    ended: Callable[[Exception | None], None],
) -> bool:
    """Start the request like ``Engine.start``, without its oldest turns if it must be truncated.

    Nothing is started once the sink is cancelled. Raise, or end with, ContextLengthExceeded when
    even the last turn does not fit or the request does not allow truncation.
    """

    def start(request: GenerationRequest) -> bool:
        while not sink.cancelled:
            try:
                return engine.start(request, sink, partial(on_end, request))
            except ContextLengthExceeded as exc:
                request = _truncated(request, exc)
        return False

    def on_end(request: GenerationRequest, error: Exception | None) -> None:
        if not isinstance(error, ContextLengthExceeded):
            ended(error)
            return
        try:
            is_over = not start(_truncated(request, error))
        except Exception as exc:  # noqa: BLE001  # The caller of ``start`` has returned.
            ended(exc)
        else:
            if is_over:
                ended(None)

    return start(request)


def _truncated(request: GenerationRequest, refused: ContextLengthExceeded) -> GenerationRequest:
    """Return the request without at least one of its oldest turns.

    Raise ``refused`` if none may be dropped.
    """
    if not request.truncate:
        raise refused
    context = refused.context_length
    answer = min(request.max_output_tokens or context // 4, context // 2)
    lengths = [length_of(message) for message in request.messages]
    excess = sum(lengths) * (1 - (context - answer) / refused.input_tokens)
    messages = drop_oldest_turns(request.messages, lengths, excess)
    if len(messages) == len(request.messages):
        raise refused
    return replace(request, messages=messages)


def length_of(message: Message) -> int:
    """Return about how many characters the message has in the prompt."""
    media = (
        len(part.text) if isinstance(part, TextPart) else _MEDIA_CHARACTERS
        for part in message.parts
    )
    calls = (len(call.name) + len(call.arguments) for call in message.tool_calls)
    return 16 + len(message.text or "") + sum(media) + sum(calls)
