"""The ctransformers engine, for models of the GGML era; only ``load_engine`` imports it."""

from __future__ import annotations

from inference_site.core.domain.model_spec import ModelSpec
from worker.engines.base import Engine


def load(spec: ModelSpec) -> Engine:
    """Start a model's server (see ``launch.load``)."""
    # Imported here: the server program in this package must not import the platform's client.
    from worker.engines.ctransformers import launch

    return launch.load(spec)
