"""Views of models as Ollama lists them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from completions.ollama import wire
from completions.ollama.views import OllamaView
from completions.views.models import wire_models, wire_route
from inference_site.accounts.keys import Caller
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.fleet import fleet
from inference_site.catalogue.gguf_files import chat_template, metadata_before_vocabulary
from inference_site.catalogue.model_files import architecture_of, quantisation_of
from inference_site.catalogue.models_file import Route
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.errors.api_errors import InvalidRequestError, NotFoundError
from inference_site.gateway.api.authentication import caller_of
from inference_site.gateway.api.payload import parse
from inference_site.gateway.api.schema import documented
from inference_site.gateway.submission.model_access import may_use

_VERSION = "0.12.0"
"""The release of Ollama with this API. Clients check for a minimal version."""
_FOR_EVER = "2318-01-01T00:00:00Z"
_CAPABILITIES = {
    "chat": "completion",
    "embeddings": "embedding",
    "suffix": "insert",
    "tools": "tools",
    "vision": "vision",
}


class TagsView(OllamaView):
    """``GET /api/tags``."""

    @documented(answer=wire.OllamaModels, error=wire.OllamaError)
    def get(self, request: Request) -> Response:
        """List the models."""
        caller = caller_of(request)
        routes = catalogue().listed_routes(caller.project_name)
        names = [_as_model(one, caller) for one in routes if may_use(caller, one)]
        return Response({"models": [_summary(spec) for spec in (*_listed(caller), *names)]})


class PsView(OllamaView):
    """``GET /api/ps``."""

    @documented(answer=wire.OllamaLoadedModels, error=wire.OllamaError)
    def get(self, request: Request) -> Response:
        """List the models that are loaded."""
        specs = _listed(caller_of(request))
        loaded = {model.id for model in wire_models(specs) if model.status == "loaded"}
        return Response({"models": [_running(spec) for spec in specs if spec.id in loaded]})


class ShowView(OllamaView):
    """``POST /api/show``."""

    @documented(
        body=wire.ShowRequest,
        answer=wire.OllamaModelInfo,
        errors=(NotFoundError,),
        error=wire.OllamaError,
    )
    def post(self, request: Request) -> Response:
        """Describe a model."""
        body = parse(wire.ShowRequest, request.data)
        name = body.model or body.name
        if not name:
            raise InvalidRequestError("Missing required parameter: 'model'.", param="model")
        caller = caller_of(request)
        model = catalogue().named(name, caller.project_name)
        if model is None or not may_use(caller, model):
            raise NotFoundError(f"model '{name[:100]}' not found", param="model")
        capabilities: Collection[str]
        if isinstance(model, Route):
            spec, capabilities = _as_model(model, caller), wire_route(model, caller).capabilities
        else:
            spec, capabilities = model, fleet.capabilities_of(model)
        summary, family = _summary(spec), architecture_of(spec) or ""
        length = {f"{family or 'model'}.context_length": fleet.context_of(spec)}
        return Response(
            {
                "modelfile": "",
                "parameters": "",
                "template": (chat_template(spec.file) if spec.file else None) or "",
                "details": summary["details"],
                "model_info": {"general.architecture": family, **length},
                "capabilities": [
                    ollama_name
                    for capability, ollama_name in _CAPABILITIES.items()
                    if capability in capabilities
                ],
                "modified_at": summary["modified_at"],
            }
        )


class VersionView(OllamaView):
    """``GET /api/version``."""

    @documented(answer=wire.OllamaVersion, error=wire.OllamaError)
    def get(self, request: Request) -> Response:
        """Get the version of Ollama's API."""
        return Response({"version": _VERSION})


def _listed(caller: Caller) -> list[ModelSpec]:
    listed = catalogue().listed(caller.project_name)
    return [spec for spec in listed if may_use(caller, spec)]


def _as_model(route: Route, caller: Caller) -> ModelSpec:
    """Return the first model of a route under the route's name: Ollama's API has no routes."""
    first = next(spec for spec in route.specs if spec.is_for(caller.project_name))
    return replace(first, id=route.id)


def _summary(spec: ModelSpec) -> dict[str, Any]:
    stat = spec.file.stat() if spec.file and spec.file.exists() else None
    family = architecture_of(spec) or ""
    modified = datetime.fromtimestamp(stat.st_mtime if stat else 0, UTC)
    header = _beginning(spec.file) if spec.file else {}
    size, kind = header.get("general.size_label"), header.get("general.file_type")
    quantization = quantisation_of(kind) or "unknown" if isinstance(kind, int) else ""
    return {
        "name": spec.id,
        "model": spec.id,
        "modified_at": modified.isoformat().replace("+00:00", "Z"),
        "size": stat.st_size if stat else 0,
        # Ollama's digest is that of the file; here it only identifies the model.
        "digest": hashlib.sha256(spec.id.encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": family,
            "families": [family] if family else None,
            "parameter_size": size if isinstance(size, str) else "",
            "quantization_level": quantization,
        },
    }


@cache
def _beginning(path: Path) -> dict[str, Any]:
    try:
        return metadata_before_vocabulary(path)
    except (OSError, ValueError):  # The file is on another host, or it is a GGML file.
        return {}


def _running(spec: ModelSpec) -> dict[str, Any]:
    summary = _summary(spec)
    del summary["modified_at"]
    in_memory = {"expires_at": _FOR_EVER, "size_vram": 0, "context_length": fleet.context_of(spec)}
    return {**summary, **in_memory}
