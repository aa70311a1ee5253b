"""What scripted models may be asked for, and their options."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from inference_site.catalogue.engines.options import EngineOptions
from inference_site.domain.model_spec import ModelSpec

_CAPABILITIES = frozenset({"chat", "completions", "tools"})


class ScriptedOptions(EngineOptions):
    """``load_ms`` is how long a load takes; ``load_fails`` has it fail, with this reason.

    ``script`` is a list of steps (``worker.engines.scripted``) that is played for every request.
    """

    load_fails: str | None = None
    load_ms: float = Field(0, ge=0)
    script: list[dict[str, Any]] | None = None


def capabilities(spec: ModelSpec) -> frozenset[str]:
    """Return what requests to this model may ask for."""
    return _CAPABILITIES
