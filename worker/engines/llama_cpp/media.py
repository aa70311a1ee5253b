"""Images and sounds in a chat: what the model takes of them, and how llama.cpp is given them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inference_site.catalogue.engines.llama_cpp import MODALITIES, modalities
from inference_site.domain.errors import EngineLoadError, InvalidRequest
from inference_site.domain.messages import AudioPart, ImagePart, Message, Part
from inference_site.domain.model_spec import ModelSpec
from worker.engines.chat.wire import wire_part
from worker.engines.llama_cpp.files import checked_gguf


def projector_path(spec: ModelSpec) -> str | None:
    """Return the file of the projector, if there is one.

    Raise EngineLoadError for options that make no sense, or naming the file and the reason.
    """
    projector = spec.options.get("mmproj")
    _check_modalities(spec, spec.options.get("modalities", []))
    if projector is None:
        return None
    if not isinstance(projector, str):
        raise EngineLoadError(f"Model '{spec.id}': 'mmproj' must be the path of a GGUF file.")
    return checked_gguf(spec, Path(projector))


def _check_modalities(spec: ModelSpec, told: Any) -> None:
    if not isinstance(told, list) or not all(name in MODALITIES for name in told):
        raise EngineLoadError(
            f"Model '{spec.id}': 'modalities' must be a list of 'vision' and 'audio'."
        )
    if told and "mmproj" not in spec.options:
        raise EngineLoadError(f"Model '{spec.id}': 'modalities' needs a projector, 'mmproj'.")


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
