"""Views of responses: ``/v1/responses`` and the paths below it."""

from __future__ import annotations

import time
from functools import partial

from django.conf import settings
from django.http import HttpResponse
from prometheus_client import Counter
from rest_framework.parsers import BaseParser
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.core.errors.api_errors import (
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
)
from inference_site.core.site_settings.models import disconnect_grace_s, site_settings
from inference_site.gateway.api.authentication import HasPermission, StaffSession, caller_of
from inference_site.gateway.api.form_bodies import form_parser
from inference_site.gateway.api.json_bodies import JsonParser
from inference_site.gateway.api.paging import keep_position
from inference_site.gateway.api.payload import parse
from inference_site.gateway.api.schema import ListObject, documented
from inference_site.gateway.api.views import ApiView
from inference_site.gateway.feedback_views import FeedbackView
from inference_site.gateway.handoff import HandOff, Wait, call_again, hand_off
from inference_site.gateway.hub import hub
from inference_site.gateway.request_fields.capabilities import require_fields
from inference_site.gateway.submission.context_bound import ContextBound, fit_to_context
from inference_site.gateway.submission.model_access import served_model
from inference_site.gateway.submission.submit import Submission, respond
from inference_site.runs.cancellation import cancel
from inference_site.runs.queue import new_id
from inference_site.runs.queue_position import position_of_waiting
from inference_site.runs.streams.request_documents import Assembly, Document
from responses_api.assembler import COMPACTION, INPUT_TOKENS, RESPONSE, CompactionAssembly
from responses_api.context import HistoryLimit, continued_response_id, resolve
from responses_api.creation import create
from responses_api.deletion import delete
from responses_api.events import DONE
from responses_api.listing import PATH, list_responses, page_of_input, position
from responses_api.mapping import to_counting_request, to_summary_request
from responses_api.models import ENDED, StoredResponse
from responses_api.storage import ConversationLocked
from responses_api.stored_responses import current_response, find_response
from responses_api.wire.objects import (
    CompactedResponse,
    DeletedResponse,
    InputTokens,
    ListedItem,
    ResponseEvent,
    ResponseObject,
)
from responses_api.wire.requests import (
    CompactRequest,
    InputItemsQuery,
    InputTokensRequest,
    ResponseRequest,
    ResponsesQuery,
    StreamQuery,
    check_include,
)

_CANCEL_WAIT_S = 10.0
_ATTACHMENTS = Counter(
    "inference_reader_attachments",
    "Clients that began to read the stream of a response after the request that made it.",
    ["source"],
)
for _source in ("log", "stored", "compacted"):
    _ATTACHMENTS.labels(_source)  # Shown at 0 from the start.


class ResponsesView(ApiView):
    """``/v1/responses``. The form-encoded body is that of Open Responses."""

    parser_classes: tuple[type[BaseParser], ...] = (JsonParser, form_parser(ResponseRequest))

    @documented(body=ResponseRequest, answer=ResponseObject, event=ResponseEvent, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Create a response."""
        body = parse(ResponseRequest, request.data)
        caller = caller_of(request)
        grace_s = disconnect_grace_s(caller.disconnect_grace_s)
        creation = create(caller, body, grace_s=grace_s)
        try:
            if body.background and not body.stream:
                queued = Response({**creation.response, "status": "queued"})
                return respond(request, creation.submission, queued)
            return respond(request, creation.submission)
        except ConversationLocked as locked:
            call_again(request, locked.wait)
            raise

    @documented(query=ResponsesQuery, answer=ListObject[ResponseObject], errors=(NotFoundError,))
    def get(self, request: Request) -> Response:
        """List the stored responses."""
        return list_responses(request)


class ResponseView(ApiView):
    """``/v1/responses/{id}``."""

    @documented(query=StreamQuery, answer=ResponseObject, event=ResponseEvent)
    def get(self, request: Request, response_id: str) -> HttpResponse:
        """Get a response, or its events from the beginning or after `starting_after`."""
        caller = caller_of(request)
        stored = find_response(caller.project_id, response_id)
        query = request.query_params
        check_include(query)
        if query.get("stream", "false").lower() in ("true", "1"):
            has_client = stored.status not in ENDED and not stored.background
            grace_s = disconnect_grace_s(caller.disconnect_grace_s) if has_client else 0
            after = query.get("starting_after", "")
            if after and (not after.isdecimal() or len(after) > 9):
                raise InvalidRequestError(
                    "Invalid 'starting_after': expected a whole number.", param="starting_after"
                )
            return stream(request, stored, int(after) if after else -1, grace_s)
        found = current_response(stored)
        place = position_of_waiting(response_id) if found.status == "queued" else None
        return Response(found.model_dump(), headers={} if place is None else place.headers)

    @documented(answer=DeletedResponse, errors=(ConflictError,))
    def delete(self, request: Request, response_id: str) -> Response:
        """Delete a response; a running one is cancelled first."""
        stored = find_response(caller_of(request).project_id, response_id)
        if not _stop(request, stored):
            raise ConflictError("The response has not ended yet. Please try again.")
        keep_position(stored.project_id, PATH, response_id, position(stored))
        delete(stored)
        return Response({"id": response_id, "object": "response", "deleted": True})


class ResponseCancelView(ApiView):
    """``POST /v1/responses/{id}/cancel``."""

    @documented(answer=ResponseObject)
    def post(self, request: Request, response_id: str) -> Response:
        """Cancel a background response; one that has ended is returned as it is."""
        stored = find_response(caller_of(request).project_id, response_id)
        if not stored.background:
            raise InvalidRequestError("Cannot cancel a synchronous response.")
        _stop(request, stored)
        stopped = find_response(stored.project_id, response_id)
        return Response(current_response(stopped).model_dump())


class ResponseFeedbackView(FeedbackView[StoredResponse]):
    """``/v1/responses/{id}/feedback``."""

    def find(self, project_id: int, answer_id: str) -> StoredResponse:
        """Return a response. Raise NotFoundError."""
        return find_response(project_id, answer_id)


class ResponseInputItemsView(ApiView):
    """``GET /v1/responses/{id}/input_items``."""

    @documented(query=InputItemsQuery, answer=ListObject[ListedItem])
    def get(self, request: Request, response_id: str) -> Response:
        """List the input items of a response, with those of its history."""
        stored = find_response(caller_of(request).project_id, response_id)
        return page_of_input(request, stored)


class ResponseInputTokensView(ApiView):
    """``POST /v1/responses/input_tokens``. A worker of the model counts; nothing is stored."""

    @documented(body=InputTokensRequest, answer=InputTokens, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Count the input tokens of a request."""
        body = parse(InputTokensRequest, request.data)
        caller = caller_of(request)
        continues = partial(continued_response_id, caller.project_id, body)
        model = served_model(caller, body.model, body, continues=continues)
        context = resolve(
            caller.project_id,
            body.input,
            body.previous_response_id,
            body.conversation_id,
            HistoryLimit(ContextBound.of(model.spec)),
        )
        counting = to_counting_request(body, context.items(), model, caller.project_id)
        submission = Submission(
            INPUT_TOKENS,
            new_id("tok-"),
            caller,
            Document(counting, Assembly()),
            ignored_params=body.ignored_params,
            subject="input",
        )
        return respond(request, submission)


class ResponseCompactView(ApiView):
    """``POST /v1/responses/compact``. Its output can be the input of the next response."""

    @documented(body=CompactRequest, answer=CompactedResponse, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Compact a conversation."""
        body = parse(CompactRequest, request.data)
        caller = caller_of(request)
        continues = partial(continued_response_id, caller.project_id, body)
        model = served_model(caller, body.model, body, continues=continues)
        require_fields(model, "chat", body)
        limit = HistoryLimit(ContextBound.of(model.spec), may_truncate=True)
        context = resolve(caller.project_id, body.input, body.previous_response_id, None, limit)
        items = [*context.before, *context.new]
        kept = [item.wire() for item in items if item.data.get("role") == "user"]
        asked = to_summary_request(body.instructions, context.items(), model, caller.project_id)
        assembly = CompactionAssembly(new_id("resp_"), int(time.time()), kept, caller.project_id)
        submission = Submission(
            COMPACTION,
            assembly.response_id,
            caller,
            Document(fit_to_context(asked, "input"), assembly),
            ignored_params=body.ignored_params,
            subject="input",
        )
        return respond(request, submission)


class WatchView(ApiView):
    """``GET /console/responses/{id}/events``: the stream, for the response's page in the admin."""

    authentication_classes = (StaffSession,)
    permission_classes = (HasPermission,)
    permissions = ("responses_api.view_storedresponse", "responses_api.view_content")

    def get(self, request: Request, response_id: str) -> HttpResponse:
        """Send all events, live if it still runs. The response does not depend on this reader."""
        if not site_settings().show_content:
            raise ForbiddenError("Prompts and answers are shown to nobody.", code="content_hidden")
        stored = StoredResponse.objects.find(response_id)
        if stored is None:
            raise NotFoundError
        return stream(request, stored, after=-1, grace_s=0)


def stream(request: Request, stored: StoredResponse, after: int, grace_s: int = 0) -> HttpResponse:
    """Answer with the stream from the event after number ``after`` on, live if it still runs.

    With a disconnect grace ``grace_s``, the response continues as long as this client reads.
    """
    has_ended = stored.status in ENDED
    is_compacted = has_ended and stored.deltas is None
    # Without deltas in the row, frames were lost while it ran, so the log may have a gap.
    follower = hub.resume(
        stored.public_id,
        RESPONSE,
        after,
        grace_s,
        has_ended=has_ended,
        skips_log=is_compacted,
        is_stored=True,
    )
    if follower is None:  # It was deleted a moment ago.
        raise NotFoundError
    source = "log" if follower.stored is None else "compacted" if is_compacted else "stored"
    _ATTACHMENTS.labels(source).inc()
    handoff = HandOff(
        follower,
        stream=True,
        cancels=False,
        closing=[DONE] if settings.RESPONSES_SEND_DONE else (),
    )
    response = hand_off(request, handoff)
    if source == "compacted":
        response["x-replay"] = "compacted"
    return response


def _stop(request: Request, stored: StoredResponse) -> bool:
    """Cancel a response; return whether it has ended.

    If its worker has not confirmed that yet, the view is called again after its ending.
    """
    if stored.status in ENDED or cancel([stored.public_id]):
        return True
    call_again(request, Wait(stored.public_id, stored.public_id, _CANCEL_WAIT_S))
    return False
