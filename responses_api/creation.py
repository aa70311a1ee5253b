"""Creates responses: from a request to the submission of its generation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from django.conf import settings
from pydantic_core import to_json

from inference_site.accounts.keys import Caller
from inference_site.catalogue.catalogue import catalogue
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.request_fields.capabilities import ignored_fields
from inference_site.gateway.request_fields.mapping import require_stream_for_options
from inference_site.gateway.request_fields.moderation import moderation_options
from inference_site.gateway.submission.admission import service_tier
from inference_site.gateway.submission.context_bound import ContextBound, fit_to_context
from inference_site.gateway.submission.model_access import (
    ResolvedModel,
    moderation_model,
    served_model,
    with_capabilities,
)
from inference_site.gateway.submission.submit import Submission
from inference_site.runs.queue import new_id
from inference_site.runs.streams.batches import long_texts
from inference_site.runs.streams.request_documents import Document
from responses_api.assembler import RESPONSE, ResponseAssembly
from responses_api.client_tools import TOOL_ITEMS, OfferedTools, offer_tools
from responses_api.context import (
    Context,
    ContextItem,
    HistoryLimit,
    UnstoredHistories,
    continued_response_id,
    conversation_items_before,
    history_of,
    resolve,
)
from responses_api.events import accepted_frames
from responses_api.items import IdentifiedItem, ItemData, holds_context, unseal_context
from responses_api.mapping import ENCRYPTED_REASONING, to_generation_request
from responses_api.mcp import narrow
from responses_api.mcp_approvals import answer_questions, is_approved, questions_of
from responses_api.models import StoredResponse
from responses_api.prompt_templates import with_template
from responses_api.storage import accept
from responses_api.stored_responses import new_response, stored_response
from responses_api.wire.requests import ResponseRequest

_ECHOED = ("instructions", "tools", "text")
"""Fields of any length that every state event repeats."""


@dataclass(frozen=True, slots=True)
class NewResponse:
    """A response to be stored; implements ``inference_site.runs.queue.WithRow``."""

    project_id: int
    response: dict[str, Any]
    body: ResponseRequest
    context: Context

    def write(self) -> None:
        """Write the response and its input. Raise ConversationLocked."""
        accept(self.project_id, self.response, self.body, self.context)
        answer_questions(self.context.approvals, self.project_id, self.response["id"])


@dataclass(frozen=True, slots=True)
class Creation:
    """A new response: its object, its context and the submission of its generation."""

    response: dict[str, Any]
    context: Context
    submission: Submission


def create(
    caller: Caller,
    body: ResponseRequest,
    unstored: UnstoredHistories | None = None,
    *,
    grace_s: int = 0,
) -> Creation:
    """Return the new response, which is not submitted yet. Raise ApiError.

    ``grace_s`` is the disconnect grace of stored foreground responses.
    """
    _refuse_contradictions(body)
    body = with_template(caller.project_id, body)
    project_id, is_background = caller.project_id, bool(body.background)
    model = served_model(
        caller,
        body.model,
        body,
        background=is_background,
        continues=partial(continued_response_id, project_id, body),
    )
    context = resolve(
        project_id,
        body.input,
        body.previous_response_id,
        body.conversation_id,
        _history_limit(body, model.spec),
        unstored,
    )
    if context.is_unstored and body.store is not False:
        raise InvalidRequestError(
            "Invalid 'store': what builds on a response that is not stored cannot be stored.",
            param="store",
        )
    judge = None
    if body.moderation is not None:
        judge = moderation_model(caller, body.moderation.model)
    response = new_response(
        body,
        response_id=new_id("resp_"),
        created_at=int(time.time()),
        model=model.spec.id,
        previous_response_id=context.previous_response_id,
        conversation_id=context.conversation.public_id if context.conversation else None,
        metadata=body.metadata or {},
    ).model_dump()
    offered = _offered(body, context, project_id)
    _check_approvals(project_id, body, context, offered)
    document = to_document(project_id, body, context, model, response, offered, judge)
    # Last: a request that is refused takes no priority. The document has this object, too.
    tier = service_tier(caller, body.service_tier, background=is_background)
    response["service_tier"] = tier.name  # What is stored and shown is the tier that it gets.
    if body.service_tier is not None:
        body = body.model_copy(update={"service_tier": tier.name})
    is_stored = response["store"]
    submission = Submission(
        RESPONSE,
        response["id"],
        caller,
        document,
        stream=bool(body.stream),
        subject="input",
        ignored_params=[
            *ignored_fields(model, body, document.request),
            *(f"tools.{type_}" for type_ in offered.unsupported),
        ],
        service_class=tier.service_class,
        end_user=body.safety_identifier or body.user or "",
        metadata=body.metadata,
        frames=accepted_frames(response) if document.assembly.emits else (),
        texts=long_texts(to_json(response[field]) for field in _ECHOED),
        is_replayable=is_stored,
        with_row=NewResponse(project_id, response, body, context) if is_stored else None,
        background=is_background,
        grace_s=grace_s if is_stored and not is_background else 0,
        continues=context.continues,
        cache_key=body.prompt_cache_key or _continuation_id(body),
    )
    return Creation(response, context, submission)


def batch_submission(caller: Caller, body: ResponseRequest) -> Submission:
    """Return the submission of a response that a line of a batch asks for. Raise ApiError."""
    return create(caller, body).submission


def _continuation_id(body: ResponseRequest) -> str:
    """Return the id of the related requests, which go to the worker that has served the last."""
    return (body.background_options and body.background_options.continuation_id) or ""


def _refuse_contradictions(body: ResponseRequest) -> None:
    if body.background and body.store is False:
        raise InvalidRequestError(
            "Invalid 'background': a response in the background must be stored.",
            param="background",
        )
    options = body.background_options
    if options and options.completion_window in ("2h", "8h"):
        is_standard = body.service_tier in (None, "auto", "default")
        if not body.background or body.stream or not is_standard:
            raise InvalidRequestError(
                f"Invalid 'background_options.completion_window': '{options.completion_window}' "
                "requires 'background': true, the default 'service_tier', and no 'stream'.",
                param="background_options.completion_window",
            )
    if body.logprobs is False and body.includes_logprobs:
        raise InvalidRequestError(
            "Invalid 'logprobs': it is false, but 'include' asks for log probabilities.",
            param="logprobs",
        )
    require_stream_for_options(body.stream_options, body.stream)


def to_document(
    project_id: int,
    body: ResponseRequest,
    context: Context,
    model: ResolvedModel,
    response: dict[str, Any],
    offered: OfferedTools,
    judge: ResolvedModel | None,
) -> Document[ResponseAssembly]:
    """Return the request document. Raise InvalidRequestError for fields the model does not have.

    ``judge`` is the model of ``moderation``.
    """
    request = to_generation_request(body, context.items(), model, project_id, offered)
    # Before the response is encoded, which may take megabytes.
    request = fit_to_context(request, "input")
    tool_items: list[ItemData] = []  # Those that a compaction seals.
    if request.compaction is not None:
        items = _items_of_prompt(context, project_id)
        tool_items = [item.data for item in items if item.data["type"] in TOOL_ITEMS]
    assembly = ResponseAssembly(
        response,
        emits=bool(body.stream) or response["store"],
        sends_done=settings.RESPONSES_SEND_DONE,
        seal_for=project_id if ENCRYPTED_REASONING in (body.include or ()) else None,
        routes=offered.uncommon_routes,
        first_calls=[asdict(call) for call in offered.first_calls],
        most_calls=min(body.max_tool_calls or settings.TOOL_CALLS_MAX, settings.TOOL_CALLS_MAX),
        site_tools=[*offered.site_tools, *moderation_options(body.moderation, judge, request)],
        compacts_for=None if request.compaction is None else project_id,
        tool_items=tool_items,
    )
    return Document(request, assembly)


def _history_limit(body: ResponseRequest, spec: ModelSpec) -> HistoryLimit:
    """Return how much of a history is read: with a compaction, too, only what the model can."""
    may_truncate = body.truncation == "auto" or bool(body.context_management) or body.compacts_now
    return HistoryLimit(ContextBound.of(spec), may_truncate)


def _offered(body: ResponseRequest, context: Context, project_id: int) -> OfferedTools:
    items = _items_of_prompt(context, project_id)
    new = [item.data for item in context.new]
    offered = offer_tools(
        body.tools or (),
        items,
        project_id=project_id,
        new_items=new,
        include=body.include or (),
    )
    narrow(offered, body.tool_choice)
    return offered


def _check_approvals(
    project_id: int, body: ResponseRequest, context: Context, offered: OfferedTools
) -> None:
    """Raise InvalidRequestError for an approval of a call that this response would not make."""
    answers = context.approvals
    if not (questions := questions_of(answers, project_id)):
        return
    if body.store is False:
        raise InvalidRequestError(
            "Invalid 'store': a response to an approval request must be stored, so that the call "
            "is made once.",
            param="store",
        )
    made = {call.fields.get("approval_request_id") for call in offered.first_calls}
    for answer in answers:
        id_ = answer.get("approval_request_id")
        if id_ in questions and is_approved(answer) and id_ not in made:
            raise InvalidRequestError(
                "Invalid 'tools': they have no MCP server "
                f"'{questions[id_].server_label}', whose call is approved.",
                param="tools",
            )


def _items_of_prompt(context: Context, project_id: int) -> Iterator[ContextItem]:
    """Yield the items that a prompt is made of; for a compaction, those it has sealed."""
    for item in context.items():
        if holds_context(item.data):
            param = f"{item.param}.encrypted_content"
            sealed = unseal_context(item.data["encrypted_content"], project_id, param)
            yield from (ContextItem(data, param) for data in sealed.items)
        else:
            yield item


def rebuild(generation_id: str) -> Document[ResponseAssembly] | None:
    """Return the request document of a stored response, rebuilt from the database.

    Return None if the response is not stored, or its model is not in the catalogue any more.
    """
    stored = StoredResponse.objects.find(generation_id)
    spec = None if stored is None else catalogue().find(stored.model)
    if stored is None or spec is None:
        return None
    new = [
        IdentifiedItem(item.public_id, item.data)
        for item in stored.items.filter(is_output=False).order_by("position")
    ]
    body = ResponseRequest.model_validate(stored.request)
    limit = _history_limit(body, spec)
    previous = stored.previous
    before = history_of(previous, limit) if previous else conversation_items_before(stored, limit)
    context = Context(new, before, previous, stored.conversation)
    response = stored_response(stored, []).model_dump()
    judge = None if body.moderation is None else catalogue().find(body.moderation.model)
    return to_document(
        stored.project_id,
        body,
        context,
        with_capabilities(spec),
        response,
        _offered(body, context, stored.project_id),
        None if judge is None else with_capabilities(judge),
    )
