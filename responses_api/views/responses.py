"""Views of responses."""

from __future__ import annotations

import time
from functools import partial

from django.conf import settings
from django.http import HttpResponse, QueryDict
from prometheus_client import Counter
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.api.authentication import caller_of
from inference_site.api.payload import parse
from inference_site.api.schema import ListObject, documented
from inference_site.api.staff import HasPermission, StaffSession
from inference_site.api.views import ApiView
from inference_site.errors.api_errors import (
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
)
from inference_site.gateway.handoff import HandOff, Wait, call_again, hand_off
from inference_site.gateway.hub.hub import hub
from inference_site.gateway.hub.past_streams import attach
from inference_site.generations.cancel import cancel
from inference_site.generations.places import place_of_waiting
from inference_site.generations.queue import new_id
from inference_site.request_fields.capabilities import require_fields
from inference_site.site_settings.current import site_settings
from inference_site.streams.request_documents import Assembly, Document
from inference_site.submission.context_bound import ContextBound
from inference_site.submission.model_access import served_model
from inference_site.submission.submit import Submission, disconnect_grace_s, respond
from responses_api.assembler import COMPACTION, INPUT_TOKENS, CompactionAssembly
from responses_api.context import Room, continued_by, resolve
from responses_api.creation import create
from responses_api.deletion import delete
from responses_api.events import DONE
from responses_api.listing import list_responses, page_of_input
from responses_api.mapping import to_counting_request, to_summary_request
from responses_api.models import ENDED, StoredResponse
from responses_api.storage import ConversationLocked
from responses_api.stored_responses import current_response, find_response, remake_of
from responses_api.wire.objects import (
    AnyItem,
    CompactedResponse,
    DeletedResponse,
    InputTokens,
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
)

_CANCEL_WAIT_S = 10.0

_REATTACHED = Counter(
    "inference_reader_attachments",
    "Readers that came to the stream of a response after it was made.",
    ["source"],
)
for _source in ("log", "stored", "compacted"):
    _REATTACHED.labels(_source)  # Shown at 0 from the start.


class ResponsesView(ApiView):
    """``/v1/responses``."""

    @documented(body=ResponseRequest, answer=ResponseObject, event=ResponseEvent, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Create a response."""
        body = parse(ResponseRequest, request.data)
        caller = caller_of(request)
        creation = create(caller, body, grace_s=disconnect_grace_s(caller))
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
        """Get a response, or its events: from the beginning, or after one that is known."""
        stored = find_response(caller_of(request).project_id, response_id)
        query = request.query_params
        if query.get("stream", "false").lower() in ("true", "1"):
            has_client = stored.status not in ENDED and not stored.background
            grace_s = disconnect_grace_s(caller_of(request)) if has_client else 0
            return stream(request, stored, _starting_after(query), grace_s)
        found = current_response(stored)
        place = place_of_waiting(response_id) if found.status == "queued" else None
        return Response(found.model_dump(), headers={} if place is None else place.headers)

    @documented(answer=DeletedResponse, errors=(ConflictError,))
    def delete(self, request: Request, response_id: str) -> Response:
        """Delete a response; one that has not ended is stopped first."""
        stored = find_response(caller_of(request).project_id, response_id)
        if not _stop(request, stored):
            raise ConflictError("The response has not ended yet. Please try again.")
        delete(stored)
        return Response({"id": response_id, "object": "response", "deleted": True})


class ResponseCancelView(ApiView):
    """``POST /v1/responses/{id}/cancel``."""

    @documented(answer=ResponseObject)
    def post(self, request: Request, response_id: str) -> Response:
        """Stop a response in the background; one that has ended is answered as it is."""
        stored = find_response(caller_of(request).project_id, response_id)
        if not stored.background:
            raise InvalidRequestError("Cannot cancel a synchronous response.")
        _stop(request, stored)
        stopped = find_response(stored.project_id, response_id)
        return Response(current_response(stopped).model_dump())


class ResponseInputItemsView(ApiView):
    """``GET /v1/responses/{id}/input_items``: all that the response was given."""

    @documented(query=InputItemsQuery, answer=ListObject[AnyItem])
    def get(self, request: Request, response_id: str) -> Response:
        """List all that a response was given."""
        stored = find_response(caller_of(request).project_id, response_id)
        return page_of_input(request, stored)


def stream(request: Request, stored: StoredResponse, after: int, grace_s: int = 0) -> HttpResponse:
    """Hand the stream over from the event after this number on, live if it still runs.

    With ``grace_s`` the reader counts as one whom the response goes on for.
    """
    has_ended = stored.status in ENDED
    is_compacted = has_ended and stored.deltas is None
    follower = hub.follow(stored.public_id, after, grace_s)
    try:
        # Frames of one without deltas may have been lost while it ran: its log has a hole then.
        known = None if is_compacted else attach(follower, has_ended=has_ended)
        remake = remake_of(stored, after) if known is None else None
    except BaseException:
        hub.leave(follower)
        raise
    source = "log" if remake is None else "compacted" if is_compacted else "stored"
    _REATTACHED.labels(source).inc()
    handoff = HandOff(
        follower,
        stream=True,
        known=known or (),
        remake=remake,
        cancels=False,
        closing=[DONE] if settings.RESPONSES_SEND_DONE else (),
    )
    response = hand_off(request, handoff)
    if source == "compacted":
        response["x-replay"] = "compacted"
    return response


def _starting_after(query: QueryDict) -> int:
    given = query.get("starting_after", "")
    if not given:
        return -1
    if not given.isdecimal() or len(given) > 9:
        raise InvalidRequestError(
            "Invalid 'starting_after': expected a whole number.", param="starting_after"
        )
    return int(given)


def _stop(request: Request, stored: StoredResponse) -> bool:
    """Have a response stopped; return whether it has ended.

    While its worker has not confirmed that, the view is called again after its ending.
    """
    if stored.status in ENDED:
        return True
    if cancel([stored.public_id]):
        return True
    call_again(request, Wait(stored.public_id, stored.public_id, _CANCEL_WAIT_S))
    return False


class ResponseInputTokensView(ApiView):
    """``POST /v1/responses/input_tokens``: counted by a worker of the model; nothing is stored."""

    @documented(body=InputTokensRequest, answer=InputTokens, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Count the tokens of an input."""
        body = parse(InputTokensRequest, request.data)
        caller = caller_of(request)
        continues = partial(continued_by, caller.project_id, body)
        model = served_model(caller, body.model, body, continues=continues)
        context = resolve(
            caller.project_id,
            body.input,
            body.previous_response_id,
            body.conversation_id,
            Room(ContextBound.of(model.spec)),
        )
        asked = to_counting_request(body, context.placed(), model, caller.project_id)
        submission = Submission(
            INPUT_TOKENS,
            new_id("tok-"),
            caller,
            Document(asked, Assembly()),
            ignored_params=body.ignored_params,
            subject="input",
        )
        return respond(request, submission)


class ResponseCompactView(ApiView):
    """``POST /v1/responses/compact``: what it answers can be the input of the next response."""

    @documented(body=CompactRequest, answer=CompactedResponse, queued=True)
    def post(self, request: Request) -> HttpResponse:
        """Compact a conversation."""
        body = parse(CompactRequest, request.data)
        caller = caller_of(request)
        continues = partial(continued_by, caller.project_id, body)
        model = served_model(caller, body.model, body, continues=continues)
        require_fields(model, "chat", body)
        room = Room(ContextBound.of(model.spec))
        context = resolve(caller.project_id, body.input, body.previous_response_id, None, room)
        items = [*context.before, *context.new]
        kept = [item.wire() for item in items if item.data.get("role") == "user"]
        assembly = CompactionAssembly(new_id("resp_"), int(time.time()), kept, caller.project_id)
        submission = Submission(
            COMPACTION,
            assembly.response_id,
            caller,
            Document(to_summary_request(body.instructions, items, model), assembly),
            ignored_params=body.ignored_params,
            subject="input",
        )
        return respond(request, submission)


class WatchView(ApiView):
    """``GET /console/responses/{id}/events``: the same events that the client gets."""

    authentication_classes = (StaffSession,)
    permission_classes = (HasPermission,)
    permissions = ("responses_api.view_storedresponse", "responses_api.view_content")

    def get(self, request: Request, response_id: str) -> HttpResponse:
        """Send all events from the beginning, and go on live; leaving stops nothing."""
        if not site_settings().show_content:
            raise ForbiddenError("Prompts and answers are shown to nobody.", code="content_hidden")
        rows = StoredResponse.objects.select_related("previous", "conversation")
        stored = rows.filter(public_id=response_id).first()
        if stored is None:
            raise NotFoundError
        return stream(request, stored, after=-1, grace_s=0)
