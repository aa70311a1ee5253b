"""The playground: its page, and the requests that the page sends.

The page calls the API's own views with the admin's session. So no key reaches the browser, and CSRF
tokens protect its requests. Requests are accounted to the playground's project and to the user's
own key in it; this key has no secret, and operators can revoke and limit it. All users share the
project, but a user can continue, read and stop only responses made with their own key.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, count
from typing import Annotated, Any, Literal

import redis.exceptions
from django.conf import settings
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from pydantic import Field, ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from completions.models import StoredCompletion
from inference_site.accounts.keys import Caller, caller_of_key
from inference_site.accounts.models import ApiKey, Project
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.fleet.fleet import ModelStatus, capabilities_of, status_among
from inference_site.catalogue.fleet.leases import live_workers
from inference_site.console.playground.models import LONGEST_CONTENT, LONGEST_NAME, Preset
from inference_site.core.admin_pages.labels import money
from inference_site.core.domain.model_spec import Price
from inference_site.core.errors.api_errors import (
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
)
from inference_site.core.site_settings.models import site_settings
from inference_site.gateway.api.authentication import StaffSession, caller_of
from inference_site.gateway.api.json_bodies import JsonParser
from inference_site.gateway.api.payload import NO_NUL, WireRequest, parse
from inference_site.gateway.api.views import ApiView
from inference_site.gateway.feedback import Rating, give, staff_author
from inference_site.gateway.feedback_views import FeedbackRequest
from inference_site.gateway.submission.model_access import may_use
from inference_site.runs.cancellation import stop
from inference_site.runs.models import Generation
from responses_api.context import decode_item, newest_input_of, previous_not_found
from responses_api.items import ItemData, to_data
from responses_api.models import Conversation, Item, StoredResponse
from responses_api.prompt_templates import tried_messages
from responses_api.stored_responses import current_response, find_response
from responses_api.views.responses import ResponsesView
from responses_api.wire.input_items import ItemReference
from responses_api.wire.requests import ResponseRequest

_PROJECT_NAME = "playground"
# Name, label, step, lowest and highest value of each field.
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
EFFORTS = ("none", "low", "medium", "high")
_IMAGE_FRACTION = 0.7
"""The part of the largest body that image files may take: base64 makes them a third larger."""
MAX_ITEMS = 500
"""Items of a stored request that are opened: the newest."""
_FIELDS_NOT_OPENED = frozenset(
    {
        *("input", "previous_response_id", "conversation", "metadata", "user", "safety_identifier"),
        *("background", "store", "stream", "stream_options"),
    }
)
"""Fields of a stored request about its client, its transport and its place in a conversation."""
MAX_PRESETS = 200
"""Presets that one user may have."""
_MAX_PRESETS_LISTED = 1_000
_DELETE_PRESET = "playground.delete_preset"
_NO_PRESET = "There is no such preset for you."


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
    fields = {"project": _playground_project, "name": user.get_username()[:100]}
    key, _ = ApiKey.objects.get_or_create(user=user, defaults=fields)
    return caller_of_key(key.pk)


def _playground_project() -> Project:
    def free_name() -> str:
        names = chain([_PROJECT_NAME], (f"{_PROJECT_NAME}-{number}" for number in count(2)))
        return next(name for name in names if not Project.objects.filter(name=name).exists())

    # No grace: an answer ends at once when its user stops it or leaves the page.
    fields = {"name": free_name, "disconnect_grace_s": 0}
    return Project.objects.get_or_create(is_playground=True, defaults=fields)[0]


def playground_context(request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the page."""
    caller = playground_caller(request.user)
    largest_image = min(settings.MEDIA_MAX_BYTES, settings.MAX_BODY_BYTES * _IMAGE_FRACTION)
    context: dict[str, Any] = {
        "caller": caller,
        "samplers": SAMPLERS,
        "efforts": EFFORTS,
        "longest_name": LONGEST_NAME,
        "most_image_bytes": int(largest_image),
        "origin": f"{request.scheme}://{request.get_host()}",
    }
    try:
        context["models"] = [] if caller is None else _chat_models(caller)
    except redis.exceptions.RedisError:
        context["is_unreachable"] = True
    return context


def _chat_models(caller: Caller) -> list[dict[str, str]]:
    """Return the chat models of a caller: loaded ones first, demo models last, then routes.

    ``sees`` is "yes" for those that take images.
    """
    usable = [spec for spec in catalogue().listed(caller.project_name) if may_use(caller, spec)]
    can = {spec.id: capabilities_of(spec) for spec in usable}
    chats = [id_ for id_, capabilities in can.items() if "chat" in capabilities]
    live = live_workers()
    statuses = {id_: status_among(live, id_) for id_ in chats}
    shipped = catalogue().is_shipped
    chats.sort(key=lambda id_: (statuses[id_] != ModelStatus.LOADED, shipped(id_)))
    sees = {id_: "yes" if "vision" in can[id_] else "" for id_ in chats}
    models = [{"id": id_, "status": statuses[id_].value, "sees": sees[id_]} for id_ in chats]
    for route in catalogue().listed_routes(caller.project_name):
        targets = {spec.id for spec in route.specs} & set(chats)
        if may_use(caller, route) and targets:
            can_see = any(sees[id_] for id_ in targets)
            models.append({"id": route.id, "status": "route", "sees": "yes" if can_see else ""})
    return models


class PlaygroundResponsesView(ResponsesView):
    """``POST /console/playground/responses``: the same as ``POST /v1/responses``."""

    authentication_classes = (PlaygroundSession,)
    parser_classes = (JsonParser,)
    http_method_names = ["post"]

    def post(self, request: Request) -> HttpResponse:
        """Create a response. Raise InvalidRequestError if it reads data of other users."""
        body = parse(ResponseRequest, request.data)
        if body.conversation_id is not None:
            raise InvalidRequestError("The playground has no conversations.", param="conversation")
        if any(isinstance(item, ItemReference) for item in body.input or ()):
            raise InvalidRequestError("The playground takes no references to items.", param="input")
        previous = body.previous_response_id
        if previous is not None:
            own = Generation.objects.filter(api_key_id=caller_of(request).api_key_id)
            if not own.filter(public_id=previous).exists():
                raise previous_not_found(previous)
        return super().post(request)


class PlaygroundResponseView(ApiView):
    """``GET /admin/playground/responses/{id}``: the response, and the facts of its generation."""

    authentication_classes = (PlaygroundSession,)

    def get(self, request: Request, response_id: str) -> Response:
        """Get a response of this user, with times in ms, tokens per second and the cost."""
        caller = caller_of(request)
        generation = _own_generation(caller, response_id)
        stored = find_response(caller.project_id, response_id)
        spec = catalogue().find(generation.model)
        is_free = not generation.cost and (spec is None or spec.price == Price())
        run = {
            "queue_ms": generation.queue_ms,
            "ttft_ms": generation.ttft_ms,
            "tokens_per_s": generation.tokens_per_s,
            "cost": "no price set" if is_free else money(generation.cost),
        }
        return Response({"response": current_response(stored).model_dump(), "run": run})


class PlaygroundFeedbackView(ApiView):
    """``POST /admin/playground/responses/{id}/feedback``."""

    authentication_classes = (PlaygroundSession,)

    def post(self, request: Request, response_id: str) -> Response:
        """Rate a response of this user."""
        caller = caller_of(request)
        _own_generation(caller, response_id)
        stored = find_response(caller.project_id, response_id)
        body = parse(FeedbackRequest, request.data)
        # The session names the user; the caller is their key.
        author = staff_author(ApiKey.objects.select_related("user").get(pk=caller.api_key_id).user)
        return Response(give(stored, author, Rating(body.rating), body.note))


class PlaygroundStopView(ApiView):
    """``POST /console/playground/responses/{id}/stop``."""

    authentication_classes = (PlaygroundSession,)

    def post(self, request: Request, response_id: str) -> Response:
        """Stop a waiting or running response of this user."""
        return Response({"stopped": stop(_own_generation(caller_of(request), response_id))})


def _own_generation(caller: Caller, response_id: str) -> Generation:
    """Return the generation of a response. Raise NotFoundError if another key made it."""
    own = Generation.objects.filter(api_key_id=caller.api_key_id)
    found = own.filter(public_id=response_id).first()
    if found is None:
        raise NotFoundError(
            f"Response with id '{response_id[:100]}' not found.", code="response_not_found"
        )
    return found


class OpenView(ApiView):
    """``GET /admin/playground/open/{id}``: a stored response, chat completion or conversation,
    or a prompt with values, in the form in which the page continues it."""

    authentication_classes = (StaffSession,)
    permission_classes = ()  # No API key calls, so there is no key permission to check.

    def get(self, request: Request, public_id: str) -> Response:
        """Return the settings of the request and its items, to users who may see content."""
        if public_id.startswith("pmpt_"):
            if not request.user.has_perm("responses_api.view_prompttemplate"):
                raise ForbiddenError("Your user may not do this.", code="permission_denied")
            if (found := tried_messages(public_id)) is not None:
                version, instructions, draft = found
                given = {"model": version.model, "instructions": instructions}
                return Response(
                    {
                        "id": f"{version.template.name}, {version}",
                        "request": {name: text for name, text in given.items() if text},
                        "items": [],
                        "draft": draft,  # The user message, which the user may send.
                        "is_cut": False,
                    }
                )
        for prefix, (permission, open_stored) in _STORED.items():
            if public_id.startswith(prefix):
                if not request.user.has_perms((permission, "responses_api.view_content")):
                    raise ForbiddenError("Your user may not do this.", code="permission_denied")
                if not site_settings().show_content:
                    raise ForbiddenError(
                        "Prompts and answers are shown to nobody.", code="content_hidden"
                    )
                if (opened := open_stored(public_id)) is not None:
                    settings_, items = opened
                    newest, is_cut = items[-MAX_ITEMS:], len(items) > MAX_ITEMS
                    return Response(
                        {"id": public_id, "request": settings_, "items": newest, "is_cut": is_cut}
                    )
        raise NotFoundError(f"Nothing is stored with the id '{public_id[:100]}'.")


Opened = tuple[dict[str, Any], list[ItemData]]
"""The settings of a request, and its newest items in order; possibly more than ``MAX_ITEMS``."""


def _open_response(public_id: str) -> Opened | None:
    rows = StoredResponse.objects.select_related("previous", "conversation")
    stored = rows.filter(public_id=public_id).first()
    if stored is None:
        return None
    output = stored.items.filter(is_output=True).order_by("position").values_list("data", flat=True)
    kept = stored.request.items()
    request = {k: v for k, v in kept if k not in _FIELDS_NOT_OPENED and v is not None}
    newest = newest_input_of(stored, MAX_ITEMS + 1)
    given = [decode_item(item).data for item in reversed(newest)]
    return {**request, "model": stored.model}, [*given, *output]


def _open_completion(public_id: str) -> Opened | None:
    stored = StoredCompletion.objects.filter(public_id=public_id).first()
    if stored is None:
        return None
    answers = [choice["message"] for choice in stored.completion["choices"][:1]]
    given: list[dict[str, Any]] = []
    for message in (*stored.messages, *answers):
        if reasoning := message.get("reasoning_content"):
            part = {"type": "reasoning_text", "text": reasoning}
            given.append({"type": "reasoning", "content": [part]})
        if message.get("content") or message.get("tool_calls") or message["role"] == "tool":
            names = ("role", "content", "tool_calls", "tool_call_id")
            given.append({name: message[name] for name in names if message.get(name) is not None})
    try:
        items = ResponseRequest.model_validate({"input": given}).input or []
    except ValidationError as exc:  # A message has parts that items do not have.
        raise InvalidRequestError("The messages of this chat cannot be opened.") from exc
    return {"model": stored.model}, [to_data(item) for item in items]


def _open_conversation(public_id: str) -> Opened | None:
    found = Conversation.objects.filter(public_id=public_id).first()
    if found is None:
        return None
    rows = Item.objects.filter(conversation=found).order_by("-conversation_position")
    newest = rows.values_list("data", flat=True)[: MAX_ITEMS + 1]
    last = found.responses.order_by("-id").values_list("model", flat=True).first()
    return {"model": last} if last else {}, list(newest)[::-1]


_STORED: dict[str, tuple[str, Callable[[str], Opened | None]]] = {
    "resp_": ("responses_api.view_storedresponse", _open_response),
    "chatcmpl-": ("completions.view_storedcompletion", _open_completion),
    "conv_": ("responses_api.view_conversation", _open_conversation),
}
"""By prefix of the id: the permission to view such an object, and the function that opens it."""


class PresetRequest(WireRequest):
    """The body of ``POST /admin/playground/presets``."""

    kind: Literal["instructions", "tools", "schema"]
    name: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME, pattern=NO_NUL)]
    content: Annotated[str, Field(min_length=1, max_length=LONGEST_CONTENT, pattern=NO_NUL)]
    is_shared: bool = False


class PresetsView(ApiView):
    """``/admin/playground/presets``."""

    authentication_classes = (StaffSession,)
    permission_classes = ()  # No API key calls, so there is no key permission to check.

    def get(self, request: Request) -> Response:
        """List the user's own presets and shared ones, without their content."""
        presets = _visible_presets(request.user).defer("content")[:_MAX_PRESETS_LISTED]
        return Response({"data": [_preset_data(preset, request.user) for preset in presets]})

    def post(self, request: Request) -> Response:
        """Save a preset; replace one of the same kind and name."""
        body = parse(PresetRequest, request.data)
        user: Any = request.user  # A staff user: ``StaffSession`` rejects others.
        own = Preset.objects.filter(user_id=user.pk)
        if own.exclude(kind=body.kind, name=body.name).count() >= MAX_PRESETS:
            raise ConflictError(f"You have {MAX_PRESETS} presets: delete one first.")
        preset, _ = Preset.objects.update_or_create(
            user_id=user.pk,
            kind=body.kind,
            name=body.name,
            defaults={"content": body.content, "is_shared": body.is_shared},
        )
        return Response({**_preset_data(preset, user), "content": preset.content})


class PresetView(ApiView):
    """``/admin/playground/presets/{id}``."""

    authentication_classes = (StaffSession,)
    permission_classes = ()  # No API key calls, so there is no key permission to check.

    def get(self, request: Request, pk: int) -> Response:
        """Get a preset with its content."""
        preset = _visible_presets(request.user).filter(pk=pk).first()
        if preset is None:
            raise NotFoundError(_NO_PRESET)
        return Response({**_preset_data(preset, request.user), "content": preset.content})

    def delete(self, request: Request, pk: int) -> Response:
        """Delete an own preset, or with the permission a shared one of another user."""
        deletable = Q(user_id=request.user.pk)
        if request.user.has_perm(_DELETE_PRESET):
            deletable |= Q(is_shared=True)
        deleted, _ = Preset.objects.filter(deletable, pk=pk).delete()
        if not deleted:
            raise NotFoundError(_NO_PRESET)
        return Response({"id": pk, "deleted": True})


def _visible_presets(user: Any) -> QuerySet[Preset]:
    return Preset.objects.filter(Q(user_id=user.pk) | Q(is_shared=True)).select_related("user")


def _preset_data(preset: Preset, user: Any) -> dict[str, Any]:
    is_own = preset.user_id == user.pk
    return {
        "id": preset.pk,
        "kind": preset.kind,
        "name": preset.name,
        "is_shared": preset.is_shared,
        "owner": "" if is_own else preset.user.get_username(),
        "may_delete": is_own or user.has_perm(_DELETE_PRESET),
    }
