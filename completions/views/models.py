"""Views of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from django.http import HttpResponse
from rest_framework.request import Request
from rest_framework.response import Response

from completions.views.model_events import model_events
from completions.wire.models import (
    Model,
    ModelCommand,
    ModelCommanded,
    ModelEvent,
    ModelList,
    ModelLoading,
    ModelRoute,
    ModelTarget,
)
from inference_site.accounts.keys import Caller
from inference_site.accounts.models import Scope
from inference_site.api.authentication import caller_of
from inference_site.api.payload import parse
from inference_site.api.schema import documented
from inference_site.api.views import ApiView
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.routes import Route
from inference_site.domain.model_spec import ModelSpec
from inference_site.errors.api_errors import ConflictError, NotFoundError
from inference_site.fleet import fleet, placement
from inference_site.fleet.fleet import ModelStatus
from inference_site.fleet.leases import LiveWorker, live_view
from inference_site.gateway.handoff import hand_feed
from inference_site.generations.queue_position import waiting_by_model
from inference_site.model_store.adapters import added_view
from inference_site.submission.loading import loading_of
from inference_site.submission.model_access import may_use

_BEST_FIRST = ("loaded", "loading", "failed", "unloaded")


class ModelsView(ApiView):
    """``GET /v1/models``."""

    @documented(answer=ModelList)
    def get(self, request: Request) -> Response:
        """List the models."""
        caller = caller_of(request)
        listed = catalogue().listed(caller.project_name)
        models = wire_models([spec for spec in listed if may_use(caller, spec)])
        routes = catalogue().listed_routes(caller.project_name)
        models += [wire_route(one, caller) for one in routes if may_use(caller, one)]
        return Response(ModelList(data=models).model_dump())


class ModelView(ApiView):
    """``GET /v1/models/{id}``; the id may contain slashes."""

    @documented(answer=Model)
    def get(self, request: Request, model_id: str) -> Response:
        """Get a model; its id may contain slashes."""
        caller = caller_of(request)
        found = catalogue().named(model_id, caller.project_name)
        if found is None or not may_use(caller, found):
            raise unknown_model(model_id)
        if isinstance(found, Route):
            return Response(wire_route(found, caller).model_dump())
        return Response(wire_models([found])[0].model_dump())


class ModelLoadView(ApiView):
    """``POST /v1/models/load``: has a worker load a model, for the whole site."""

    scope = Scope.MODELS

    @documented(body=ModelCommand, answer=ModelCommanded, errors=(NotFoundError, ConflictError))
    def post(self, request: Request) -> Response:
        """Have a worker load a model."""
        return _commanded(request, lambda worker, model: [fleet.load(worker, model)])


class ModelUnloadView(ApiView):
    """``POST /v1/models/unload``: has workers drop a model; what runs on it may end."""

    scope = Scope.MODELS

    @documented(body=ModelCommand, answer=ModelCommanded, errors=(NotFoundError, ConflictError))
    def post(self, request: Request) -> Response:
        """Have workers drop a model."""
        return _commanded(request, fleet.unload)


class ModelEventsView(ApiView):
    """``GET /v1/models/{id}/events``: a stream of how the model is, on each worker.

    It ends, with ``[DONE]``, when nothing is under way.
    """

    scope = Scope.MODELS

    @documented(answer=ModelEvent, event=ModelEvent)
    def get(self, request: Request, model_id: str) -> HttpResponse:
        """Follow the loads and unloads of a model."""
        spec = catalogue().find(model_id)
        if spec is None:
            raise unknown_model(model_id)
        return hand_feed(request, model_events(spec.id))


def _commanded(request: Request, command: Callable[[str | None, str], list[str]]) -> Response:
    body = parse(ModelCommand, request.data)
    spec = catalogue().find(body.model)
    if spec is None:
        raise unknown_model(body.model)
    try:
        workers = command(body.worker, spec.id)
    except fleet.UnknownWorker as exc:
        raise NotFoundError(str(exc), param="worker", code="worker_not_found") from exc
    except fleet.FleetError as exc:
        raise ConflictError(str(exc), param="model") from exc
    response = Response(ModelCommanded(model=spec.id, workers=workers).model_dump())
    if body.ignored_params:
        response["x-unsupported-params"] = ",".join(body.ignored_params)
    return response


def unknown_model(model: str) -> NotFoundError:
    """Return the error for a name that no model has."""
    return NotFoundError(
        f"The model '{model[:100]}' does not exist", param="model", code="model_not_found"
    )


def wire_models(specs: Sequence[ModelSpec]) -> list[Model]:
    """Return the models as they are now."""
    live = live_view.workers()
    statuses = fleet.statuses_among(live, [spec.id for spec in specs])
    waiting = waiting_by_model([id_ for id_, s in statuses.items() if s == ModelStatus.LOADING])
    return [_wire_model(spec, statuses[spec.id], live, waiting.get(spec.id, 0)) for spec in specs]


def wire_route(route: Route, caller: Caller) -> Model:
    """Return a route as it is now, with those of its models that the caller's project may use."""
    models = wire_models([spec for spec in route.specs if spec.is_for(caller.project_name)])
    by_id = {model.id: model for model in models}
    shares = {o.spec.id: o.weight for o in route.targets if o.weight and o.spec.id in by_id}
    total = sum(shares.values())
    able = [set(by_id[id_].capabilities) for id_ in shares or by_id]
    return Model(
        id=route.id,
        created=max(model.created for model in models),
        owned_by="inference-site",
        status=min((model.status for model in models), key=_BEST_FIRST.index),
        context_length=max(model.context_length for model in models),
        workers=sum(any(map(worker.serves, by_id)) for worker in live_view.workers()),
        capabilities=sorted(set.intersection(*able)),
        lora_adapters=[],
        route=ModelRoute(
            targets=[ModelTarget(model=id_, share=w / total) for id_, w in shares.items()],
            fallback=[one.spec.id for one in route.fallback if one.spec.id in by_id],
        ),
    )


def _wire_model(
    spec: ModelSpec, status: ModelStatus, live: Sequence[LiveWorker], waiting: int
) -> Model:
    created = int(spec.file.stat().st_mtime) if spec.file and spec.file.exists() else 0
    return Model(
        id=spec.id,
        created=created,
        owned_by="inference-site",
        status=status.value,
        context_length=fleet.context_of(spec),
        workers=sum(worker.serves(spec.id) for worker in live),
        capabilities=sorted(fleet.capabilities_of(spec)),
        tools=fleet.tools_of(spec.id),
        lora_adapters=sorted(added_view.now().to(spec).lora_adapters),
        loading=_loading(spec, live, waiting) if status == ModelStatus.LOADING else None,
        reason=placement.why_no_host(spec, live) or None,
    )


def _loading(spec: ModelSpec, live: Sequence[LiveWorker], waiting: int) -> ModelLoading:
    found = loading_of(spec.id, live)
    return ModelLoading(
        expected_s=found.expected_s,
        progress=found.progress,
        waiting=waiting,
    )
