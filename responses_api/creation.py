"""From a request to what is enqueued: for the endpoint, the WebSocket and a second attempt."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from django.conf import settings

from inference_site.accounts.keys import Caller
from inference_site.domain.model_spec import ModelSpec
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.generations.models import ServiceClass
from inference_site.generations.queue import new_id
from inference_site.streams.request_documents import Document
from inference_site.submission.model_access import served_model
from inference_site.submission.submit import Job
from responses_api.assembler import RESPONSE
from responses_api.context import Context, Memory, resolve
from responses_api.events import accepted
from responses_api.mapping import ENCRYPTED_REASONING, to_generation_request
from responses_api.objects import new_response
from responses_api.storage import accept
from responses_api.tools import hosted_tools
from responses_api.wire.request import ResponseRequest


@dataclass(frozen=True, slots=True)
class Creation:
    """A response that is about to be: its object, its context and its job."""

    response: dict[str, Any]
    context: Context
    job: Job


def create(
    caller: Caller, body: ResponseRequest, memory: Memory | None = None, *, grace_s: int = 0
) -> Creation:
    """Return what is to be enqueued. Raise ApiError for what cannot be done.

    ``grace_s`` is by how much one that is stored may outlive its client.
    """
    _refuse_contradictions(body)
    project_id = caller.project_id
    spec = served_model(caller, body.model, background=bool(body.background))
    context = resolve(
        project_id, body.input, body.previous_response_id, body.conversation_id, memory
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
        model=spec.id,
        previous_response_id=context.previous_response_id,
        conversation_id=context.conversation.public_id if context.conversation else None,
        metadata=body.metadata or {},
    ).model_dump()
    document = to_document(project_id, body, context, spec, response)
    job = _job(body, response, context, document)
    if response["store"]:
        job = replace(
            job,
            record=partial(accept, project_id, response, body, context),
            grace_s=0 if job.background else grace_s,
        )
    return Creation(response, context, job)


def _job(
    body: ResponseRequest, response: dict[str, Any], context: Context, document: Document
) -> Job:
    is_background, is_flex = bool(body.background), body.service_tier == "flex"
    return Job(
        RESPONSE,
        response["id"],
        document.request,
        document.assembly,
        stream=bool(body.stream),
        ignored_params=[*body.ignored_params, *hosted_tools(body)],
        service_class=(
            ServiceClass.BACKGROUND if is_background or is_flex else ServiceClass.FOREGROUND
        ),
        end_user=body.safety_identifier or body.user or "",
        frames=accepted(response) if document.assembly["emits"] else (),
        background=is_background,
        continues=context.continues,
    )


def to_document(
    project_id: int,
    body: ResponseRequest,
    context: Context,
    spec: ModelSpec,
    response: dict[str, Any],
) -> Document:
    """Return the request document. Raise InvalidRequestError for what the model cannot do."""
    asked = to_generation_request(body, context.placed(), spec, project_id)
    assembly = {
        "response": response,
        "emits": bool(body.stream) or response["store"],
        "sends_done": settings.RESPONSES_SEND_DONE,
        "seal_for": project_id if ENCRYPTED_REASONING in (body.include or ()) else None,
    }
    return Document(asked, assembly)


def _refuse_contradictions(body: ResponseRequest) -> None:
    if body.background and body.store is False:
        raise InvalidRequestError(
            "Invalid 'background': a response in the background must be stored.",
            param="background",
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
        )
