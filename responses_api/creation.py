"""From a request to what is submitted: for the endpoint, the WebSocket and a second attempt."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from django.conf import settings
from pydantic_core import to_json

from inference_site.accounts.keys import Caller
from inference_site.catalogue.catalogue import catalogue
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.generations.models import ServiceClass
from inference_site.generations.queue import new_id
from inference_site.request_fields.capabilities import ignored_fields
from inference_site.request_fields.mapping import require_stream_for_options
from inference_site.streams.request_documents import Document
from inference_site.streams.shared_text import long_texts
from inference_site.submission.context_bound import ContextBound, fitted
from inference_site.submission.model_access import ResolvedModel, resolved, served_model
from inference_site.submission.submit import Submission
from responses_api.assembler import RESPONSE, ResponseAssembly
from responses_api.context import (
    Context,
    Memory,
    Room,
    continued_by,
    history_of,
    items_before,
    resolve,
)
from responses_api.events import accepted
from responses_api.items import IdentifiedItem
from responses_api.mapping import ENCRYPTED_REASONING, hosted_tools, to_generation_request
from responses_api.models import StoredResponse
from responses_api.storage import accept
from responses_api.stored_responses import new_response, stored_response
from responses_api.wire.requests import ResponseRequest

_ECHOED = ("instructions", "tools", "text")
"""Fields that every event of the response's states repeats, and that may be of any length."""


@dataclass(frozen=True, slots=True)
class NewResponse:
    """A response that is stored: it and its input are written with the generation's row."""

    project_id: int
    response: dict[str, Any]
    body: ResponseRequest
    context: Context

    def write(self) -> None:
        """Write them. Raise ConversationLocked (see ``generations.queue.WithRow``)."""
        accept(self.project_id, self.response, self.body, self.context)


@dataclass(frozen=True, slots=True)
class Creation:
    """A response that is about to be: its object, its context and what is submitted."""

    response: dict[str, Any]
    context: Context
    submission: Submission


def create(
    caller: Caller, body: ResponseRequest, memory: Memory | None = None, *, grace_s: int = 0
) -> Creation:
    """Return what is to be submitted. Raise ApiError for what cannot be done.

    ``grace_s`` is by how much one that is stored may outlive its client.
    """
    _refuse_contradictions(body)
    project_id = caller.project_id
    model = served_model(
        caller,
        body.model,
        body,
        background=bool(body.background),
        continues=partial(continued_by, project_id, body),
    )
    context = resolve(
        project_id,
        body.input,
        body.previous_response_id,
        body.conversation_id,
        Room(ContextBound.of(model.spec), may_cut=body.truncation == "auto"),
        memory,
    )
    if context.is_unstored and body.store is not False:
        raise InvalidRequestError(
            "Invalid 'store': what builds on a response that is not stored cannot be stored.",
            param="store",
        )
    response = new_response(
        body,
        response_id=new_id("resp_"),
        created_at=int(time.time()),
        model=model.spec.id,
        previous_response_id=context.previous_response_id,
        conversation_id=context.conversation.public_id if context.conversation else None,
        metadata=body.metadata or {},
    ).model_dump()
    document = to_document(project_id, body, context, model, response)
    submission = _submission(caller, body, model, response, context, document, grace_s)
    return Creation(response, context, submission)


def _submission(
    caller: Caller,
    body: ResponseRequest,
    model: ResolvedModel,
    response: dict[str, Any],
    context: Context,
    document: Document[ResponseAssembly],
    grace_s: int,
) -> Submission:
    is_background, is_stored = bool(body.background), response["store"]
    is_late = is_background or body.service_tier == "flex"
    service_class = ServiceClass.BACKGROUND if is_late else ServiceClass.FOREGROUND
    return Submission(
        RESPONSE,
        response["id"],
        caller,
        document,
        stream=bool(body.stream),
        subject="input",
        ignored_params=[*ignored_fields(model, body, document.request), *hosted_tools(body)],
        service_class=service_class,
        end_user=body.safety_identifier or body.user or "",
        frames=accepted(response) if document.assembly.emits else (),
        texts=long_texts(to_json(response[field]) for field in _ECHOED),
        is_replayable=is_stored,
        with_row=(NewResponse(caller.project_id, response, body, context) if is_stored else None),
        background=is_background,
        grace_s=grace_s if is_stored and not is_background else 0,
        continues=context.continues,
    )


def to_document(
    project_id: int,
    body: ResponseRequest,
    context: Context,
    model: ResolvedModel,
    response: dict[str, Any],
) -> Document[ResponseAssembly]:
    """Return the request document. Raise InvalidRequestError for what the model cannot do."""
    asked = to_generation_request(body, context.placed(), model, project_id)
    asked = fitted(asked, "input")  # Before some megabytes become events.
    assembly = ResponseAssembly(
        response,
        emits=bool(body.stream) or response["store"],
        sends_done=settings.RESPONSES_SEND_DONE,
        seal_for=project_id if ENCRYPTED_REASONING in (body.include or ()) else None,
    )
    return Document(asked, assembly)


def _refuse_contradictions(body: ResponseRequest) -> None:
    if body.background and body.store is False:
        raise InvalidRequestError(
            "Invalid 'background': a response in the background must be stored.",
            param="background",
        )
    if body.logprobs is False and body.includes_logprobs:
        raise InvalidRequestError(
            "Invalid 'logprobs': it differs from 'include', which names them.", param="logprobs"
        )
    require_stream_for_options(body.stream_options, body.stream)


def rebuild(generation_id: str) -> Document[ResponseAssembly] | None:
    """Return the request document of a stored response anew."""
    stored = _find(generation_id)
    spec = None if stored is None else catalogue().find(stored.model)
    if stored is None or spec is None:
        return None
    new = [
        IdentifiedItem(item.public_id, item.data)
        for item in stored.items.filter(is_output=False).order_by("position")
    ]
    body = ResponseRequest.model_validate(stored.request)
    room = Room(ContextBound.of(spec), may_cut=body.truncation == "auto")
    previous = stored.previous
    before = history_of(previous, room) if previous else items_before(stored, room)
    context = Context(new, before, previous, stored.conversation)
    response = stored_response(stored, []).model_dump()
    return to_document(stored.project_id, body, context, resolved(spec), response)


def _find(public_id: str) -> StoredResponse | None:
    rows = StoredResponse.objects.select_related("previous", "conversation")
    return rows.filter(public_id=public_id).first()
