"""Images and sounds in a chat: what the model takes of them, and how llama.cpp is given them."""

from __future__ import annotations

from typing import Any

from inference_site.catalogue.engines.llama_cpp import modalities
from inference_site.domain.errors import InvalidRequest
from inference_site.domain.messages import AudioPart, ImagePart, Message, Part
from inference_site.domain.model_spec import ModelSpec
from worker.engines.chat.wire import wire_part


def content(message: Message, spec: ModelSpec) -> str | list[dict[str, Any]] | None:
    """Return the content of a message: its parts, if it has any, in their order.

    Raise InvalidRequest for what the model does not perceive.
    """
    if not message.parts:
        return message.text
    perceived = modalities(spec)
    for part in message.parts:
        _check_perceived(part, spec, perceived)
    return [wire_part(part) for part in message.parts]


def _check_perceived(part: Part, spec: ModelSpec, perceived: frozenset[str]) -> None:
    match part:
        case ImagePart(param=param) if "vision" not in perceived:
            raise InvalidRequest(f"The model '{spec.id}' takes no images.", param)
        case AudioPart(param=param) if "audio" not in perceived:
            raise InvalidRequest(f"The model '{spec.id}' takes no audio.", param)
