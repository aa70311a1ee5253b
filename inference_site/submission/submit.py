"""The step every endpoint that generates has in common: admit, enqueue, hand off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from django.conf import settings
from django.http import HttpResponse
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.accounts.keys import Caller
from inference_site.api.authentication import caller_of
from inference_site.api.idempotency import GRACE_S, HEADER
from inference_site.domain.request import GenerationRequest
from inference_site.gateway.follower import Follower
from inference_site.gateway.handoff import HandOff, hand_off
from inference_site.gateway.hub import hub
from inference_site.generations.disconnect_grace import attend
from inference_site.generations.models import ServiceClass
from inference_site.generations.queue import Enqueue, enqueue
from inference_site.streams.request_documents import Document
from inference_site.submission.admission import Admission, accepting, admitted, retried


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
    own: int | None = caller.disconnect_grace_s
    return settings.DISCONNECT_GRACE_S if own is None else own


def submit(request: Request, job: Job) -> HttpResponse:
    """Admit and commit the generation, ring its model's bell, and leave the rest to the relay."""
    if HEADER in request.headers and not job.background:
        job = replace(job, grace_s=max(job.grace_s, GRACE_S))  # Who sends it again finds it.
    with admitted(caller_of(request), job.request) as admission:
        follower = _follow(admission, _request_id(request), job)
    handoff = HandOff(follower, job.stream, job.frames, cancels=not job.background)
    return _with_headers(hand_off(request._request, handoff), job, admission)


def submit_unfollowed(request: Request, job: Job, answer: Response) -> Response:
    """Admit and commit the generation, and ring its bell; the client does not wait for it."""
    admission = start_unfollowed(caller_of(request), _request_id(request), job)
    return _with_headers(answer, job, admission)


def start_unfollowed(caller: Caller, request_id: str, job: Job) -> Admission:
    """Admit and commit the generation, and ring its model's bell; nobody waits for it."""
    with admitted(caller, job.request) as admission:
        _enqueue(admission, request_id, job, None)
    return admission


def start(caller: Caller, request_id: str, job: Job) -> Follower:
    """Admit and commit the generation, and ring its model's bell.

    Return who follows its stream, after the frames that it begins with.
    """
    with admitted(caller, job.request) as admission:
        return _follow(admission, request_id, job)


def _follow(admission: Admission, request_id: str, job: Job) -> Follower:
    # Before the worker can send anything.
    follower = hub.follow(job.generation_id, len(job.frames) - 1, job.grace_s)
    try:
        if job.grace_s:
            attend(job.generation_id, job.grace_s)
        _enqueue(admission, request_id, job, hub.channel)
    except BaseException:
        hub.leave(follower)
        raise
    return follower


def _enqueue(admission: Admission, request_id: str, job: Job, channel: str | None) -> None:
    order = _order(admission, request_id, job)
    document = Document(job.request, job.assembly, job.store)
    record = accepting(admission, job.record)
    retried(admission, lambda: enqueue(order, document, channel, job.frames, record))


def _request_id(request: Request) -> str:
    request_id: str = request._request.request_id  # type: ignore[attr-defined]  # By ApiHandler.
    return request_id


_AnswerT = TypeVar("_AnswerT", bound=HttpResponse)


def _with_headers(response: _AnswerT, job: Job, admission: Admission) -> _AnswerT:
    for name, value in admission.headers.items():
        response[name] = value
    if job.ignored_params:
        response["x-unsupported-params"] = ",".join(job.ignored_params)
    return response


def _order(admission: Admission, request_id: str, job: Job) -> Enqueue:
    caller = admission.caller
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
        reserved_tokens=admission.estimate.tokens,
        reserved_cost=admission.estimate.cost,
        created_at=admission.at,
        continues=job.continues,
    )
