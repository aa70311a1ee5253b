"""The engines, declared without their libraries: options, capabilities and library of each."""

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
from inference_site.core.domain.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DeclaredEngine:
    """An engine, without its library.

    ``library`` is the package that it runs on, installed by the extra of the engine's name
    (``llama-cpp``, with a dash). ``supported_fields`` returns the sampler and extension fields that
    a model supports; None means all of them.
    """

    options: type[EngineOptions]
    capabilities: Callable[[ModelSpec], frozenset[str]]
    library: str | None = None
    supported_fields: Callable[[ModelSpec], frozenset[str]] | None = None


ENGINES = {
    "command": DeclaredEngine(
        command.CommandOptions,
        openai_upstream.capabilities,
        supported_fields=openai_upstream.supported_fields,
    ),
    "ctransformers": DeclaredEngine(
        ctransformers.CtransformersOptions, ctransformers.capabilities, "ctransformers"
    ),
    "llama_cpp": DeclaredEngine(llama_cpp.LlamaCppOptions, llama_cpp.capabilities, "xllamacpp"),
    "openai_upstream": DeclaredEngine(
        openai_upstream.UpstreamOptions,
        openai_upstream.capabilities,
        supported_fields=openai_upstream.supported_fields,
    ),
    "scripted": DeclaredEngine(scripted.ScriptedOptions, scripted.capabilities),
}
LIBRARIES = {name: engine.library for name, engine in ENGINES.items() if engine.library}


def model_capabilities(spec: ModelSpec) -> frozenset[str]:
    """Return the capabilities of this model; see docs/glossary.md."""
    own = ENGINES[spec.engine].capabilities(spec)
    return own | {"moderation"} if "chat" in own and spec.options.get("guard") else own


def supported_fields(spec: ModelSpec) -> frozenset[str] | None:
    """Return the sampler and extension fields that this model supports; None for all of them."""
    supported = ENGINES[spec.engine].supported_fields
    return None if supported is None else supported(spec)


def library_of(name: str) -> str:
    """Return the name and version of an engine's library; an empty text for one without."""
    library = ENGINES[name].library
    try:
        return "" if library is None else f"{library} {version(library)}"
    except PackageNotFoundError:  # Installed without package metadata.
        return library or ""
