"""What each engine declares, without loading it: its options, its capabilities and its library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from inference_site.catalogue.engines import (
    command,
    ctransformers,
    llama_cpp,
    openai_upstream,
    scripted,
)
from inference_site.catalogue.engines.options import EngineOptions
from inference_site.domain.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DeclaredEngine:
    """What is known of an engine without its library.

    ``capabilities`` says what requests to a model may ask for; ``library`` is the package that it
    runs on, in the extra of the engine's name (``llama-cpp``, with a dash). ``honoured`` names the
    fields that it heeds, of samplers and the like; without it, it heeds all of them.
    """

    options: type[EngineOptions]
    capabilities: Callable[[ModelSpec], frozenset[str]]
    library: str | None = None
    honoured: Callable[[ModelSpec], frozenset[str]] | None = None


ENGINES = {
    "command": DeclaredEngine(
        command.CommandOptions, openai_upstream.capabilities, honoured=openai_upstream.honoured
    ),
    "ctransformers": DeclaredEngine(
        ctransformers.CtransformersOptions, ctransformers.capabilities, "ctransformers"
    ),
    "llama_cpp": DeclaredEngine(llama_cpp.LlamaCppOptions, llama_cpp.capabilities, "xllamacpp"),
    "openai_upstream": DeclaredEngine(
        openai_upstream.UpstreamOptions,
        openai_upstream.capabilities,
        honoured=openai_upstream.honoured,
    ),
    "scripted": DeclaredEngine(scripted.ScriptedOptions, scripted.capabilities),
}
LIBRARIES = {name: engine.library for name, engine in ENGINES.items() if engine.library}


def model_capabilities(spec: ModelSpec) -> frozenset[str]:
    """Return what requests to this model may ask for; see docs/glossary.md."""
    return ENGINES[spec.engine].capabilities(spec)


def honoured_fields(spec: ModelSpec) -> frozenset[str] | None:
    """Return the names of samplers and the like that this model heeds; None for all of them."""
    honoured = ENGINES[spec.engine].honoured
    return None if honoured is None else honoured(spec)


def library_of(name: str) -> str:
    """Return the library that an engine runs on, with its version; nothing for one without."""
    library = ENGINES[name].library
    try:
        return "" if library is None else f"{library} {version(library)}"
    except PackageNotFoundError:  # It was put there by hand.
        return library or ""
