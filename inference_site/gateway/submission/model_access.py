"""The model of a request: whether the caller may use it, and which worker serves it when.

A request for a route goes to one of the route's models. That is decided once, when the request is
admitted, from what is known then: which workers serve, how long the queues are, and about how long
the prompt is. A queued request stays with its model.
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
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.fleet import fleet
from inference_site.catalogue.fleet.fleet import AlreadyLoading, ModelStatus, NotLoadable
from inference_site.catalogue.fleet.leases import LiveWorker, ModelState, live_view
from inference_site.catalogue.model_store.adapters import added_view
from inference_site.catalogue.models_file import Route, Target
from inference_site.core.domain.errors import ModelServerUnreachable
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.errors.api_errors import (
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from inference_site.core.errors.exceptions import LOAD_RETRY_S
from inference_site.core.observability.logs import add_log_fields
from inference_site.gateway.api.payload import WireRequest
from inference_site.runs.models import Generation, ServiceClass
from inference_site.runs.queue_position import position_of, position_of_waiting, queue_counts

BYTES_PER_TOKEN = 3
"""The web process has no tokenizer. This estimates rather too many tokens: the prompt must fit."""
_CONVERSATION_KEYS = ("conversation_id", "prompt_cache_key", "safety_identifier", "user")
_PROMPT = {"messages", "instructions", "input", "prompt", "suffix", "tools"}
_TRUNCATION = ("truncate_sequence", "truncation")
_NO_TEXT = frozenset({"data", "encrypted_content", "file_data", "image_url"})
_NAME = re.compile(r"[\w./:@+-]{1,100}", re.ASCII)
_FAILED_FOR_S = 60.0
"""How long a model that could not be loaded is not loaded on demand again."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model of the catalogue, and what requests to it may ask for.

    ``route`` is the name of the route that led to it, if any.
    """

    spec: ModelSpec
    capabilities: frozenset[str]
    route: str = ""

    def name_in_answer(self, asked: str) -> str:
        """Return the model's name in an answer: as the request has it, or a route's target."""
        return self.spec.id if self.route else asked


def with_capabilities(spec: ModelSpec) -> ResolvedModel:
    """Return the model with its added adapters and the capabilities of its worker."""
    adapted = added_view.now().to(spec)
    # Workers may not have announced an adapter that was added just now; they check it themselves.
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
    """Return the model of this name; without a name, the site's default.

    The name of an adapter that one model has stands for that model with the adapter. The name of a
    route stands for the model that ``rank_targets`` finds best for the ``body`` and for the
    generation whose context the request ``continues``.

    Raise InvalidRequestError for a blank name, NotFoundError for a model that is unknown or for
    other projects, ForbiddenError for one that the caller's key does not allow, and
    UnavailableError when no worker serves it (see ``require_served``).
    """
    name = name or settings.DEFAULT_MODEL
    if not name.strip():
        raise InvalidRequestError(
            "Missing required parameter: 'model'.", param="model", code="missing_required_parameter"
        )
    if _NAME.fullmatch(name):
        add_log_fields(model=name)
    spec = catalogue().named(name, caller.project_name)
    if spec is None:
        mine = (s for s in catalogue().models.values() if s.is_for(caller.project_name))
        adapted = [s.id for s in map(added_view.now().to, mine) if name in s.lora_adapters]
        if len(adapted) != 1:
            raise unknown_model(name)
        model = served_model(caller, adapted[0], background=background)
        return replace(model, spec=replace(model.spec, lora=((name, 1.0),)))
    require_allowed(caller, spec)
    if isinstance(spec, Route):
        earlier = continues() if continues is not None else ""
        query = route_query(caller, body, earlier, background=background)
        target = _served_target(spec, caller, query, background=background)
        return replace(with_capabilities(target), route=spec.id)
    require_served(spec, background=background)
    return with_capabilities(spec)


def moderation_model(caller: Caller, name: str) -> ResolvedModel:
    """Return the model that ``moderation.model`` names.

    Raise InvalidRequestError if there is none or it has no moderations; else see ``served_model``.
    """
    param = "moderation.model"
    try:
        model = served_model(caller, name or " ")
    except (NotFoundError, InvalidRequestError) as exc:
        message = f"Invalid '{param}': {exc.message}"
        raise InvalidRequestError(message, param=param, code="model_not_found") from exc
    if "moderation" not in model.capabilities:
        message = f"Invalid '{param}': the model `{model.spec.id}` has no moderations."
        raise InvalidRequestError(message, param=param)
    return model


def unknown_model(name: str) -> NotFoundError:
    """Return the error for a name that no model of the caller's has."""
    message = f"The model `{name[:100]}` does not exist or you do not have access to it."
    return NotFoundError(message, param="model", code="model_not_found")


def may_use(caller: Caller, spec: ModelSpec | Route) -> bool:
    """Whether the caller's key and project allow this model or route."""
    return caller.allows(spec.id)


def require_allowed(caller: Caller, spec: ModelSpec | Route) -> None:
    """Raise ForbiddenError for a model or route that the caller's key or project does not allow.

    A route that is allowed is allowed with all its models; allowing these does not allow the route.
    """
    if not may_use(caller, spec):
        of_key = caller.allowed_models and spec.id not in caller.allowed_models
        raise ForbiddenError(
            f"{'This API key' if of_key else 'The project of this API key'} does not allow the "
            f"model `{spec.id}`.",
            param="model",
            code="model_not_allowed",
        )


def require_served(spec: ModelSpec, *, background: bool = False) -> None:
    """Return if the request can be queued: a worker serves its model, or will in time.

    While a model loads, requests in the ``background`` wait as long as it takes, the others for
    ``LOAD_WAIT_S``. A request starts the load of a model that is loaded on demand. While the only
    worker of a model is being replaced, all requests wait; and while a model server is away,
    requests in the foreground wait for ``SERVER_WAIT_S``.
    Raise UnavailableError with ``model_loading``, ``no_worker`` or ``engine_unavailable``.
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
        why = fleet.why_no_host(spec, live_view.workers())
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
    """Whether the model is being loaded; start its load if it is loaded on demand."""
    if status == ModelStatus.LOADING:
        return True
    if not fleet.is_on_demand(spec):
        return False
    if status == ModelStatus.FAILED:
        failed_at = max((served.since for served in live_view.having(spec.id)), default=0.0)
        if time.time() - failed_at < _FAILED_FOR_S:
            return False
    try:
        fleet.load(None, spec.id)
    except AlreadyLoading:
        return True
    except NotLoadable:
        return False
    return True


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """What decides which model of a route a request goes to.

    ``key`` is the same for requests of one conversation. ``earlier`` is the model that answered the
    turn before. ``tokens`` is the estimated length of the prompt, 0 if it may be truncated to fit.
    """

    key: str = ""
    earlier: str = ""
    tokens: int = 0
    service_class: ServiceClass = ServiceClass.FOREGROUND


def route_query(
    caller: Caller, body: WireRequest | None, continues: str, *, background: bool = False
) -> RouteQuery:
    """Return the query for this request; ``continues`` is the generation whose context it has."""
    if body is None:
        return RouteQuery()
    keys = (getattr(body, name, None) for name in _CONVERSATION_KEYS)
    may_truncate = any(getattr(body, name, None) in (True, "auto") for name in _TRUNCATION)
    may_truncate |= bool(getattr(body, "context_management", None))
    is_late = background or getattr(body, "service_tier", None) == "flex"
    earlier, tokens = "", 0
    if continues:
        rows = Generation.objects.filter(public_id=continues, project_id=caller.project_id)
        row = rows.values_list("model", "input_tokens", "output_tokens").first()
        if row is not None:
            earlier, tokens = row[0], (row[1] or 0) + (row[2] or 0)
    for value in body.model_dump(include=_PROMPT, exclude_unset=True).values():
        match value:
            case [str() | list(), *_]:  # Several prompts: the longest must fit.
                tokens += max(map(_tokens_in, value))
            case _:
                tokens += _tokens_in(value)
    return RouteQuery(
        next((str(key) for key in keys if key), ""),
        earlier,
        0 if may_truncate else tokens,
        ServiceClass.BACKGROUND if is_late else ServiceClass.FOREGROUND,
    )


def _tokens_in(value: Any) -> int:
    """Estimate the tokens of the texts and token ids in a JSON value."""
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


def rank_targets(
    candidates: list[Target], route: Route, caller: Caller, query: RouteQuery
) -> list[ModelSpec]:
    """Return the models of the candidates, best first; equal ones keep their order.

    A model that a worker serves goes before one without, then one whose context has room, then one
    whose queue is not too long. If the prompt is too long for all, the longest context has room. A
    model that meets all three is returned alone.
    """
    needed = min(query.tokens, max(one.context_length for one in candidates))
    known = []
    for one in candidates:
        is_down = not live_view.serving_now(one.spec.id)
        is_crowded = not is_down and _is_crowded(one.spec.id, route, caller, query)
        demerits = (is_down, one.context_length < needed, is_crowded)
        if not any(demerits):
            return [one.spec]
        known.append((demerits, one.spec))
    return [spec for _, spec in sorted(known, key=lambda pair: pair[0])]


def _is_crowded(model: str, route: Route, caller: Caller, query: RouteQuery) -> bool:
    """Whether the queue is full for one more request, or longer than the route allows."""
    parts = queue_counts.of(model).parts(caller.project_id, query.service_class)
    if any(part.refusal for part in parts):
        return True
    if route.max_queue_s is None:
        return False
    wait_s = position_of(model, caller.project_id, query.service_class).wait_s
    return wait_s is not None and wait_s > route.max_queue_s


def _served_target(
    route: Route, caller: Caller, query: RouteQuery, *, background: bool
) -> ModelSpec:
    """Return the best model of the route that can take the request now or in time.

    The first candidate is loaded if it is loaded on demand, while another one answers. Raise
    UnavailableError.
    """
    candidates = route.candidates(caller.project_name, query.key, query.earlier)
    refusals = []
    for spec in rank_targets(candidates, route, caller, query):
        try:
            require_served(spec, background=background)
        except UnavailableError as exc:
            refusals.append(exc)
            if exc.code == "model_loading":
                break  # The others are not served either, and one load is enough.
        else:
            if fleet.is_on_demand(candidates[0].spec):
                with suppress(UnavailableError):
                    require_served(candidates[0].spec)
            return spec
    raise refusals[0]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """A model that is being loaded, on the worker that should have it first.

    ``expected_s`` is None if no load of it has been measured; ``progress``, from 0 to 1, is None if
    it is not known. ``reason`` says what the load waits for, if it does.
    """

    expected_s: int | None = None
    progress: float | None = None
    reason: str = ""


def load_progress(model: str, live: Iterable[LiveWorker]) -> LoadProgress:
    """Return how far these workers are with loading a model."""
    reports = [served for worker in live if (served := worker.model(model)) is not None]
    reports = [served for served in reports if served.state == ModelState.LOADING]
    first = min(
        reports,
        key=lambda r: math.inf if r.expected_s is None else r.expected_s,
        default=None,
    )
    if first is None:
        return LoadProgress()
    expected_s = None if first.expected_s is None else math.ceil(first.expected_s)
    return LoadProgress(expected_s, first.progress, first.reason)


def loading_comment(model: str, public_id: str) -> bytes:
    """Return the SSE comment of a stream that waits for its model to load; b"" if it does not."""
    live = live_view.workers()
    if any(worker.serves(model) for worker in live):
        return b""
    if fleet.status_among(live, model) != ModelStatus.LOADING:
        return b""
    if (place := position_of_waiting(public_id)) is None:
        return b""
    facts = [f"position={max(1, place.position)}"]
    if (expected_s := load_progress(model, live).expected_s) is not None:
        facts.append(f"expected_s={expected_s}")
    return f": loading {' '.join(facts)}\n\n".encode()
