"""Views of responses."""

from __future__ import annotations

from django.conf import settings
from django.http import HttpResponse, QueryDict
from prometheus_client import Counter
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.api.authentication import caller_of
from inference_site.api.payload import parse
from inference_site.api.schema import ListObject, documented
from inference_site.api.views import ApiView
from inference_site.errors.api_errors import ConflictError, InvalidRequestError, NotFoundError
from inference_site.gateway.handoff import HandOff, Wait, call_again, hand_off
from inference_site.gateway.hub.hub import hub
from inference_site.gateway.hub.past_streams import attach
from inference_site.generations.cancellation import cancel
from inference_site.generations.queue_position import position_of_waiting
from inference_site.submission.submit import disconnect_grace_s, respond
from responses_api.models import ENDED, StoredResponse
from responses_api.output.events import DONE
from responses_api.request.creation import create
from responses_api.state.context import find_response
from responses_api.state.deletion import delete
from responses_api.state.listing import list_responses, page_of_input
from responses_api.state.reading import current_response
from responses_api.state.replay import remake_of
from responses_api.state.storage import ConversationLocked
from responses_api.wire.events import ResponseEvent
from responses_api.wire.output import AnyItem
from responses_api.wire.queries import InputItemsQuery, ResponsesQuery, StreamQuery
from responses_api.wire.request import ResponseRequest
from responses_api.wire.response import DeletedResponse, ResponseObject

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
        place = position_of_waiting(response_id) if found.status == "queued" else None
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
