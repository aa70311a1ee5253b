"""Views of stored chat completions."""

from __future__ import annotations

from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from completions.storage import (
    completions_of,
    find,
    replace_metadata,
    wire_completion,
    wire_messages,
)
from completions.wire.chat import MetadataUpdate
from completions.wire.stored import DeletedChatCompletion, StoredChatCompletion, StoredMessage
from inference_site.api.authentication import caller_of
from inference_site.api.paging import Page, PageQuery, list_object, parse_metadata, parse_page
from inference_site.api.payload import parse
from inference_site.api.schema import ListObject, documented
from inference_site.api.views import ApiView
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.streams.request_documents import drop_document


def list_stored(request: Request) -> Response:
    """Answer ``GET /v1/chat/completions``: the project's own, by model and metadata."""
    page = parse_page(request._request.GET, "asc")
    project_id = caller_of(request).project_id
    rows = completions_of(project_id)
    if model := request._request.GET.get("model"):
        rows = rows.filter(model=model)
    if metadata := parse_metadata(request._request.GET):
        rows = rows.filter(metadata__contains=metadata)
    if page.after is not None:
        after = find(project_id, page.after).pk
        rows = rows.filter(pk__gt=after) if page.order == "asc" else rows.filter(pk__lt=after)
    ordered = rows.order_by("pk" if page.order == "asc" else "-pk")[: page.limit + 1]
    entries = [wire_completion(stored) for stored in ordered]
    return Response(list_object(entries, page, lambda entry: str(entry["id"])))


class StoredCompletionView(ApiView):
    """``/v1/chat/completions/{id}``."""

    counts_writes = True

    @documented(answer=StoredChatCompletion)
    def get(self, request: Request, completion_id: str) -> Response:
        """Get a stored chat completion."""
        return Response(wire_completion(find(caller_of(request).project_id, completion_id)))

    @documented(body=MetadataUpdate, answer=StoredChatCompletion)
    def post(self, request: Request, completion_id: str) -> Response:
        """Replace the metadata of a stored chat completion."""
        stored = find(caller_of(request).project_id, completion_id)
        replace_metadata(stored, parse(MetadataUpdate, request.data).metadata)
        return Response(wire_completion(stored))

    @documented(answer=DeletedChatCompletion)
    def delete(self, request: Request, completion_id: str) -> Response:
        """Delete a stored chat completion."""
        found = find(caller_of(request).project_id, completion_id)
        drop_document(completion_id)  # What an ``Idempotency-Key`` would show of it.
        found.delete()
        return Response(DeletedChatCompletion(id=completion_id).model_dump())


class StoredMessagesView(ApiView):
    """``GET /v1/chat/completions/{id}/messages``."""

    @documented(query=PageQuery, answer=ListObject[StoredMessage])
    def get(self, request: Request, completion_id: str) -> Response:
        """List the messages that a stored chat completion answered."""
        page = parse_page(request._request.GET, "asc")
        messages = wire_messages(find(caller_of(request).project_id, completion_id))
        if page.order == "desc":
            messages.reverse()
        rest = _after(messages, page)
        return Response(list_object(rest[: page.limit + 1], page, lambda entry: str(entry["id"])))


def _after(messages: list[dict[str, Any]], page: Page) -> list[dict[str, Any]]:
    if page.after is None:
        return messages
    ids = [message["id"] for message in messages]
    if page.after not in ids:
        raise InvalidRequestError("Invalid 'after': there is no such message.", param="after")
    return messages[ids.index(page.after) + 1 :]
