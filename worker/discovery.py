"""Discovery: GGUF files that lie in a folder become models without an entry."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from worker.engines.base import ModelSpec
from worker.gguf_file import GgufInfo, read_gguf
from worker.models_file import default_threads, site_sampling

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
            info = read_gguf(path)
        except (OSError, ValueError, KeyError, IndexError) as exc:
            logger.warning("%s is left out: %s", path, exc)
            continue
        if info.type == "model":
            specs.setdefault(path.stem.lower(), _spec(path, info))
    return list(specs.values())


def _spec(path: Path, info: GgufInfo) -> ModelSpec:
    return ModelSpec(
        id=path.stem.lower(),
        engine="llama_cpp",
        file=path,
        slots=_SLOTS,
        context_length=min(info.context_length or _LONGEST_CONTEXT, _LONGEST_CONTEXT),
        threads=default_threads(),
        sampling=site_sampling(),
    )
