"""Views of LoRA adapters that come and go while the site runs, as vLLM and llama-server have them.

llama.cpp takes adapters only when a model is loaded, so each change has the model's processes load
it anew.
"""

from __future__ import annotations

from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from completions.views.models import unknown_model
from completions.wire.adapters import (
    AdapterAdded,
    AdapterCommanded,
    AdapterRemoved,
    AdaptersScaled,
    ListedAdapter,
    ModelQuery,
    ScaledAdapter,
    ScaledAdapters,
)
from inference_site.accounts.keys import Caller
from inference_site.accounts.models import Scope
from inference_site.api.authentication import caller_of, require_scope
from inference_site.api.payload import parse
from inference_site.api.schema import documented
from inference_site.api.views import ApiView
from inference_site.catalogue.catalogue import DEFAULT, catalogue
from inference_site.domain.model_spec import ModelSpec
from inference_site.errors.api_errors import ConflictError, InvalidRequestError, NotFoundError
from inference_site.fleet import fleet
from inference_site.model_store import adapters
from inference_site.model_store.adapter_files import adapter_file
from inference_site.model_store.adapters import added_view
from inference_site.submission.model_access import may_use

_ENGINE = "llama_cpp"
_MOST = 32
"""Adapters of one model: each takes memory, and each request goes through all of them."""


class LoadAdapterView(ApiView):
    """``POST /v1/load_lora_adapter``, as in vLLM."""

    scope = Scope.MODELS

    @documented(body=AdapterAdded, answer=AdapterCommanded, errors=(NotFoundError, ConflictError))
    def post(self, request: Request) -> Response:
        """Add a LoRA adapter to a model; its workers load it anew."""
        body = parse(AdapterAdded, request.data)
        spec = _meant(body.model)
        name = body.lora_name
        try:
            file = adapter_file(body.lora_path, spec)
        except ValueError as exc:
            raise InvalidRequestError(f"Invalid 'lora_path': {exc}", param="lora_path") from exc
        if catalogue().named(name) is not None:
            raise ConflictError(f"There is a model '{name}'.", param="lora_name")
        if len(adapters.read().to(spec).lora_adapters) >= _MOST:
            raise ConflictError(
                f"The model '{spec.id}' has {_MOST} adapters, and may not have more."
            )
        if name in spec.lora_adapters or not adapters.add(spec.id, name, file):
            raise ConflictError(
                f"The model '{spec.id}' has an adapter '{name}' already.", param="lora_name"
            )
        return _reloaded(spec, body)


class UnloadAdapterView(ApiView):
    """``POST /v1/unload_lora_adapter``, as in vLLM."""

    scope = Scope.MODELS

    @documented(body=AdapterRemoved, answer=AdapterCommanded, errors=(NotFoundError, ConflictError))
    def post(self, request: Request) -> Response:
        """Remove a LoRA adapter that was added; the workers of its model load that anew."""
        body = parse(AdapterRemoved, request.data)
        having = adapters.read().models_with(body.lora_name)
        spec = _meant(body.model or (having[0] if len(having) == 1 else None))
        if not adapters.remove(spec.id, body.lora_name):
            raise NotFoundError(
                f"No adapter '{body.lora_name}' was added to the model '{spec.id}'.",
                param="lora_name",
            )
        return _reloaded(spec, body)


class AdaptersView(ApiView):
    """``/lora-adapters?model=``, as in llama-server."""

    @documented(answer=list[ListedAdapter], query=ModelQuery, errors=(NotFoundError,))
    def get(self, request: Request) -> Response:
        """List the adapters of a model, with what of each applies where a request names none."""
        return Response(_listed(_own(request, caller_of(request))))

    @documented(
        body=list[ScaledAdapter],
        answer=AdaptersScaled,
        query=ModelQuery,
        errors=(NotFoundError,),
    )
    def post(self, request: Request) -> Response:
        """Say what of which adapters applies where a request names none."""
        caller = caller_of(request)
        require_scope(caller, Scope.MODELS)
        spec = _own(request, caller)
        body = parse(ScaledAdapters, {"adapters": request.data})
        names = list(added_view.now().to(spec).lora_adapters)
        if unknown := [entry.id for entry in body.adapters if entry.id >= len(names)]:
            raise InvalidRequestError(
                f"Invalid 'id': the model '{spec.id}' has no adapter {unknown[0]}.", param="id"
            )
        adapters.set_scales(spec.id, {names[entry.id]: entry.scale for entry in body.adapters})
        added_view.forget()
        return Response(AdaptersScaled().model_dump())


def _own(request: Request, caller: Caller) -> ModelSpec:
    spec = _meant(request.query_params.get("model"), caller)
    if not may_use(caller, spec):
        raise unknown_model(spec.id)
    return spec


def _meant(name: str | None, caller: Caller | None = None) -> ModelSpec:
    """Return the model of this name; without one the default, or the only one with adapters."""
    project = caller.project_name if caller else None
    if name is not None:
        spec = catalogue().find(name, project)
        if spec is None:
            raise unknown_model(name)
        if not _takes_adapters(spec):
            raise InvalidRequestError(f"The model '{spec.id}' takes no adapters.", param="model")
        return spec
    default = catalogue().find(DEFAULT, project)
    mine = (spec for spec in catalogue().models.values() if not project or spec.is_for(project))
    able = [spec for spec in mine if _takes_adapters(spec)]
    if default is not None and _takes_adapters(default):
        return default
    if len(able) != 1:
        raise InvalidRequestError(
            "Missing required parameter: 'model'.", param="model", code="missing_required_parameter"
        )
    return able[0]


def _takes_adapters(spec: ModelSpec) -> bool:
    return spec.engine == _ENGINE and "embedding" not in spec.options


def _listed(spec: ModelSpec) -> list[dict[str, Any]]:
    adapted = added_view.now().to(spec)
    scales = dict(adapted.lora)
    return [
        {"id": number, "name": name, "path": file.name, "scale": scales.get(name, 0.0)}
        for number, (name, file) in enumerate(adapted.lora_adapters.items())
    ]


def _reloaded(spec: ModelSpec, body: AdapterAdded | AdapterRemoved) -> Response:
    added_view.forget()
    workers = fleet.reload(spec.id)
    answer = AdapterCommanded(model=spec.id, lora_name=body.lora_name, workers=workers)
    response = Response(answer.model_dump())
    if body.ignored_params:
        response["x-unsupported-params"] = ",".join(body.ignored_params)
    return response
