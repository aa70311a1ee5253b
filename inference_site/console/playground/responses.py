"""The answers of the playground: ask for one, read it again, stop it.

All staff share the playground's project, and not all of them may see others' answers: a user can
continue, read and stop only responses made with their own key.
"""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from django.http import HttpResponse
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.accounts.keys import Caller
from inference_site.admin_pages.labels import money
from inference_site.api.authentication import caller_of
from inference_site.api.payload import parse
from inference_site.api.views import ApiView
from inference_site.catalogue.catalogue import catalogue
from inference_site.console.playground.caller import PlaygroundSession
from inference_site.domain.model_spec import Price
from inference_site.errors.api_errors import InvalidRequestError, NotFoundError
from inference_site.generations.cancellation import stop
from inference_site.generations.models import Generation
from responses_api.state.context import find_response, previous_not_found
from responses_api.state.reading import current_response
from responses_api.views.responses import ResponsesView
from responses_api.wire.items import ItemReference
from responses_api.wire.request import ResponseRequest


class PlaygroundResponsesView(ResponsesView):
    """``POST /console/playground/responses``: the same as ``POST /v1/responses``."""

    authentication_classes = (PlaygroundSession,)
    http_method_names = ["post"]

    def post(self, request: Request) -> HttpResponse:
        """Create a response. Raise InvalidRequestError if it uses another user's responses."""
        _require_own(caller_of(request), parse(ResponseRequest, request.data))
        return super().post(request)


class PlaygroundResponseView(ApiView):
    """``GET /admin/playground/responses/{id}``: the response, and what its run took."""

    authentication_classes = (PlaygroundSession,)

    def get(self, request: Request, response_id: str) -> Response:
        """Get a response of this user, in any state."""
        caller = caller_of(request)
        generation = _own(caller, response_id)
        stored = find_response(caller.project_id, response_id)
        return Response(
            {"response": current_response(stored).model_dump(), "run": _run(generation)}
        )


class PlaygroundStopView(ApiView):
    """``POST /console/playground/responses/{id}/stop``."""

    authentication_classes = (PlaygroundSession,)

    def post(self, request: Request, response_id: str) -> Response:
        """Stop a waiting or running response of this user."""
        return Response({"stopped": stop(_own(caller_of(request), response_id))})


def _run(generation: Generation) -> dict[str, Any]:
    """Return times in milliseconds, the speed in tokens per second and the cost as a text."""
    spec = catalogue().find(generation.model)
    is_free = not generation.cost and (spec is None or spec.price == Price())
    return {
        "queue_ms": generation.queue_ms,
        "ttft_ms": generation.ttft_ms,
        "tokens_per_s": generation.tokens_per_s,
        "cost": "no price set" if is_free else money(generation.cost),
    }


def _own(caller: Caller, response_id: str) -> Generation:
    """Return the generation of a response. Raise NotFoundError for one of another user."""
    found = _generations_of(caller).filter(public_id=response_id.replace("\0", "")).first()
    if found is None:
        raise NotFoundError(
            f"Response with id '{response_id[:100]}' not found.", code="response_not_found"
        )
    return found


def _generations_of(caller: Caller) -> QuerySet[Generation]:
    return Generation.objects.filter(api_key_id=caller.api_key_id)


def _require_own(caller: Caller, body: ResponseRequest) -> None:
    """Raise InvalidRequestError if the request reads data of other users of the playground."""
    if body.conversation_id is not None:
        raise InvalidRequestError("The playground has no conversations.", param="conversation")
    if any(isinstance(item, ItemReference) for item in body.input or ()):
        raise InvalidRequestError("The playground takes no references to items.", param="input")
    previous = body.previous_response_id
    if previous is not None and not _generations_of(caller).filter(public_id=previous).exists():
        raise previous_not_found(previous)
