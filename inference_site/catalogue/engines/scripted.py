"""The options and capabilities of scripted models."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from inference_site.catalogue.engines.options import EngineOptions
from inference_site.core.domain.model_spec import ModelSpec


class ScriptedOptions(EngineOptions):
    """``load_ms`` is the duration of a load; a load fails with the reason ``load_fails``, if set.

    ``script`` is the list of steps (``worker.engines.scripted``) that answers every request.
    """

    load_fails: str | None = None
    load_ms: float = Field(0, ge=0)
    script: list[dict[str, Any]] | None = None


def capabilities(spec: ModelSpec) -> frozenset[str]:
    """Return the capabilities of this model."""
    return frozenset({"chat", "completions", "tools"})
