"""The model of a request: whether the caller may use it, who serves it, and what it can do."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from django.conf import settings

from inference_site.accounts.keys import Caller
from inference_site.api.payload import WireRequest
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.routes import Route
from inference_site.domain.errors import ModelServerUnreachable
from inference_site.domain.model_spec import ModelSpec
from inference_site.errors.api_errors import (
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from inference_site.errors.exceptions import LOAD_RETRY_S
from inference_site.fleet import fleet, placement
from inference_site.fleet.fleet import AlreadyLoading, ModelStatus, NotLoadable
from inference_site.fleet.leases import live_view
from inference_site.model_store.adapters import added_view
from inference_site.observability.logs import add_log_fields
from inference_site.submission.routing import Asked, asked_of, ranked

_NAME = re.compile(r"[\w./:@+-]{1,100}", re.ASCII)
_TRY_AGAIN_S = 60.0
"""A model that could not be loaded is not tried again on demand for so long."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model of the catalogue, and what requests to it may ask for.

    ``route`` is the one by whose name it was asked for, if any.
    """

    spec: ModelSpec
    capabilities: frozenset[str]
    route: str = ""


def resolved(spec: ModelSpec) -> ResolvedModel:
    """Return the model with its capabilities, by the worker that serves it."""
    adapted = added_view.now().to(spec)
    # What was added may not be announced yet; then the worker says so.
    takes_lora = {"lora"} if adapted.lora_adapters else set()
    return ResolvedModel(adapted, fleet.capabilities_of(spec) | takes_lora)


def served_model(
    caller: Caller,
    name: str | None,
    body: WireRequest | None = None,
    *,
    background: bool = False,
    continues: Callable[[], str] | None = None,
) -> ResolvedModel:
    """Return the model of this name; without one, the site's default.

    The name of an adapter of one model is that model with it. The name of a route is
    the one of its models that this request goes to (see ``routing``), by its ``body`` and by the
    generation whose context it ``continues``.

    Raise InvalidRequestError when there is none, NotFoundError for one that is unknown or for other
    projects, ForbiddenError for one that the caller's key does not allow, and UnavailableError when
    no worker serves it (see ``require_served``).
    """
    name = name or settings.DEFAULT_MODEL
    if not name.strip():
        raise InvalidRequestError(
            "Missing required parameter: 'model'.", param="model", code="missing_required_parameter"
        )
    if _NAME.fullmatch(name):
        add_log_fields(model=name)
    spec = catalogue().named(name, caller.project_name)
    if spec is None and (adapted := _adapted(caller, name)) is not None:
        model = served_model(caller, adapted, background=background)
        return replace(model, spec=replace(model.spec, lora=((name, 1.0),)))
    if spec is None:
        raise unknown_model(name)
    require_allowed(caller, spec)
    if isinstance(spec, Route):
        earlier = continues() if continues is not None else ""
        asked = asked_of(caller, body, earlier, background=background)
        target = _served_target(spec, caller, asked, background=background)
        return replace(resolved(target), route=spec.id)
    require_served(spec, background=background)
    return resolved(spec)


def require_allowed(caller: Caller, spec: ModelSpec | Route) -> None:
    """Raise ForbiddenError for a model or route that the caller's key does not allow.

    A route that is allowed is allowed with all its models, and nothing else allows it.
    """
    if not may_use(caller, spec):
        raise ForbiddenError(
            f"This API key does not allow the model `{spec.id}`.",
            param="model",
            code="model_not_allowed",
        )


def _served_target(route: Route, caller: Caller, asked: Asked, *, background: bool) -> ModelSpec:
    """Return the model of the route that can take the request, or else will in time.

    A target that is loaded on demand is, while a fallback answers. Raise UnavailableError.
    """
    candidates = route.candidates(caller.project_name, asked.key, asked.earlier)
    refusals = []
    for spec in ranked(candidates, route, caller, asked):
        try:
            require_served(spec, background=background)
        except UnavailableError as exc:
            refusals.append(exc)
            if exc.code == "model_loading":
                break  # All that come after it are not served either; it is enough to load one.
        else:
            if fleet.is_on_demand(candidates[0].spec):
                with suppress(UnavailableError):
                    require_served(candidates[0].spec)
            return spec
    raise refusals[0]


def unknown_model(name: str) -> NotFoundError:
    """Return the error for a name that no model of the caller's has."""
    message = f"The model `{name[:100]}` does not exist or you do not have access to it."
    return NotFoundError(message, param="model", code="model_not_found")


def _adapted(caller: Caller, adapter: str) -> str | None:
    """Return the id of the only model of the caller's that has an adapter of this name."""
    mine = (s for s in catalogue().models.values() if s.is_for(caller.project_name))
    found = [spec.id for spec in map(added_view.now().to, mine) if adapter in spec.lora_adapters]
    return found[0] if len(found) == 1 else None


def may_use(caller: Caller, spec: ModelSpec | Route) -> bool:
    """Whether the caller's key allows this model or route."""
    return not caller.allowed_models or spec.id in caller.allowed_models


def require_served(spec: ModelSpec, *, background: bool = False) -> None:
    """Return when the request can be queued: a worker serves its model, or will in time.

    Of a model that is loading, requests in the ``background`` wait as long as it takes, the others
    for ``LOAD_WAIT_S``. A request has a model loaded that is not preloaded, with ``LOAD_ON_DEMAND``
    any. While the only worker of a model is being replaced, all requests wait; so they do for a
    server that is away and may come back, in the foreground for ``SERVER_WAIT_S``.
    Raise UnavailableError, ``model_loading``, ``no_worker`` or ``engine_unavailable``.
    """
    if live_view.serving_now(spec.id):
        return
    if live_view.away_since(spec.id):
        if not background and not settings.SERVER_WAIT_S:
            raise UnavailableError(str(ModelServerUnreachable()), code="engine_unavailable")
        return
    status = fleet.status_of(spec.id)
    if status != ModelStatus.FAILED and fleet.restarting([spec.id]):
        return
    if not _is_loading(spec, status):
        why = placement.why_no_host(spec, live_view.workers())
        raise UnavailableError(
            f"No worker serves the model `{spec.id}` now. {why or 'Please try again later.'}",
            code="no_worker",
        )
    if not background and not settings.LOAD_WAIT_S:
        raise UnavailableError(
            f"The model `{spec.id}` is being loaded. Please try again later.",
            code="model_loading",
            retry_after_s=LOAD_RETRY_S,
        )


def _is_loading(spec: ModelSpec, status: ModelStatus) -> bool:
    """Whether the model is on its way, if need be because this request had it loaded."""
    if status == ModelStatus.LOADING:
        return True
    if not fleet.is_on_demand(spec) or (status == ModelStatus.FAILED and _failed_just_now(spec)):
        return False
    try:
        fleet.load(None, spec.id)
    except AlreadyLoading:
        return True
    except NotLoadable:
        return False
    return True


def _failed_just_now(spec: ModelSpec) -> bool:
    tried_at = max((served.since for served in live_view.having(spec.id)), default=0.0)
    return time.time() - tried_at < _TRY_AGAIN_S
