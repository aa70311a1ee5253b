"""Engine names of ``models.yaml`` → the module that loads them.

Modules are imported on use, so that a host needs only the libraries of the engines it runs.
"""

from __future__ import annotations

from importlib import import_module

from inference_site.core.domain.errors import EngineLoadError
from inference_site.core.domain.model_spec import ModelSpec
from worker.engines.base import Engine


def load_engine(spec: ModelSpec) -> Engine:
    """Load the model on its engine. Raise EngineLoadError naming the model and the reason."""
    module = import_module(f"worker.engines.{spec.engine}")
    try:
        engine: Engine = module.load(spec)
    except ImportError as exc:
        extra = spec.engine.replace("_", "-")
        raise EngineLoadError(
            f"Model '{spec.id}': engine '{spec.engine}' is not installed ({exc}). "
            f"Install the extra '{extra}' of pyproject.toml."
        ) from exc
    return engine
