"""The most text that a model's context can hold: a bound that needs no tokenizer.

Tokenizing megabytes takes a worker seconds, and nothing can stop the library meanwhile. So the web
process refuses what certainly does not fit before it is queued, or drops the oldest turns where the
request allows that.

Text that fits has at most 16 bytes per token of the context: prose and code have three to five in
the known vocabularies, long words up to ten. Only runs of one character have more (a token may
stand for 64 spaces). Each message takes at least two tokens, for its content or role and for what
the template puts around it; it counts as 32 bytes more. 64 KiB are always accepted: a worker counts
their tokens in a tenth of a second.

The context of a model without a file is known to its own server only. It counts as a million
tokens, unless its entry says more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import orjson

from inference_site.catalogue.catalogue import catalogue
from inference_site.core.domain.errors import ContextLengthExceeded
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import (
    GenerationRequest,
    Message,
    TextPart,
    drop_oldest_turns,
    nearest_to_gap,
)

_TOKEN_BYTES = 16
_MESSAGE_BYTES = 2 * _TOKEN_BYTES
_LEAST_BYTES = 65_536
_LEAST_TOKENS = 65_536
"""Tokens that may always be detokenized: a text of ``_LEAST_BYTES`` has no more."""
_CONTEXT_ELSEWHERE = 2**20
_MOST_ITEMS = 65_536
_USUAL_TOKEN_BYTES = 4
"""For the number of tokens in an error message, which is an estimate."""
_USUAL_MESSAGE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class ContextBound:
    """The most that the context of one model can hold.

    ``context_length`` is tokens. ``size`` is bytes of text, with 32 more for each message.
    ``items`` of a conversation count as a token each: several may become one message.
    """

    context_length: int
    size: int
    items: int

    @classmethod
    def of(cls, spec: ModelSpec) -> ContextBound:
        """Return the bound of this model."""
        known = spec.context_length
        context_length = known if spec.file is not None else max(known, _CONTEXT_ELSEWHERE)
        size = max(_LEAST_BYTES, context_length * _TOKEN_BYTES)
        return cls(context_length, size, min(size // _TOKEN_BYTES, _MOST_ITEMS))

    def exceeded(self, size: int, messages: int, param: str) -> ContextLengthExceeded:
        """Return the error for texts of this many bytes in this many messages or items."""
        estimate = size // _USUAL_TOKEN_BYTES + messages * _USUAL_MESSAGE_TOKENS
        tokens = max(estimate, self.context_length + 1)
        return ContextLengthExceeded(self.context_length, tokens, param, is_estimated=True)


def fit_to_context(request: GenerationRequest, subject: str = "") -> GenerationRequest:
    """Return the request, without the oldest turns or ends of texts that it may lose to fit.

    Raise ContextLengthExceeded if the model's context certainly has no room. ``subject`` is the
    field of the API's request that holds the prompt, if its name is not the usual one.
    """
    spec = catalogue().models.get(request.model)
    if spec is None:
        return request
    bound, name = ContextBound.of(spec), subject or request.subject
    if request.truncate and request.suffix is not None:
        size = text_bytes(request.prompts[0]) + text_bytes(request.suffix)  # type: ignore[arg-type]
        size += _size_of_files(request)
        if size > bound.size:
            request = nearest_to_gap(request, bound.size / size)
    elif request.truncate and request.prompts:
        cut = tuple(_beginning(prompt, bound) for prompt in request.prompts)
        request = replace(request, prompts=cut)
    beside = max((text_bytes(query) for query in request.queries), default=0)
    beside += _size_of_files(request)
    for prompt in request.prompts:
        if isinstance(prompt, str):
            size = text_bytes(prompt) + text_bytes(request.suffix) + beside
            if size > bound.size:
                raise bound.exceeded(size, 0, name)
        elif request.operation == "detokenize":
            if len(prompt) > max(bound.context_length, _LEAST_TOKENS):
                raise ContextLengthExceeded(bound.context_length, len(prompt), "tokens")
        elif len(prompt) > bound.context_length:
            raise ContextLengthExceeded(bound.context_length, len(prompt), name)
    beside += text_bytes(request.response_prefix)
    for tool in request.tools:
        beside += text_bytes(tool.name) + text_bytes(tool.description)
        beside += len(orjson.dumps(tool.parameters))
    lengths = [_length(message) for message in request.messages]
    too_many = sum(lengths) + beside - bound.size
    if too_many > 0 and (request.truncate or request.compaction):
        if request.compaction is None:
            messages = drop_oldest_turns(request.messages, lengths, too_many)
        else:
            messages = request.compaction.without_oldest(request.messages, lengths, too_many)
        request = replace(request, messages=messages)
        lengths = [_length(message) for message in messages]
    if (size := sum(lengths)) + beside > bound.size:
        param = "tools" if beside > size and request.tools else name
        raise bound.exceeded(size + beside, len(lengths), param)
    return request


def _beginning(prompt: str | tuple[int, ...], bound: ContextBound) -> str | tuple[int, ...]:
    """Return what the context may hold of a prompt; the worker counts its tokens."""
    if isinstance(prompt, str):
        return prompt[: bound.size].encode()[: bound.size].decode(errors="ignore")
    return prompt[: bound.context_length]


def _size_of_files(request: GenerationRequest) -> int:
    return sum(text_bytes(name) + text_bytes(text) for name, text in request.other_files)


def _length(message: Message) -> int:
    """Return the bytes that every template shows; most leave out the reasoning of earlier turns."""
    size = _MESSAGE_BYTES + text_bytes(message.text)
    size += sum(text_bytes(part.text) for part in message.parts if isinstance(part, TextPart))
    return size + sum(
        text_bytes(call.name) + text_bytes(call.arguments) for call in message.tool_calls
    )


def text_bytes(text: str | None) -> int:
    """Return how many bytes a text has in UTF-8; 0 for none."""
    if not text:
        return 0
    return len(text) if text.isascii() else len(text.encode())
