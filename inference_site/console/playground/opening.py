"""What is stored of a request, as the playground opens it: settings, and items in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pydantic import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from completions.models import StoredCompletion
from inference_site.api.authentication import StaffSession
from inference_site.api.views import ApiView
from inference_site.errors.api_errors import ForbiddenError, InvalidRequestError, NotFoundError
from inference_site.site_settings.current import site_settings
from responses_api.context import decode_item, newest_input_of
from responses_api.items import ItemData, to_data
from responses_api.models import Conversation, Item, StoredResponse
from responses_api.wire.requests import ResponseRequest

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
    newest = newest_input_of(stored, MOST_ITEMS + 1)
    given = [decode_item(item).data for item in reversed(newest)]
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
