"""Discovery: GGUF files that lie in a folder become models without an entry."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from inference_site.catalogue.entry import default_threads
from inference_site.catalogue.gguf_header import metadata
from inference_site.catalogue.models_file import site_sampling
from inference_site.domain.model_spec import ModelSpec

logger = logging.getLogger(__name__)

_SLOTS = 4
_LONGEST_CONTEXT = 8192
"""Tokens a slot gets without an entry: a model's own limit may need more memory than there is."""
_LATER_PART = re.compile(r"-0*([2-9]|\d{2,})-of-\d+$")


def discover(folder: Path) -> list[ModelSpec]:
    """Return a spec for each model file, in order of their names; the id is the file's name.

    Projectors, adapters, later parts of split files and what cannot be read are left out.
    """
    if not folder.is_dir():
        return []
    specs: dict[str, ModelSpec] = {}
    for path in sorted(folder.rglob("*.gguf")):
        if _LATER_PART.search(path.stem):
            continue
        try:
            context_length = _model_context(path)
        except (OSError, ValueError) as exc:
            logger.warning("%s is left out: %s", path, exc)
            continue
        if context_length is not None:
            specs.setdefault(path.stem.lower(), _spec(path, context_length))
    return list(specs.values())


def _model_context(path: Path) -> int | None:
    """Return the context length of a model, 0 if it does not say; None for what is no model.

    Files say what they are before their vocabulary, which is long and is not read.
    """
    found: dict[str, Any] = {}
    for key, value in metadata(path):
        found[key] = value
        length = found.get(f"{found.get('general.architecture')}.context_length")
        if length is not None and key.startswith("tokenizer."):
            break
    is_projector = found.get("general.architecture") == "clip"
    if found.get("general.type", "mmproj" if is_projector else "model") != "model":
        return None
    return int(found.get(f"{found.get('general.architecture')}.context_length") or 0)


def _spec(path: Path, context_length: int) -> ModelSpec:
    return ModelSpec(
        id=path.stem.lower(),
        engine="llama_cpp",
        file=path,
        slots=_SLOTS,
        context_length=min(context_length or _LONGEST_CONTEXT, _LONGEST_CONTEXT),
        threads=default_threads(),
        sampling=site_sampling(),
    )
