"""Views of models, their loads and their adapters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime

from django.http import HttpResponse
from rest_framework.request import Request
from rest_framework.response import Response

from completions.wire.models import (
    AdapterAdded,
    AdapterCommanded,
    AdapterRemoved,
    AdaptersScaled,
    AnthropicModel,
    AnthropicModelList,
    AnthropicModelsQuery,
    ListedAdapter,
    Model,
    ModelCommand,
    ModelCommanded,
    ModelEvent,
    ModelList,
    ModelLoading,
    ModelQuery,
    ModelRoute,
    ModelTarget,
    ModelWorker,
    ScaledAdapter,
    ScaledAdapters,
)
from inference_site.accounts.keys import Caller
from inference_site.accounts.models import Scope
from inference_site.catalogue.catalogue import DEFAULT_ALIAS, catalogue
from inference_site.catalogue.fleet import fleet, orders
from inference_site.catalogue.fleet.fleet import ModelStatus
from inference_site.catalogue.fleet.leases import LiveWorker, ModelState, live_view, live_workers
from inference_site.catalogue.model_store import adapters
from inference_site.catalogue.model_store.adapters import adapter_file, added_view
from inference_site.catalogue.models_file import Route
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.errors.api_errors import (
    ANTHROPIC_VERSION,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
)
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.gateway.api.authentication import caller_of, require_scope
from inference_site.gateway.api.payload import parse_query
from inference_site.gateway.api.schema import documented
from inference_site.gateway.api.views import ApiView
from inference_site.gateway.handoff import Feed, hand_feed
from inference_site.gateway.submission.model_access import load_progress, may_use
from inference_site.runs.queue_position import waiting_by_model

_BEST_FIRST = ("loaded", "loading", "failed", "unloaded")


class ModelsView(ApiView):
    """``GET /v1/models``, in Anthropic's form for requests with its header of a version."""

    @documented(answer=ModelList | AnthropicModelList)
    def get(self, request: Request) -> Response:
        """List the models."""
        caller = caller_of(request)
        listed = catalogue().listed(caller.project_name)
        models = wire_models([spec for spec in listed if may_use(caller, spec)])
        routes = catalogue().listed_routes(caller.project_name)
        models += [wire_route(one, caller) for one in routes if may_use(caller, one)]
        if ANTHROPIC_VERSION in request.headers:
            query = parse_query(AnthropicModelsQuery, request.query_params.dict())
            return Response(_anthropic_page(models, query).model_dump())
        return Response(ModelList(data=models).model_dump())


class ModelView(ApiView):
    """``GET /v1/models/{id}``; the id may contain slashes."""

    @documented(answer=Model | AnthropicModel)
    def get(self, request: Request, model_id: str) -> Response:
        """Get a model; its id may contain slashes."""
        caller = caller_of(request)
        found = catalogue().named(model_id, caller.project_name)
        if found is None or not may_use(caller, found):
            raise unknown_model(model_id)
        model = wire_route(found, caller) if isinstance(found, Route) else wire_models([found])[0]
        if ANTHROPIC_VERSION in request.headers:
            return Response(_anthropic_model(model).model_dump())
        return Response(model.model_dump())


def _anthropic_page(models: Sequence[Model], query: AnthropicModelsQuery) -> AnthropicModelList:
    """Return the page after ``after_id``, or the one that ends before ``before_id``.

    Raise InvalidRequestError for an id that is not in the list.
    """
    ids, limit = [model.id for model in models], query.limit
    first, end = 0, len(ids)
    if query.after_id:
        first = _place_of(query.after_id, ids, "after_id") + 1
    if query.before_id:
        end = _place_of(query.before_id, ids, "before_id")
    is_backwards = bool(query.before_id) and not query.after_id
    found = models[first:end]
    shown = [_anthropic_model(one) for one in (found[-limit:] if is_backwards else found[:limit])]
    return AnthropicModelList(
        data=shown,
        has_more=len(found) > len(shown),
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
    )


def _place_of(id_: str, ids: Sequence[str], param: str) -> int:
    if id_ not in ids:
        raise InvalidRequestError(f"Invalid '{param}': there is no such model.", param=param)
    return ids.index(id_)


def _anthropic_model(model: Model) -> AnthropicModel:
    created = datetime.fromtimestamp(model.created, UTC)
    return AnthropicModel(
        id=model.id,
        display_name=model.id,
        created_at=created.isoformat().replace("+00:00", "Z"),
        max_input_tokens=model.context_length,
        max_tokens=model.context_length,
    )


class ModelLoadView(ApiView):
    """``POST /v1/models/load``: has a worker load a model, for the whole site."""

    scope = Scope.MODELS

    @documented(body=ModelCommand, answer=ModelCommanded, errors=(NotFoundError, ConflictError))
    def post(self, request: Request) -> Response:
        """Have a worker load a model."""
        return _command(
            self.parse(ModelCommand, request.data),
            lambda worker, model: [fleet.load(worker, model)],
        )


class ModelUnloadView(ApiView):
    """``POST /v1/models/unload``: workers unload a model after its runs."""

    scope = Scope.MODELS

    @documented(body=ModelCommand, answer=ModelCommanded, errors=(NotFoundError, ConflictError))
    def post(self, request: Request) -> Response:
        """Have workers drop a model."""
        return _command(self.parse(ModelCommand, request.data), fleet.unload)


class ModelEventsView(ApiView):
    """``GET /v1/models/{id}/events``: a stream of the model's states on each worker.

    It ends with ``[DONE]`` once no load and no unload is in progress.
    """

    scope = Scope.MODELS

    @documented(answer=ModelEvent, event=ModelEvent)
    def get(self, request: Request, model_id: str) -> HttpResponse:
        """Follow the loads and unloads of a model."""
        spec = catalogue().find(model_id)
        if spec is None:
            raise unknown_model(model_id)
        return hand_feed(request, Feed(model_events(spec.id)))


def _command(body: ModelCommand, command: Callable[[str | None, str], list[str]]) -> Response:
    spec = catalogue().find(body.model)
    if spec is None:
        raise unknown_model(body.model)
    try:
        workers = command(body.worker, spec.id)
    except fleet.UnknownWorker as exc:
        raise NotFoundError(str(exc), param="worker", code="worker_not_found") from exc
    except fleet.FleetError as exc:
        raise ConflictError(str(exc), param="model") from exc
    return Response(ModelCommanded(model=spec.id, workers=workers).model_dump())


def unknown_model(model: str) -> NotFoundError:
    """Return the error for a name that no model has."""
    return NotFoundError(
        f"The model '{model[:100]}' does not exist", param="model", code="model_not_found"
    )


def wire_models(specs: Sequence[ModelSpec]) -> list[Model]:
    """Return the models with their current status."""
    live = live_view.workers()
    statuses = {spec.id: fleet.status_among(live, spec.id) for spec in specs}
    waiting = waiting_by_model([id_ for id_, s in statuses.items() if s == ModelStatus.LOADING])
    return [_wire_model(spec, statuses[spec.id], live, waiting.get(spec.id, 0)) for spec in specs]


def wire_route(route: Route, caller: Caller) -> Model:
    """Return a route with the current status of the models that the caller's project may use."""
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
    loading = None
    if status == ModelStatus.LOADING:
        load = load_progress(spec.id, live)
        loading = ModelLoading(expected_s=load.expected_s, progress=load.progress, waiting=waiting)
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
        loading=loading,
        reason=fleet.why_no_host(spec, live) or None,
    )


_POLL_S = 0.5
_DONE = b"data: [DONE]\n\n"
_TRANSIENT = (ModelState.LOADING, ModelState.DRAINING)


async def model_events(model: str) -> AsyncIterator[bytes]:
    """Yield the state of a model as SSE, now and at each change, until no change is pending."""
    sent = b""
    while True:
        event, is_last = await asyncio.to_thread(_model_event, model)
        if event != sent:
            yield event
            sent = event
        if is_last:
            yield _DONE
            return
        await asyncio.sleep(_POLL_S)


def _model_event(model: str) -> tuple[bytes, bool]:
    """Return the event with the model's state, and whether no change is pending."""
    with release_connection_after():
        is_pending = orders.is_pending(model)  # Read before the leases: they show it once seen.
    workers = live_workers()
    reports = [(worker, report) for worker in workers if (report := worker.model(model))]
    status = fleet.status_among([worker for worker, _ in reports], model)
    event = ModelEvent(
        model=model,
        status=status.value,
        workers=[
            ModelWorker(
                id=worker.id,
                host=worker.host,
                state=report.state.value,
                progress=report.progress,
                reason=report.reason or None,
                slots=report.slots,
                busy=report.busy,
            )
            for worker, report in reports
        ],
    )
    is_changing = is_pending or any(report.state in _TRANSIENT for _, report in reports)
    return b"data: " + event.model_dump_json().encode() + b"\n\n", not is_changing


_ADAPTER_ENGINE = "llama_cpp"
_MAX_ADAPTERS = 32
"""Adapters of one model. Each takes memory, and slows down each request."""


class LoadAdapterView(ApiView):
    """``POST /v1/load_lora_adapter``, as in vLLM."""

    scope = Scope.MODELS

    @documented(body=AdapterAdded, answer=AdapterCommanded, errors=(NotFoundError, ConflictError))
    def post(self, request: Request) -> Response:
        """Add a LoRA adapter to a model; its workers reload the model."""
        body = self.parse(AdapterAdded, request.data)
        spec = _adapter_model(body.model)
        name = body.lora_name
        try:
            file = adapter_file(body.lora_path, spec)
        except ValueError as exc:
            raise InvalidRequestError(f"Invalid 'lora_path': {exc}", param="lora_path") from exc
        if catalogue().named(name) is not None:
            raise ConflictError(f"There is a model '{name}'.", param="lora_name")
        if len(adapters.read().to(spec).lora_adapters) >= _MAX_ADAPTERS:
            raise ConflictError(
                f"The model '{spec.id}' has {_MAX_ADAPTERS} adapters, and may not have more."
            )
        if name in spec.lora_adapters or not adapters.add(spec.id, name, file):
            raise ConflictError(
                f"The model '{spec.id}' has an adapter '{name}' already.", param="lora_name"
            )
        return _reloaded(spec, body.lora_name)


class UnloadAdapterView(ApiView):
    """``POST /v1/unload_lora_adapter``, as in vLLM."""

    scope = Scope.MODELS

    @documented(body=AdapterRemoved, answer=AdapterCommanded, errors=(NotFoundError, ConflictError))
    def post(self, request: Request) -> Response:
        """Remove an added LoRA adapter; the workers of its model reload the model."""
        body = self.parse(AdapterRemoved, request.data)
        having = adapters.read().models_with(body.lora_name)
        spec = _adapter_model(body.model or (having[0] if len(having) == 1 else None))
        if not adapters.remove(spec.id, body.lora_name):
            raise NotFoundError(
                f"No adapter '{body.lora_name}' was added to the model '{spec.id}'.",
                param="lora_name",
            )
        return _reloaded(spec, body.lora_name)


class AdaptersView(ApiView):
    """``/lora-adapters?model=``, as in llama-server."""

    @documented(answer=list[ListedAdapter], query=ModelQuery, errors=(NotFoundError,))
    def get(self, request: Request) -> Response:
        """List the adapters of a model with their default scales, for requests without `lora`."""
        adapted = added_view.now().to(_usable_model(request, caller_of(request)))
        scales = dict(adapted.lora)
        return Response(
            [
                {"id": number, "name": name, "path": file.name, "scale": scales.get(name, 0.0)}
                for number, (name, file) in enumerate(adapted.lora_adapters.items())
            ]
        )

    @documented(
        body=list[ScaledAdapter],
        answer=AdaptersScaled,
        query=ModelQuery,
        errors=(NotFoundError,),
    )
    def post(self, request: Request) -> Response:
        """Set the default scales of a model's adapters, for requests without `lora`."""
        caller = caller_of(request)
        require_scope(caller, Scope.MODELS)
        spec = _usable_model(request, caller)
        body = self.parse(ScaledAdapters, {"adapters": request.data})
        names = list(added_view.now().to(spec).lora_adapters)
        if unknown := [entry.id for entry in body.adapters if entry.id >= len(names)]:
            raise InvalidRequestError(
                f"Invalid 'id': the model '{spec.id}' has no adapter {unknown[0]}.", param="id"
            )
        adapters.set_scales(spec.id, {names[entry.id]: entry.scale for entry in body.adapters})
        added_view.forget()
        return Response(AdaptersScaled().model_dump())


def _usable_model(request: Request, caller: Caller) -> ModelSpec:
    """Return the model of the query. Raise NotFoundError if the caller may not use it."""
    spec = _adapter_model(request.query_params.get("model"), caller)
    if not may_use(caller, spec):
        raise unknown_model(spec.id)
    return spec


def _adapter_model(name: str | None, caller: Caller | None = None) -> ModelSpec:
    """Return the model of this name, else the default, else the only one that takes adapters.

    Raise NotFoundError for an unknown name, InvalidRequestError if there is no such model.
    """
    project = caller.project_name if caller else None
    if name is not None:
        spec = catalogue().find(name, project)
        if spec is None:
            raise unknown_model(name)
        if not _takes_adapters(spec):
            raise InvalidRequestError(f"The model '{spec.id}' takes no adapters.", param="model")
        return spec
    default = catalogue().find(DEFAULT_ALIAS, project)
    specs = (spec for spec in catalogue().models.values() if not project or spec.is_for(project))
    candidates = [spec for spec in specs if _takes_adapters(spec)]
    if default is not None and _takes_adapters(default):
        return default
    if len(candidates) != 1:
        raise InvalidRequestError(
            "Missing required parameter: 'model'.", param="model", code="missing_required_parameter"
        )
    return candidates[0]


def _takes_adapters(spec: ModelSpec) -> bool:
    return spec.engine == _ADAPTER_ENGINE and "embedding" not in spec.options


def _reloaded(spec: ModelSpec, lora_name: str) -> Response:
    added_view.forget()
    workers = fleet.reload(spec.id)
    answer = AdapterCommanded(model=spec.id, lora_name=lora_name, workers=workers)
    return Response(answer.model_dump())
