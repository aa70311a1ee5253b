"""Truncation: an old conversation loses its oldest turns rather than its answer.

How many tokens a prompt has is known only once an engine has refused it, so the turns to drop are
estimated from the length of their texts, and the engine is asked again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from inference_site.domain.errors import ContextLengthExceeded
from inference_site.domain.messages import Message, TextPart, drop_oldest_turns
from inference_site.domain.request import GenerationRequest
from worker.engines.base import Engine, Sink

_MEDIA_CHARACTERS = 2_000
"""What an image or a sound counts for: about as many tokens as a text of this length."""


def start_truncating(
    engine: Engine,
    request: GenerationRequest,
    sink: Sink,
    ended: Callable[[Exception | None], None],
) -> bool:
    """Start the request; when its turns do not fit and it allows it, without the oldest of them.

    Nothing is begun once the sink is cancelled. Raise, or end with, ContextLengthExceeded when even
    the last turn does not fit. Otherwise like ``Engine.start``.
    """

    def start(request: GenerationRequest) -> bool:
        while not sink.cancelled:
            try:
                return engine.start(request, sink, partial(on_end, request))
            except ContextLengthExceeded as exc:
                request = _fitting(request, exc)
        return False

    def on_end(request: GenerationRequest, error: Exception | None) -> None:
        if not isinstance(error, ContextLengthExceeded):
            ended(error)
            return
        try:
            is_over = not start(_fitting(request, error))
        except Exception as exc:  # noqa: BLE001  # The caller of ``start`` has gone.
            ended(exc)
        else:
            if is_over:
                ended(None)

    return start(request)


def _fitting(request: GenerationRequest, refused: ContextLengthExceeded) -> GenerationRequest:
    """Return the request without its oldest turns. Raise what refused it if none may go."""
    messages = _shorter(request, refused) if request.truncate else request.messages
    if len(messages) == len(request.messages):
        raise refused
    return replace(request, messages=messages)


def _shorter(request: GenerationRequest, refused: ContextLengthExceeded) -> tuple[Message, ...]:
    """Return the messages without as many of the oldest turns as are too many, at least one."""
    context = refused.context_length
    answer = min(request.max_output_tokens or context // 4, context // 2)
    lengths = [_length(message) for message in request.messages]
    too_many = sum(lengths) * (1 - (context - answer) / refused.input_tokens)
    return drop_oldest_turns(request.messages, lengths, too_many)


def _length(message: Message) -> int:
    """Return about how many characters the message has in the prompt."""
    media = (
        len(part.text) if isinstance(part, TextPart) else _MEDIA_CHARACTERS
        for part in message.parts
    )
    calls = (len(call.name) + len(call.arguments) for call in message.tool_calls)
    return 16 + len(message.text or "") + sum(media) + sum(calls)
