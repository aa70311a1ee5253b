"""What pages show of a model's file: its size, its architecture, its quantisation, its memory."""

from __future__ import annotations

from typing import Any, TypedDict

from inference_site.catalogue.memory import ModelMemory
from inference_site.catalogue.model_files import parts_of
from inference_site.domain.model_spec import ModelSpec


class FileFacts(TypedDict, total=False):
    """Facts of one file; sizes are in bytes, ``trained_context`` in tokens.

    ``memory_parts`` says what makes up ``memory_bytes``."""

    size_bytes: int
    memory_bytes: int
    memory_parts: str
    architecture: str
    quantisation: str
    trained_context: int


def file_facts(spec: ModelSpec) -> FileFacts:
    """Return what the model's file says, as far as it can be read; nothing without one here.

    It reads the header, in 0.4 s for a large vocabulary.
    """
    if spec.file is None:
        return {}
    try:
        size = sum(part.stat().st_size for part in parts_of(spec.file))
        if spec.engine != "llama_cpp":
            return {"size_bytes": size}
        model = ModelMemory(spec, spec.file)
        found, needs = model.metadata, model.needs
    except (OSError, ValueError):
        return {}
    return {
        "size_bytes": size,
        "memory_bytes": needs.total,
        "memory_parts": str(needs),
        "architecture": str(found.get("general.architecture", "")),
        "quantisation": quantisation_of(found.get("general.file_type")),
        "trained_context": model.number("context_length"),
    }


def quantisation_of(file_type: Any) -> str:
    """Return the name by which files of this type are known, such as Q4_K_M."""
    from gguf.constants import LlamaFileType  # Brings numpy, which few processes use.

    try:
        return LlamaFileType(file_type).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return ""
