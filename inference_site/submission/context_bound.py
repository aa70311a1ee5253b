"""How much text the context of a model can hold at most: what is certain without a tokenizer.

To tokenize megabytes takes a worker seconds, and nothing stops a call into a library before it
returns. So the web process refuses what certainly does not fit before it is queued, or drops the
oldest turns where the request allows that.

A text that fits has at most 16 bytes for each token of the context: prose and code have three to
five in the vocabularies that are known, and long words up to ten. Only runs of one character have
more (a token may stand for 64 spaces). Each message takes two tokens at least, for its content or
role and for what the template puts around it; it counts as 32 bytes more. Whatever the context,
64 KiB are accepted: a worker counts their tokens in a tenth of a second.

The context of a model without a file is known to its own server only. It counts as a million
tokens, if its entry does not say more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import orjson

from inference_site.catalogue.catalogue import catalogue
from inference_site.domain.errors import ContextLengthExceeded
from inference_site.domain.messages import Message, TextPart, drop_oldest_turns
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import GenerationRequest, Tool

_TOKEN_BYTES = 16
_MESSAGE_BYTES = 2 * _TOKEN_BYTES
_LEAST_BYTES = 65_536
_LEAST_TOKENS = 65_536
"""What may be tokenized or detokenized without being read by the model, if its context is shorter:
no more than a text of ``_LEAST_BYTES`` has."""
_CONTEXT_ELSEWHERE = 2**20
_MOST_ITEMS = 65_536
_USUAL_TOKEN_BYTES = 4
"""For the number in an error, which is an estimate and no bound."""
_USUAL_MESSAGE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class ContextBound:
    """What certainly does not fit into the context of one model: more than this.

    ``context_length`` is tokens. ``size`` is bytes of text, with 32 more for each message. An item
    of a conversation counts as a token, as some of them become one message together.
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


def fitted(request: GenerationRequest, subject: str = "") -> GenerationRequest:
    """Return the request, without its oldest turns if they do not fit and it allows that.

    Raise ContextLengthExceeded if the context of its model certainly has no room. ``subject`` is
    the field of the API's request that holds what the model reads, if that is not the usual one.
    """
    spec = catalogue().models.get(request.model)
    if spec is None:
        return request
    bound, name = ContextBound.of(spec), subject or request.subject
    beside = sum(map(_tool_bytes, request.tools)) + text_bytes(request.response_prefix)
    for prompt in request.prompts:
        _check_prompt(prompt, request, bound, name)
    lengths = [_length(message) for message in request.messages]
    too_many = sum(lengths) + beside - bound.size
    if too_many > 0 and request.truncate:
        messages = drop_oldest_turns(request.messages, lengths, too_many)
        request = replace(request, messages=messages)
        lengths = [_length(message) for message in messages]
    if (size := sum(lengths)) + beside > bound.size:
        param = "tools" if beside > size and request.tools else name
        raise bound.exceeded(size + beside, len(lengths), param)
    return request


def _check_prompt(
    prompt: str | tuple[int, ...], request: GenerationRequest, bound: ContextBound, name: str
) -> None:
    if isinstance(prompt, str):
        size = text_bytes(prompt) + text_bytes(request.suffix)
        if size > bound.size:
            raise bound.exceeded(size, 0, name)
        return
    most = bound.context_length
    if request.operation == "detokenize":
        most, name = max(most, _LEAST_TOKENS), "tokens"
    if len(prompt) > most:
        raise ContextLengthExceeded(bound.context_length, len(prompt), name)


def _length(message: Message) -> int:
    return _MESSAGE_BYTES + sum(map(text_bytes, _texts(message)))


def _texts(message: Message) -> Iterator[str]:
    """Yield what every template shows. Most leave out what the assistant thought long ago."""
    yield message.text or ""
    yield from (part.text for part in message.parts if isinstance(part, TextPart))
    for call in message.tool_calls:
        yield call.name
        yield call.arguments


def _tool_bytes(tool: Tool) -> int:
    return text_bytes(tool.name) + text_bytes(tool.description) + len(orjson.dumps(tool.parameters))


def text_bytes(text: str | None) -> int:
    """Return how many bytes a text has in UTF-8; 0 for none."""
    if not text:
        return 0
    return len(text) if text.isascii() else len(text.encode())
