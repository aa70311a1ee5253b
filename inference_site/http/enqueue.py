"""The step every endpoint that generates has in common: admit, enqueue, hand off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from django.conf import settings
from django.http import HttpResponse
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.accounts.keys import Caller
from inference_site.http.authentication import caller_of
from inference_site.http.errors import (
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
)
from inference_site.http.follower import Follower
from inference_site.http.handoff import HandOff, hand_off
from inference_site.http.hub import hub
from inference_site.http.serving import require_served
from worker.assembly import Document
from worker.attendance import attend
from worker.catalog import catalog
from worker.engines.base import ModelSpec
from worker.generation import GenerationRequest
from worker.models import ServiceClass
from worker.queue import Enqueue, enqueue


@dataclass(frozen=True, slots=True)
class Job:
    """A validated request on its way to a worker.

    ``assembly`` is for the assembler of its kind, ``store`` for what keeps the result. ``frames``
    are what its stream begins with; ``record`` writes what is to be committed with it. In the
    ``background`` it outlives its client; otherwise by ``grace_s``, in which it can be read again.
    ``continues`` is the generation whose prefix it has.
    """

    kind: str
    generation_id: str
    request: GenerationRequest
    assembly: dict[str, Any]
    stream: bool
    ignored_params: list[str]
    store: dict[str, Any] | None = None
    service_class: ServiceClass = ServiceClass.FOREGROUND
    end_user: str = ""
    frames: Sequence[bytes] = ()
    record: Callable[[], None] | None = None
    background: bool = False
    grace_s: int = 0
    continues: str = ""


def disconnect_grace_s(caller: Caller) -> int:
    """Return by how many seconds a response that this caller stores outlives its client."""
    grace_s: int = settings.DISCONNECT_GRACE_S
    return grace_s


def served_model(caller: Caller, name: str | None, *, background: bool = False) -> ModelSpec:
    """Return the model of this name; without one, the site's default.

    Raise InvalidRequestError when there is none, NotFoundError for an unknown one, ForbiddenError
    for one that the caller's key does not allow, and UnavailableError when no worker serves it
    (see ``require_served``).
    """
    name = name or settings.DEFAULT_MODEL
    if not name:
        raise InvalidRequestError(
            "Missing required parameter: 'model'.", param="model", code="missing_required_parameter"
        )
    spec = catalog().find(name)
    if spec is None:
        raise NotFoundError(
            f"The model `{name[:100]}` does not exist or you do not have access to it.",
            param="model",
            code="model_not_found",
        )
    if not may_use(caller, spec):
        raise ForbiddenError(
            f"This API key does not allow the model `{spec.id}`.",
            param="model",
            code="model_not_allowed",
        )
    require_served(spec, background=background)
    return spec


def may_use(caller: Caller, spec: ModelSpec) -> bool:
    """Whether the caller's key allows this model."""
    return not caller.allowed_models or spec.id in caller.allowed_models


def submit(request: Request, job: Job) -> HttpResponse:
    """Commit the generation, ring its model's bell, and leave the rest to the relay."""
    follower = start(caller_of(request), _request_id(request), job)
    handoff = HandOff(follower, job.stream, job.frames, cancels=not job.background)
    return _naming_ignored(hand_off(request._request, handoff), job)


def submit_unfollowed(request: Request, job: Job, answer: Response) -> Response:
    """Commit the generation and ring its model's bell; the client does not wait for it."""
    _enqueue(_order(caller_of(request), _request_id(request), job), job, None)
    return _naming_ignored(answer, job)


def start(caller: Caller, request_id: str, job: Job) -> Follower:
    """Commit the generation and ring its model's bell.

    Return who follows its stream, after the frames that it begins with.
    """
    # Before the worker can send anything.
    follower = hub.follow(job.generation_id, len(job.frames) - 1, job.grace_s)
    try:
        if job.grace_s:
            attend(job.generation_id, job.grace_s)
        _enqueue(_order(caller, request_id, job), job, hub.channel)
    except BaseException:
        hub.leave(follower)
        raise
    return follower


def _enqueue(order: Enqueue, job: Job, channel: str | None) -> None:
    document = Document(job.request, job.assembly, job.store)
    enqueue(order, document, channel, job.frames, job.record)


def _request_id(request: Request) -> str:
    request_id: str = request._request.request_id  # type: ignore[attr-defined]  # By ApiHandler.
    return request_id


_AnswerT = TypeVar("_AnswerT", bound=HttpResponse)


def _naming_ignored(response: _AnswerT, job: Job) -> _AnswerT:
    if job.ignored_params:
        response["x-unsupported-params"] = ",".join(job.ignored_params)
    return response


def _order(caller: Caller, request_id: str, job: Job) -> Enqueue:
    return Enqueue(
        kind=job.kind,
        generation_id=job.generation_id,
        model=job.request.model,
        project_id=caller.project_id,
        api_key_id=caller.api_key_id,
        request_id=request_id,
        streamed=job.stream,
        service_class=job.service_class,
        background=job.background,
        end_user=job.end_user,
        ignored_params=job.ignored_params,
        continues=job.continues,
    )
