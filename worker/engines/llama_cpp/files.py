"""Files of a model, looked at before llama.cpp is: it gives no reason for what it cannot load."""

from __future__ import annotations

from pathlib import Path

from inference_site.domain.errors import EngineLoadError
from inference_site.domain.model_spec import ModelSpec

_GGUF_MAGIC = b"GGUF"


def checked_gguf(spec: ModelSpec, path: Path) -> str:
    """Return the path once it looks like GGUF. Raise EngineLoadError naming it and the reason."""
    try:
        with path.open("rb") as weights:
            magic = weights.read(len(_GGUF_MAGIC))
    except OSError as exc:
        raise EngineLoadError(f"Model '{spec.id}': cannot read {path}: {exc.strerror}.") from exc
    if magic != _GGUF_MAGIC:
        raise EngineLoadError(f"Model '{spec.id}': {path} is not a GGUF file.")
    return str(path)
