"""What scripted models may be asked for, and their options."""

from __future__ import annotations

from inference_site.domain.model_spec import ModelSpec

OPTIONS = frozenset({"load_fails", "load_ms", "script"})


_CAPABILITIES = frozenset({"chat", "completions", "tools"})


def capabilities(spec: ModelSpec) -> frozenset[str]:
    """Return what requests to this model may ask for."""
    return _CAPABILITIES
