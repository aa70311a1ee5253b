"""Whether a prompt is so long that no vocabulary makes it short enough for its model."""

from __future__ import annotations

from collections.abc import Sequence

from inference_site.catalogue.catalogue import catalogue
from inference_site.domain.errors import ContextLengthExceeded
from inference_site.domain.messages import Message, TextPart
from inference_site.domain.request import GenerationRequest

_LONGEST_TOKEN = 512
"""Characters; tokens of long runs of spaces have some 256 in the vocabularies that are known."""
_READS_ALL = ("chat", "complete", "embed")


def refuse_too_long(request: GenerationRequest, subject: str = "") -> None:
    """Raise ContextLengthExceeded if the context of the model certainly has no room.

    A worker would compute for seconds to count the tokens of some megabytes. How long the context
    of a model without a file is, only its own server knows. ``subject`` is the field of the API's
    request that holds what the model reads, if that is not the usual one.
    """
    spec = catalogue().models.get(request.model)
    if spec is None or spec.file is None or request.truncate:
        return
    if request.operation not in _READS_ALL:
        return
    prompts = [len(prompt) for prompt in request.prompts if isinstance(prompt, str)]
    longest = max((_characters(request.messages), *prompts))
    if longest > spec.context_length * _LONGEST_TOKEN:
        tokens = longest // _LONGEST_TOKEN
        name = subject or request.subject
        raise ContextLengthExceeded(spec.context_length, tokens, name, has_more=True)


def _characters(messages: Sequence[Message]) -> int:
    texts = sum(len(message.text or "") for message in messages)
    parts = (part for message in messages for part in message.parts if isinstance(part, TextPart))
    return texts + sum(len(part.text) for part in parts)
