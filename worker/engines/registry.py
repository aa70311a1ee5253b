"""Engine names of ``models.yaml`` → the module that loads them.

Modules are imported on use, so that a host needs only the libraries of the engines it runs.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from worker.engines.base import Engine, EngineLoadError, ModelSpec

ENGINES = {
    "ctransformers": "worker.engines.ctransformers",
    "llama_cpp": "worker.engines.llama_cpp",
    "openai_upstream": "worker.engines.openai_upstream",
    "scripted": "worker.engines.scripted",
}
LIBRARIES = {"ctransformers": "ctransformers", "llama_cpp": "xllamacpp"}
"""Engine → its package, in the extra of the engine's name (``llama-cpp``, with a dash)."""


def load_engine(spec: ModelSpec) -> Engine:
    """Load the model on its engine. Raise EngineLoadError naming the model and the reason."""
    module = import_module(ENGINES[spec.engine])
    try:
        engine: Engine = module.load(spec)
    except ImportError as exc:
        extra = spec.engine.replace("_", "-")
        raise EngineLoadError(
            f"Model '{spec.id}': engine '{spec.engine}' is not installed ({exc}). "
            f"Install the extra '{extra}' of pyproject.toml."
        ) from exc
    return engine


def engine_options(name: str) -> frozenset[str]:
    """Return the keys of ``models.yaml`` that only this engine understands."""
    options: frozenset[str] = import_module(ENGINES[name]).OPTIONS
    return options


def model_capabilities(spec: ModelSpec) -> frozenset[str]:
    """Return what requests to this model may ask for; see docs/glossary.md."""
    capabilities: frozenset[str] = import_module(ENGINES[spec.engine]).capabilities(spec)
    return capabilities


def library_of(name: str) -> str:
    """Return the library that an engine runs on, with its version; nothing for one without."""
    library = LIBRARIES.get(name)
    try:
        return "" if library is None else f"{library} {version(library)}"
    except PackageNotFoundError:  # It was put there by hand.
        return library or ""
