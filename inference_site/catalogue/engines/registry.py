"""What each engine declares, without loading it: its options, its capabilities and its library."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from inference_site.domain.model_spec import ModelSpec

ENGINES = {
    "ctransformers": "inference_site.catalogue.engines.ctransformers",
    "llama_cpp": "inference_site.catalogue.engines.llama_cpp",
    "openai_upstream": "inference_site.catalogue.engines.openai_upstream",
    "scripted": "inference_site.catalogue.engines.scripted",
}


LIBRARIES = {"ctransformers": "ctransformers", "llama_cpp": "xllamacpp"}
"""Engine → its package, in the extra of the engine's name (``llama-cpp``, with a dash)."""


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
