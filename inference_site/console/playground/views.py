"""Who asks on the playground: a member of the staff, as their own key in its project.

The page calls the API's own views with the admin's session. No key reaches the browser, and CSRF
tokens protect its requests. Requests are accounted to the playground's project and to the user's
own key in it. That key has no secret; operators can revoke and limit it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
from inference_site.admin_pages.labels import money
from inference_site.api.authentication import caller_of
from inference_site.api.payload import WireRequest, parse
from inference_site.api.staff import StaffSession
from inference_site.api.views import ApiView
from inference_site.catalogue.catalogue import catalogue
from inference_site.console.playground.models import LONGEST_CONTENT, LONGEST_NAME, Preset
from inference_site.domain.model_spec import Price
from inference_site.errors.api_errors import (
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
)
from inference_site.fleet.fleet import ModelStatus, capabilities_of, statuses_among, workers
from inference_site.generations.models import Generation
from inference_site.generations.operator_actions import stop
from inference_site.site_settings.current import site_settings
from inference_site.submission.model_access import may_use
from responses_api.models import Conversation, Item, StoredResponse
from responses_api.state.context import find_response, previous_not_found
from responses_api.state.history import decoded, newest_before
from responses_api.state.items import ItemData, to_data
from responses_api.state.reading import current_response
from responses_api.views.responses import ResponsesView
from responses_api.wire.items import ItemReference
from responses_api.wire.request import ResponseRequest

_NAME = "playground"


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
EFFORTS = ("none", "low", "medium", "high")
_OF_A_BODY = 0.7
"""The part of the largest body that images may take, as files: base64 makes them a third larger."""


def playground_context(request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the page."""
    caller = playground_caller(request.user)
    context: dict[str, Any] = {
        "caller": caller,
        "samplers": SAMPLERS,
        "efforts": EFFORTS,
        "longest_name": LONGEST_NAME,
        "most_image_bytes": int(
            min(settings.MEDIA_MAX_BYTES, settings.MAX_BODY_BYTES * _OF_A_BODY)
        ),
        "origin": f"{request.scheme}://{request.get_host()}",
    }
    try:
        context["models"] = [] if caller is None else _models(caller)
    except redis.exceptions.RedisError:
        context["is_unreachable"] = True
    return context


def _models(caller: Caller) -> list[dict[str, str]]:
    """Return what this caller can chat with: loaded models first, the demo's last, then routes."""
    usable = [spec for spec in catalogue().listed(caller.project_name) if may_use(caller, spec)]
    chats = [spec.id for spec in usable if "chat" in capabilities_of(spec)]
    statuses = statuses_among(workers(), chats)
    shipped = catalogue().is_shipped
    chats.sort(key=lambda id_: (statuses[id_] != ModelStatus.LOADED, shipped(id_)))
    found = [{"id": id_, "status": statuses[id_].value} for id_ in chats]
    routes = [one for one in catalogue().listed_routes(caller.project_name) if may_use(caller, one)]
    leading = [one for one in routes if {spec.id for spec in one.specs} & set(chats)]
    return found + [{"id": one.id, "status": "route"} for one in leading]


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


MOST_ITEMS = 500
"""How many items of a conversation are opened; the newest are."""
_CONTENT = "responses_api.view_content"
_NOT_OPENED = frozenset(
    {
        *("input", "previous_response_id", "conversation", "metadata", "user", "safety_identifier"),
        *("background", "store", "stream", "stream_options"),
    }
)
"""Fields of a request that are of its client, or of where it stood."""

_OF_A_MESSAGE = ("role", "content", "tool_calls", "tool_call_id")

Opened = dict[str, Any]


class OpenView(ApiView):
    """``GET /admin/playground/open/{id}``: of a response, chat completion or conversation."""

    authentication_classes = (StaffSession,)
    permission_classes = ()  # No key calls, so there is no scope to check.

    def get(self, request: Request, public_id: str) -> Response:
        """Return what was asked and answered, to those who may see it."""
        for prefix, (permission, opened) in _KINDS.items():
            if public_id.startswith(prefix) and "\0" not in public_id:
                if not request.user.has_perms((permission, _CONTENT)):
                    raise ForbiddenError("Your user may not do this.", code="permission_denied")
                if not site_settings().show_content:
                    raise ForbiddenError(
                        "Prompts and answers are shown to nobody.", code="content_hidden"
                    )
                return Response({"id": public_id, **opened(public_id)})
        raise _not_found(public_id)


def _of_response(public_id: str) -> Opened:
    rows = StoredResponse.objects.select_related("previous", "conversation")
    stored = rows.filter(public_id=public_id).first()
    if stored is None:
        raise _not_found(public_id)
    output = stored.items.filter(is_output=True).order_by("position").values_list("data", flat=True)
    asked = {k: v for k, v in stored.request.items() if k not in _NOT_OPENED and v is not None}
    newest = newest_before(stored, MOST_ITEMS + 1)
    given = [decoded(item).data for item in reversed(newest)]
    return {"request": {**asked, "model": stored.model}, **_newest([*given, *output])}


def _of_completion(public_id: str) -> Opened:
    stored = StoredCompletion.objects.filter(public_id=public_id).first()
    if stored is None:
        raise _not_found(public_id)
    answers = [choice["message"] for choice in stored.completion["choices"][:1]]
    items = items_of_messages([*stored.messages, *answers])
    return {"request": {"model": stored.model}, **_newest(items)}


def _of_conversation(public_id: str) -> Opened:
    found = Conversation.objects.filter(public_id=public_id).first()
    if found is None:
        raise _not_found(public_id)
    rows = Item.objects.filter(conversation=found).order_by("-conversation_position")
    newest = rows.values_list("data", flat=True)[: MOST_ITEMS + 1]
    last = found.responses.order_by("-id").values_list("model", flat=True).first()
    return {"request": {"model": last} if last else {}, **_newest(list(newest)[::-1])}


_KINDS: dict[str, tuple[str, Callable[[str], Opened]]] = {
    "resp_": ("responses_api.view_storedresponse", _of_response),
    "chatcmpl-": ("completions.view_storedcompletion", _of_completion),
    "conv_": ("responses_api.view_conversation", _of_conversation),
}


def items_of_messages(messages: Iterable[dict[str, Any]]) -> list[ItemData]:
    """Return the messages of a chat as items. Raise InvalidRequestError if they cannot be any."""
    given: list[dict[str, Any]] = []
    for message in messages:
        if thought := message.get("reasoning_content"):
            part = {"type": "reasoning_text", "text": thought}
            given.append({"type": "reasoning", "content": [part]})
        if message.get("content") or message.get("tool_calls") or message["role"] == "tool":
            kept = {key: message.get(key) for key in _OF_A_MESSAGE}
            given.append({key: value for key, value in kept.items() if value is not None})
    try:
        parsed = ResponseRequest.model_validate({"input": given}).input or []
    except ValidationError as exc:
        raise InvalidRequestError("The messages of this chat cannot be opened.") from exc
    return [to_data(item) for item in parsed]


def _newest(items: list[ItemData]) -> Opened:
    return {"items": items[-MOST_ITEMS:], "is_cut": len(items) > MOST_ITEMS}


def _not_found(public_id: str) -> NotFoundError:
    return NotFoundError(f"Nothing is stored with the id '{public_id[:100]}'.")


MOST = 200
"""The most presets that one user may have."""
_MOST_SHOWN = 1_000
_DELETE = "playground.delete_preset"
_NONE = "There is no such preset for you."
_TEXT = r"^[^\x00]*$"  # PostgreSQL takes no NUL.


class PresetRequest(WireRequest):
    """The body of ``POST /admin/playground/presets``."""

    kind: Literal["instructions", "tools", "schema"]
    name: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME, pattern=_TEXT)]
    content: Annotated[str, Field(min_length=1, max_length=LONGEST_CONTENT, pattern=_TEXT)]
    is_shared: bool = False


class PresetsView(ApiView):
    """``/admin/playground/presets``."""

    authentication_classes = (StaffSession,)
    permission_classes = ()  # No key calls, so there is no scope to check.

    def get(self, request: Request) -> Response:
        """List the user's own presets and those that are shared, without their content."""
        user = request.user
        found = _seen(user).select_related("user").defer("content")
        return Response({"data": [_listed(preset, user) for preset in found[:_MOST_SHOWN]]})

    def post(self, request: Request) -> Response:
        """Save a preset; one of the same kind and name is replaced."""
        body = parse(PresetRequest, request.data)
        user: Any = request.user  # Of the staff: ``StaffSession`` lets nobody else in.
        own = Preset.objects.filter(user_id=user.pk)
        if own.exclude(kind=body.kind, name=body.name).count() >= MOST:
            raise ConflictError(f"You have {MOST} presets: delete one first.")
        preset, _ = Preset.objects.update_or_create(
            user_id=user.pk,
            kind=body.kind,
            name=body.name,
            defaults={"content": body.content, "is_shared": body.is_shared},
        )
        return Response({**_listed(preset, user), "content": preset.content})


class PresetView(ApiView):
    """``/admin/playground/presets/{id}``."""

    authentication_classes = (StaffSession,)
    permission_classes = ()  # No key calls, so there is no scope to check.

    def get(self, request: Request, pk: int) -> Response:
        """Get a preset with its content."""
        preset = _seen(request.user).select_related("user").filter(pk=pk).first()
        if preset is None:
            raise NotFoundError(_NONE)
        return Response({**_listed(preset, request.user), "content": preset.content})

    def delete(self, request: Request, pk: int) -> Response:
        """Delete an own preset; with the permission, also one that another user shares."""
        deleted, _ = _deletable(request.user).filter(pk=pk).delete()
        if not deleted:
            raise NotFoundError(_NONE)
        return Response({"id": pk, "deleted": True})


def _seen(user: Any) -> QuerySet[Preset]:
    return Preset.objects.filter(Q(user_id=user.pk) | Q(is_shared=True))


def _deletable(user: Any) -> QuerySet[Preset]:
    own = Q(user_id=user.pk)
    return Preset.objects.filter(own | Q(is_shared=True) if user.has_perm(_DELETE) else own)


def _listed(preset: Preset, user: Any) -> dict[str, Any]:
    is_own = preset.user_id == user.pk
    return {
        "id": preset.pk,
        "kind": preset.kind,
        "name": preset.name,
        "is_shared": preset.is_shared,
        "owner": "" if is_own else preset.user.get_username(),
        "may_delete": is_own or user.has_perm(_DELETE),
    }
