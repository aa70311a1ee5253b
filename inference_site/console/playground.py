"""The playground: a page on which staff try the models.

The page calls the API's own views with the admin's session. No key reaches the browser, and CSRF
tokens protect its requests. Requests are accounted to the playground's project and to the user's
own key in it. That key has no secret; operators can revoke and limit it. A user can continue and
stop only responses made with that key.
"""

from __future__ import annotations

from itertools import chain, count
from typing import Any

import redis.exceptions
from django.contrib.admin.views.decorators import staff_member_required
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.accounts.keys import Caller, caller_of_key
from inference_site.accounts.models import ApiKey, Project
from inference_site.api.authentication import caller_of
from inference_site.api.payload import parse
from inference_site.api.staff import StaffSession
from inference_site.api.views import ApiView
from inference_site.catalogue.catalogue import catalogue
from inference_site.errors.api_errors import ForbiddenError, InvalidRequestError
from inference_site.fleet.fleet import ModelStatus, capabilities_of, statuses_among, workers
from inference_site.generations.models import Generation
from inference_site.generations.operator_actions import stop
from inference_site.submission.model_access import may_use
from responses_api.views.responses import ResponsesView
from responses_api.wire.items import ItemReference
from responses_api.wire.request import ResponseRequest

_NAME = "playground"

# Name, label, step, least and greatest value of each field.
SAMPLERS = (
    ("temperature", "Temperature", "0.1", "0", "2"),
    ("top_p", "Top p", "0.05", "0", "1"),
    ("top_k", "Top k", "1", "-1", ""),
    ("min_p", "Min p", "0.01", "0", "1"),
    ("presence_penalty", "Presence penalty", "0.1", "-2", "2"),
    ("frequency_penalty", "Frequency penalty", "0.1", "-2", "2"),
    ("seed", "Seed", "1", "", ""),
    ("max_output_tokens", "Max output tokens", "1", "1", ""),
)


def _page(request: HttpRequest) -> HttpResponse:
    """Render the page."""
    caller = playground_caller(request.user)
    context: dict[str, Any] = {
        "caller": caller,
        "samplers": SAMPLERS,
        "origin": f"{request.scheme}://{request.get_host()}",
    }
    try:
        context["models"] = [] if caller is None else _models(caller)
    except redis.exceptions.RedisError:
        context["is_unreachable"] = True
    return render(request, "console/playground.html", context)


def _models(caller: Caller) -> list[dict[str, str]]:
    """Return the models that this caller can chat with, loaded ones first."""
    usable = [spec for spec in catalogue().listed(caller.project_name) if may_use(caller, spec)]
    chats = [spec.id for spec in usable if "chat" in capabilities_of(spec)]
    statuses = statuses_among(workers(), chats)
    chats.sort(key=lambda id_: statuses[id_] != ModelStatus.LOADED)
    return [{"id": id_, "status": statuses[id_].value} for id_ in chats]


playground = staff_member_required(_page, login_url="admin:login")


class PlaygroundSession(StaffSession):
    """Authenticates a staff user as their own key in the playground's project."""

    def authenticate(self, request: Request) -> tuple[Any, None]:
        """Return the caller.

        Raise AuthenticationError without a session, ForbiddenError if the key was revoked.
        """
        user, _ = super().authenticate(request)
        caller = playground_caller(user)
        if caller is None:
            raise ForbiddenError("Your playground key was revoked.", code="key_revoked")
        return caller, None


def playground_caller(user: Any) -> Caller | None:
    """Return the caller for this user's playground key, None if an operator revoked it."""
    fields = {"project": _project, "name": user.get_username()[:100]}
    key, _ = ApiKey.objects.get_or_create(user=user, defaults=fields)
    return caller_of_key(key.pk)


def _project() -> Project:
    # No grace: an answer ends at once when its user stops it or leaves the page.
    fields = {"name": _free_name, "disconnect_grace_s": 0}
    return Project.objects.get_or_create(is_playground=True, defaults=fields)[0]


def _free_name() -> str:
    """Return a project name that is not taken."""
    names = chain([_NAME], (f"{_NAME}-{number}" for number in count(2)))
    return next(name for name in names if not Project.objects.filter(name=name).exists())


class PlaygroundResponsesView(ResponsesView):
    """``POST /console/playground/responses``: the same as ``POST /v1/responses``."""

    authentication_classes = (PlaygroundSession,)
    http_method_names = ["post"]

    def post(self, request: Request) -> HttpResponse:
        """Create a response. Raise InvalidRequestError if it uses another user's responses."""
        _require_own(caller_of(request), parse(ResponseRequest, request.data))
        return super().post(request)


class PlaygroundStopView(ApiView):
    """``POST /console/playground/responses/{id}/stop``."""

    authentication_classes = (PlaygroundSession,)

    def post(self, request: Request, response_id: str) -> Response:
        """Stop a waiting or running response of this user."""
        own = _generations_of(caller_of(request))
        return Response({"stopped": stop(get_object_or_404(own, public_id=response_id))})


def _generations_of(caller: Caller) -> QuerySet[Generation]:
    return Generation.objects.filter(api_key_id=caller.api_key_id)


def _require_own(caller: Caller, body: ResponseRequest) -> None:
    """Raise InvalidRequestError if the request reads data of other users of the playground.

    All staff share the playground's project, and not all of them may see others' answers.
    """
    if body.conversation_id is not None:
        raise InvalidRequestError("The playground has no conversations.", param="conversation")
    if any(isinstance(item, ItemReference) for item in body.input or ()):
        raise InvalidRequestError("The playground takes no references to items.", param="input")
    previous = body.previous_response_id
    if previous is not None and not _generations_of(caller).filter(public_id=previous).exists():
        raise InvalidRequestError(
            f"Previous response with id '{previous[:100]}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
