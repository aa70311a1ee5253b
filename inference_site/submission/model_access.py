"""Which model of a route a request goes to.

It is decided once, when the request is admitted, from what is known then: which workers serve, how
long the queues are, and about how long the prompt is. What is queued stays with its model.

What a client is told while its request waits for its model to be loaded.

The model of a request: whether the caller may use it, who serves it, and what it can do.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from django.conf import settings

from inference_site.accounts.keys import Caller
from inference_site.api.payload import WireRequest
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.routes import Route, Target
from inference_site.domain.errors import ModelServerAway
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
from inference_site.fleet.leases import LiveWorker, ModelState, live_view
from inference_site.generations.models import Generation, ServiceClass
from inference_site.generations.places import crowds, place_of, place_of_waiting
from inference_site.model_store.adapters import added_view
from inference_site.observability.log_context import note

BYTES_PER_TOKEN = 3
"""The web process has no tokenizer. Rather too many tokens than too few: the prompt must fit."""
_KEYS = ("conversation_id", "prompt_cache_key", "safety_identifier", "user")
_PROMPT = {"messages", "instructions", "input", "prompt", "suffix", "tools"}
_MAY_CUT = ("truncate_sequence", "truncation")
_NO_TEXT = frozenset({"data", "encrypted_content", "file_data", "image_url"})


@dataclass(frozen=True, slots=True)
class Asked:
    """What a route heeds of a request.

    ``key`` is what requests of one conversation have in common. ``earlier`` is the model that
    answered the turn before. ``tokens`` are about those of its prompt, 0 if that may be cut to fit.
    """

    key: str = ""
    earlier: str = ""
    tokens: int = 0
    service_class: ServiceClass = ServiceClass.FOREGROUND


def asked_of(
    caller: Caller, body: WireRequest | None, continues: str, *, background: bool = False
) -> Asked:
    """Return what a route heeds of this request, which has the context of another generation."""
    if body is None:
        return Asked()
    keys = (getattr(body, name, None) for name in _KEYS)
    may_cut = any(getattr(body, name, None) in (True, "auto") for name in _MAY_CUT)
    is_late = background or getattr(body, "service_tier", None) == "flex"
    earlier, before = _before(caller, continues)
    new = _tokens_of(body.model_dump(include=_PROMPT, exclude_unset=True))
    return Asked(
        next((str(key) for key in keys if key), ""),
        earlier,
        0 if may_cut else before + new,
        ServiceClass.BACKGROUND if is_late else ServiceClass.FOREGROUND,
    )


def _tokens_of(parts: dict[str, Any]) -> int:
    """Return about how many tokens there are in a prompt, and of several in the longest."""
    total = 0
    for value in parts.values():
        match value:
            case [str() | list(), *_]:
                total += max(map(_tokens_in, value))
            case _:
                total += _tokens_in(value)
    return total


def _tokens_in(value: Any) -> int:
    size, tokens, left = 0, 0, [value]
    while left:
        match left.pop():
            case str(text):
                size += 0 if text.startswith("data:") else len(text.encode())
            case bool():
                pass
            case int():
                tokens += 1  # A token's id.
            case list(items):
                left.extend(items)
            case dict(fields):
                left.extend(held for name, held in fields.items() if name not in _NO_TEXT)
            case _:
                pass
    return tokens + -(-size // BYTES_PER_TOKEN)


def ranked(candidates: list[Target], route: Route, caller: Caller, asked: Asked) -> list[ModelSpec]:
    """Return the models that may answer, best first, and else in the order of the candidates.

    One that a worker serves goes before one without, then one whose context has room, then one
    whose queue is not too long. If a prompt is too long for all, the longest context has room. When
    one has all of this, it is the only one.
    """
    needed = min(asked.tokens, max(one.context_length for one in candidates))

    def demerits(one: Target) -> tuple[bool, bool, bool]:
        is_down = not live_view.serving_now(one.spec.id)
        is_crowded = not is_down and _is_crowded(one.spec.id, route, caller, asked)
        return is_down, one.context_length < needed, is_crowded

    known = []
    for one in candidates:
        found = demerits(one)
        if not any(found):
            return [one.spec]
        known.append((found, one.spec))
    return [spec for _, spec in sorted(known, key=lambda pair: pair[0])]


def _before(caller: Caller, continues: str) -> tuple[str, int]:
    """Return the model of the generation before, and the tokens of its prompt and answer."""
    if not continues:
        return "", 0
    rows = Generation.objects.filter(public_id=continues, project_id=caller.project_id)
    model, read, written = rows.values_list("model", "input_tokens", "output_tokens").first() or (
        *("", 0, 0),
    )
    return model, (read or 0) + (written or 0)


def _is_crowded(model: str, route: Route, caller: Caller, asked: Asked) -> bool:
    """Whether one more would find the queue full, or longer than the route allows."""
    parts = crowds.of(model).parts(caller.project_id, asked.service_class)
    if any(part.refusal for part in parts):
        return True
    if route.max_queue_s is None:
        return False
    wait_s = place_of(model, caller.project_id, asked.service_class).wait_s
    return wait_s is not None and wait_s > route.max_queue_s


@dataclass(frozen=True, slots=True)
class Loading:
    """A model on its way, in the worker that should have it first.

    ``expected_s`` is None where no load of it has been seen; ``progress``, from 0 to 1, where it is
    not known. ``reason`` says what it waits for, if it does.
    """

    expected_s: int | None = None
    progress: float | None = None
    reason: str = ""


def loading_of(model: str, live: Iterable[LiveWorker]) -> Loading:
    """Return how far these workers are with a model that is loading."""
    reports = [served for worker in live if (served := worker.model(model)) is not None]
    reports = [served for served in reports if served.state == ModelState.LOADING]
    first = min(
        reports,
        key=lambda r: math.inf if r.expected_s is None else r.expected_s,
        default=None,
    )
    if first is None:
        return Loading()
    expected_s = None if first.expected_s is None else math.ceil(first.expected_s)
    return Loading(expected_s, first.progress, first.reason)


def loading_comment(model: str, public_id: str) -> bytes:
    """Return what a stream says while it waits for its model; nothing if it waits for no load."""
    live = live_view.workers()
    if any(worker.serves(model) for worker in live):
        return b""
    if fleet.status_among(live, model) != ModelStatus.LOADING:
        return b""
    if (place := place_of_waiting(public_id)) is None:
        return b""
    said = [f"position={max(1, place.position)}"]
    if (expected_s := loading_of(model, live).expected_s) is not None:
        said.append(f"expected_s={expected_s}")
    return f": loading {' '.join(said)}\n\n".encode()


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
        note(model=name)
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
            raise UnavailableError(str(ModelServerAway()), code="engine_unavailable")
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
