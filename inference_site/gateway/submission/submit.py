"""Submission: a validated request is admitted, becomes a row of the queue, and is followed."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from django.conf import settings
from django.http import HttpResponse
from django.utils import timezone
from rest_framework.request import Request

from inference_site.accounts.budgets import BudgetExhausted, values_of
from inference_site.accounts.keys import Caller
from inference_site.accounts.rate_limits import give_back_priority
from inference_site.core.domain.request import FilePart, GenerationRequest
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.core.observability.tracing import current_traceparent, trace_id
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.files.models import StoredFile
from inference_site.gateway.access import arrived_at
from inference_site.gateway.api.payload import ignored_params_header
from inference_site.gateway.follower import Follower
from inference_site.gateway.handoff import HandOff, hand_off, outcome_of
from inference_site.gateway.hub import hub
from inference_site.gateway.idempotency.models import KeyClaim
from inference_site.gateway.idempotency.requests import GRACE_S, answered_with, claim_of
from inference_site.gateway.submission.admission import Admission, admit
from inference_site.gateway.submission.context_bound import fit_to_context
from inference_site.gateway.submission.model_access import loading_comment
from inference_site.runs.cancellation import set_reader_deadline
from inference_site.runs.kinds import kind_of
from inference_site.runs.models import Generation, ServiceClass
from inference_site.runs.queue import IsWanted, WithRow, enqueue, latest_with_key, note_key
from inference_site.runs.queue_position import QueuePosition
from inference_site.runs.streams.request_documents import Document, Opening
from inference_site.runs.usage.accounting import settle_for_request
from inference_site.runs.usage.dimensions import tags_of

_OF_THIS_REQUEST = ("input", "messages", "prompt")
"""Fields whose content comes with a request; that of others came with an earlier one."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A validated request: what to generate, how the answer is written, who pays, what is stored.

    ``document`` is what the worker needs. The stream begins with ``frames``; ``texts`` are long
    texts that the frames and the document repeat. A stream that ``is_resumable`` may be read again
    some time after it has ended; one that ``is_replayable`` is rebuilt from the database then, so
    its log need not be kept. ``with_row`` is written in the transaction that accepts the request.
    The generation goes on without its client in the ``background``, else for ``grace_s`` seconds.
    ``continues`` is the generation whose prompt and answer are the beginning of this prompt;
    ``cache_key`` is the client's name for prompts that begin alike.
    ``subject`` is the field of the API's request that holds the prompt, if its name is not the
    engine's. With a ``key_claim`` it is accepted only if no other request has the idempotency key.
    """

    kind: str
    generation_id: str
    caller: Caller
    document: Document[Any]
    stream: bool = False
    ignored_params: list[str] = field(default_factory=list)
    service_class: ServiceClass = ServiceClass.FOREGROUND
    end_user: str = ""
    metadata: Mapping[str, str] | None = None
    frames: Sequence[bytes] = ()
    texts: Sequence[bytes] = ()
    is_resumable: bool = False
    is_replayable: bool = False
    with_row: WithRow | None = None
    background: bool = False
    grace_s: int = 0
    continues: str = ""
    cache_key: str = ""
    subject: str = ""
    key_claim: KeyClaim | None = None


def follow(submission: Submission) -> Follower:
    """Follow the submission's stream, after its first ``frames``."""
    after = len(submission.frames) - 1
    return hub.follow(submission.generation_id, after, submission.grace_s)


def submit(
    submission: Submission,
    request_id: str,
    follower: Follower | None = None,
    is_wanted: IsWanted = lambda: True,
) -> dict[str, str]:
    """Admit and commit the generation, and wake its model's workers; return headers for the answer.

    ``follower`` reads its stream, and exists before a worker can send anything; None when no client
    waits. It leaves the hub if this raises. ``is_wanted`` is asked just before the commit.
    """
    try:
        document = submission.document
        _require_files(document.request, submission.caller.project_id)
        request = fit_to_context(document.request, submission.subject)
        if request is not document.request:
            submission = replace(submission, document=replace(document, request=request))
        tags = tags_of(submission.metadata)
        values = values_of(submission.end_user, tags)
        with admit(submission.caller, request, submission.with_row, values) as admission:
            if follower is not None and submission.grace_s:
                set_reader_deadline(submission.generation_id, submission.grace_s)
            channel = None if follower is None else hub.channel
            try:
                place = _enqueue(submission, request_id, admission, tags, channel, is_wanted)
            except BudgetExhausted:
                # Generations that have ended may have left some budget.
                settle_for_request(submission.caller.project_id)
                place = _enqueue(submission, request_id, admission, tags, channel, is_wanted)
    except BaseException:
        if follower is not None:
            hub.leave(follower)
        if submission.service_class == ServiceClass.PRIORITY:
            give_back_priority(submission.caller)
        raise
    return admission.headers | place.headers | {"x-model": request.model}


def _require_files(request: GenerationRequest, project_id: int) -> None:
    """Raise InvalidRequestError if a file that the request names is not the project's or too large.

    Files of earlier turns may have been deleted: the worker puts a note in their place.
    """
    parts = [part for message in request.messages for part in message.parts]
    named = [part for part in parts if isinstance(part, FilePart) and part.file_id is not None]
    named = [part for part in named if part.param.startswith(_OF_THIS_REQUEST)]
    if not named:
        return
    files = StoredFile.objects.readable(project_id)
    ids = {part.file_id for part in named if "\0" not in (part.file_id or "")}
    sizes = dict(files.filter(public_id__in=ids).values_list("public_id", "size_bytes"))
    for part in named:
        if part.file_id not in sizes:
            message = f"Invalid '{part.param}': there is no file '{(part.file_id or '')[:100]}'."
            raise InvalidRequestError(message, param=part.param)
        if sizes[part.file_id] > settings.MEDIA_MAX_BYTES:
            raise InvalidRequestError(
                f"Invalid '{part.param}': the images and files of a request may have at most "
                f"{settings.MEDIA_MAX_BYTES} bytes, all together.",
                param=part.param,
            )


def _enqueue(
    submission: Submission,
    request_id: str,
    admission: Admission,
    tags: list[str],
    channel: str | None,
    is_wanted: IsWanted,
) -> QueuePosition:
    row = Generation(
        public_id=submission.generation_id,
        kind=submission.kind,
        project_id=submission.caller.project_id,
        api_key_id=submission.caller.api_key_id,
        model=submission.document.request.model,
        request_id=request_id,
        service_class=submission.service_class,
        streamed=submission.stream,
        background=submission.background,
        end_user=submission.end_user,
        tags=tags,
        trace_id=trace_id(current_traceparent.get()),
        ignored_params=submission.ignored_params,
        reserved_tokens=admission.estimate.tokens,
        reserved_cost=admission.estimate.cost,
        created_at=admission.at,
        admission_ms=_ms_until(admission.at),
    )
    with_row = admission if admission.has_more_to_write else None
    owner = row.project_id, row.model, submission.cache_key
    continues = submission.continues or latest_with_key(*owner)
    needs_log = submission.is_resumable and not submission.is_replayable
    opening = Opening(submission.frames, submission.texts, needs_log)
    position = enqueue(
        row,
        submission.document,
        channel,
        opening,
        continues,
        with_row,
        before_row=submission.key_claim,
        is_wanted=is_wanted,
    )
    note_key(*owner, row.public_id)
    return position


def _ms_until(at: dt.datetime) -> float | None:
    """Return the milliseconds from the arrival of the current request, if any, to a time."""
    if (arrived := arrived_at.get()) is None:
        return None
    since = (timezone.now() - at).total_seconds()
    return max(0.0, time.monotonic() - arrived - since) * 1000


def respond(
    request: Request, submission: Submission, answer: HttpResponse | None = None
) -> HttpResponse:
    """Submit a view's request and leave its answer to the relay.

    With an ``answer`` the client gets that and does not wait for the generation.
    """
    if (claim := claim_of(request)) is not None:
        if not submission.background:
            # The same request may be sent again, and is then answered from this stream.
            grace_s = max(submission.grace_s, GRACE_S)
            submission = replace(submission, is_resumable=True, grace_s=grace_s)
        claim = replace(claim, generation_id=submission.generation_id, grace_s=submission.grace_s)
        claim = claim if answer is None else answered_with(claim, answer)
        submission = replace(submission, key_claim=claim)
    follower = follow(submission) if answer is None else None
    request_id: str = request._request.request_id  # type: ignore[attr-defined]  # By ApiHandler.
    outcome = outcome_of(request._request)
    headers = submit(submission, request_id, follower, lambda: not outcome.is_given_up)
    outcome.started_id = submission.generation_id
    if follower is not None:
        model, id_ = submission.document.request.model, submission.generation_id
        kind = kind_of(submission.kind)

        def comment() -> bytes:
            with release_connection_after():
                return loading_comment(model, id_)

        handoff = HandOff(
            follower,
            submission.stream,
            submission.frames,
            cancels=not submission.background,
            form=kind.form,
            ping=kind.ping,
            comment=comment if submission.stream else None,
        )
        answer = hand_off(request._request, handoff)
    assert answer is not None
    for name, value in (headers | ignored_params_header(submission.ignored_params)).items():
        answer[name] = value
    return answer
