"""Views of models."""

from __future__ import annotations

from rest_framework.request import Request
from rest_framework.response import Response

from completions.wire.models import Model, ModelList
from inference_site.http.authentication import caller_of
from inference_site.http.errors import NotFoundError
from inference_site.http.schema import documented
from inference_site.http.views import ApiView
from worker.catalog import catalog
from worker.engines.base import ModelSpec
from worker.engines.registry import model_capabilities
from worker.leases import live_view


class ModelsView(ApiView):
    """``GET /v1/models``."""

    @documented(answer=ModelList)
    def get(self, request: Request) -> Response:
        """List the models."""
        project = caller_of(request).project_name
        models = [_wire_model(spec) for spec in catalog().listed(project)]
        return Response(ModelList(data=models).model_dump())


class ModelView(ApiView):
    """``GET /v1/models/{id}``; the id may contain slashes."""

    @documented(answer=Model)
    def get(self, request: Request, model_id: str) -> Response:
        """Get a model; its id may contain slashes."""
        spec = catalog().find(model_id, caller_of(request).project_name)
        if spec is None:
            raise NotFoundError(
                f"The model '{model_id}' does not exist", param="model", code="model_not_found"
            )
        return Response(_wire_model(spec).model_dump())


def _wire_model(spec: ModelSpec) -> Model:
    workers = len(live_view.serving(spec.id))
    created = int(spec.file.stat().st_mtime) if spec.file and spec.file.exists() else 0
    return Model(
        id=spec.id,
        created=created,
        owned_by="inference-site",
        status="loaded" if workers else "unloaded",
        context_length=spec.context_length,
        workers=workers,
        capabilities=sorted(model_capabilities(spec)),
        lora_adapters=sorted(spec.lora_adapters),
    )
