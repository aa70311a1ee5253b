"""Texts and conversations that are too long for the context: refused early, or truncated.

A library tokenizes a text in one call that cannot be cancelled, and that may take the square of the
text's length: llama.cpp's SentencePiece tokenizer copies all previous tokens for each character
that its vocabulary lacks. So the text is tokenized in pieces first; a cut splits a few tokens only.

Truncation drops the oldest turns of a conversation. The number of tokens of a prompt is known only
after the engine has refused it. So the turns to drop are estimated from the lengths of their texts,
and the engine is asked again. A limit of the answer that is too high is lowered in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from inference_site.core.domain.errors import (
    AnswerTooLong,
    ContextLengthExceeded,
    InvalidRequest,
)
from inference_site.core.domain.request import (
    GenerationRequest,
    Message,
    TextPart,
    drop_oldest_turns,
)
from worker.engines.base import Engine, Sink

PIECE = 8_192
"""Characters of one piece; the library tokenizes a piece in ten milliseconds at most."""
_SPLIT_TOKENS = 64
"""Upper bound on the additional tokens of a piece because the cuts split tokens."""
TOKENIZE_LIMIT = 65_536
"""Tokens of a text that is only tokenized, even where the context is shorter. The web process
accepts texts of this length for every model."""
_MEDIA_CHARACTERS = 2_000
"""Counted for an image or a sound: it has about as many tokens as a text of this length."""


def is_short_enough(
    text: str,
    limit: int,
    context_length: int,
    count: Callable[[str], int],
    sink: Sink,
    param: str,
) -> bool:
    """Return True if the text has at most ``limit`` tokens, False if the sink is cancelled.

    ``count`` returns the number of tokens of a piece. Raise ContextLengthExceeded, with an estimate
    of the tokens, if there are more.
    """
    if sink.cancelled:
        return False
    if len(text) <= PIECE:
        return True
    tokens = 0
    for start in range(0, len(text), PIECE):
        if sink.cancelled:
            return False
        end = min(start + PIECE, len(text))
        tokens += max(0, count(text[start:end]) - _SPLIT_TOKENS)
        if tokens > limit:
            estimate = tokens * len(text) // end
            raise ContextLengthExceeded(context_length, estimate, param, is_estimated=True)
    return not sink.cancelled


def start_truncating(
    engine: Engine,
    request: GenerationRequest,
    sink: Sink,
    ended: Callable[[Exception | None], None],
) -> bool:
    """Start the request like ``Engine.start``, without its oldest turns if it must be truncated.

    A limit of the answer that the engine refuses is lowered, if the request allows that. Nothing is started once the sink is cancelled. Raise, or end with, ContextLengthExceeded when
    even the last turn does not fit or the request does not allow truncation.
    """

    def start(request: GenerationRequest) -> bool:
        while not sink.cancelled:
            try:
                return engine.start(request, sink, partial(on_end, request))
            except InvalidRequest as exc:
                request = _fitted(request, exc)
        return False

    def on_end(request: GenerationRequest, error: Exception | None) -> None:
        if not isinstance(error, InvalidRequest):
            ended(error)
            return
        try:
            is_over = not start(_fitted(request, error))
        except Exception as exc:  # noqa: BLE001  # The caller of ``start`` has returned.
            ended(exc)
        else:
            if is_over:
                ended(None)

    return start(request)


def _fitted(request: GenerationRequest, refused: InvalidRequest) -> GenerationRequest:
    """Return a request that the engine may take after this refusal, else raise ``refused``."""
    if isinstance(refused, ContextLengthExceeded):
        return _truncated(request, refused)
    if isinstance(refused, AnswerTooLong) and request.lowers_max_output:
        return replace(request, max_output_tokens=refused.left, lowers_max_output=False)
    raise refused


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
