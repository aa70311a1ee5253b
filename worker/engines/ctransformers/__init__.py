"""The ctransformers engine, for models of the GGML era; only the engine registry imports it."""

from __future__ import annotations

from inference_site.domain.model_spec import ModelSpec
from worker.engines.base import Engine


def load(spec: ModelSpec) -> Engine:
    """Start a model's server (see ``launch.load``)."""
    from worker.engines.ctransformers import launch  # The server itself, in here, needs none of it.

    return launch.load(spec)
