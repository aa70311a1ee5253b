"""Anthropic's Message Batches: ``/v1/messages/batches``.

The batches are those of ``inference_site.batches``, whose requests come in the body instead of a
file. Source of the wire models: Anthropic's API reference, "Message Batches".
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from django.conf import settings
from django.http import StreamingHttpResponse
from django.http.response import HttpResponseBase
from pydantic import AfterValidator, BaseModel, Field
from pydantic.json_schema import SkipJsonSchema
from rest_framework.request import Request
from rest_framework.response import Response

from completions.anthropic import wire
from completions.anthropic.views import MessagesApiView
from inference_site.batches.models import ANTHROPIC, Batch, BatchStatus
from inference_site.batches.requests import new_line
from inference_site.batches.views import accept_batch
from inference_site.catalogue.catalogue import catalogue
from inference_site.core.errors.api_errors import InvalidRequestError, NotFoundError
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.files import storage
from inference_site.files.models import StoredFile
from inference_site.gateway.api.authentication import caller_of
from inference_site.gateway.api.paging import keep_position, kept_position
from inference_site.gateway.api.payload import WireObject, WireRequest, parse_query
from inference_site.gateway.api.schema import documented
from inference_site.runs.queue import new_id

_WINDOW_S = 86_400
_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_PATH = "messages/batches"
_MEDIA_TYPE = "application/x-jsonl"


def _custom_id(given: str) -> str:
    if not _CUSTOM_ID.fullmatch(given):
        raise ValueError("Expected 1 to 64 letters, digits, '_' and '-'")
    return given


class BatchedRequest(WireRequest):
    """One request of a batch; ``params`` are those of ``POST /v1/messages``."""

    custom_id: Annotated[str, AfterValidator(_custom_id)]
    params: dict[str, Any]


class MessageBatchRequest(WireRequest):
    """Body of ``POST /v1/messages/batches``."""

    requests: Annotated[list[BatchedRequest], Field(min_length=1, max_length=100_000)]


class MessageBatchCounts(WireObject):
    """How many requests are in which state; all of them are ``processing`` until they end."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(WireObject):
    """A batch of messages."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None = None
    results_url: str | None


class MessageBatchList(WireObject):
    """A page of batches, the newest first."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(WireObject):
    """The answer of ``DELETE /v1/messages/batches/{message_batch_id}``."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


class MessageBatchesQuery(BaseModel):
    """Query parameters of the list."""

    limit: Annotated[int, Field(ge=1, le=1_000)] = 20
    after_id: str | SkipJsonSchema[None] = Field(None, description="Only batches after this one.")
    before_id: str | SkipJsonSchema[None] = Field(None, description="Only batches before this one.")


class MessageBatchesView(MessagesApiView):
    """``/v1/messages/batches``."""

    counts_writes = True

    @documented(answer=MessageBatch, body=MessageBatchRequest, error=wire.MessagesError)
    def post(self, request: Request) -> Response:
        """Create a batch of messages."""
        body = self.parse(MessageBatchRequest, request.data)
        caller = caller_of(request)
        if len(body.requests) > settings.BATCH_MAX_LINES:
            raise InvalidRequestError(
                f"Invalid 'requests': a batch has at most {settings.BATCH_MAX_LINES} requests.",
                param="requests",
            )
        seen: set[str] = set()
        for number, each in enumerate(body.requests):
            if each.custom_id in seen:
                param = f"requests[{number}].custom_id"
                message = f"Invalid '{param}': an earlier request has the same."
                raise InvalidRequestError(message, param=param)
            seen.add(each.custom_id)
        named = body.requests[0].params.get("model")
        spec = catalogue().named(named) if isinstance(named, str) else None
        batch = Batch(
            public_id=new_id("msgbatch_"),
            dialect=ANTHROPIC,
            endpoint="/v1/messages",
            model="" if spec is None else spec.id,
            window_s=_WINDOW_S,
            status=BatchStatus.IN_PROGRESS,
            total=len(body.requests),
        )
        lines = [
            new_line(batch, caller.project_id, number, each.custom_id, each.params)
            for number, each in enumerate(body.requests, 1)
        ]
        # It begins at once: an invalid request is an error of the results.
        return Response(_wire(accept_batch(caller, batch, lines), request).model_dump())

    @documented(answer=MessageBatchList, query=MessageBatchesQuery, error=wire.MessagesError)
    def get(self, request: Request) -> Response:
        """List the project's batches of messages, the newest first."""
        query = parse_query(MessageBatchesQuery, request.query_params.dict())
        project_id = caller_of(request).project_id
        rows = Batch.objects.of(project_id, ANTHROPIC).order_by("-pk")
        if query.after_id:
            rows = rows.filter(pk__lt=_position(request, query.after_id, "after_id"))
        if query.before_id:
            before = _position(request, query.before_id, "before_id")
            newer = rows.filter(pk__gt=before).order_by("pk")
            found = list(newer[: query.limit + 1])
            shown = found[: query.limit][::-1]
        else:
            found = list(rows[: query.limit + 1])
            shown = found[: query.limit]
        data = [_wire(batch, request) for batch in shown]
        page = MessageBatchList(
            data=data,
            has_more=len(found) > query.limit,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
        )
        return Response(page.model_dump())


class MessageBatchView(MessagesApiView):
    """``/v1/messages/batches/{message_batch_id}``."""

    counts_writes = True

    @documented(answer=MessageBatch, error=wire.MessagesError)
    def get(self, request: Request, message_batch_id: str) -> Response:
        """Get a batch of messages."""
        return Response(_wire(_find(request, message_batch_id), request).model_dump())

    @documented(answer=DeletedMessageBatch, error=wire.MessagesError)
    def delete(self, request: Request, message_batch_id: str) -> Response:
        """Delete a batch of messages that has ended, and its results."""
        batch = _find(request, message_batch_id)
        if not batch.has_ended:
            raise InvalidRequestError(
                "The batch has not ended; cancel it first.", param="message_batch_id"
            )
        keep_position(batch.project_id, _PATH, message_batch_id, batch.pk)
        storage.delete(list(StoredFile.objects.filter(public_id=batch.output_file_id)))
        batch.delete()
        return Response(DeletedMessageBatch(id=message_batch_id).model_dump())


class MessageBatchCancelView(MessagesApiView):
    """``POST /v1/messages/batches/{message_batch_id}/cancel``."""

    counts_writes = True

    @documented(answer=MessageBatch, error=wire.MessagesError)
    def post(self, request: Request, message_batch_id: str) -> Response:
        """Cancel a batch: the requests that run go on to their end, and no other begins."""
        batch = _find(request, message_batch_id)
        Batch.objects.cancel(batch)
        return Response(_wire(batch, request).model_dump())


class MessageBatchResultsView(MessagesApiView):
    """``/v1/messages/batches/{message_batch_id}/results``."""

    @documented(answer=None, binaries=(_MEDIA_TYPE,), error=wire.MessagesError)
    def get(self, request: Request, message_batch_id: str) -> HttpResponseBase:
        """Get the results of a batch that has ended: a line of JSON for each request."""
        with release_connection_after():  # The content may be sent for minutes.
            batch = _find(request, message_batch_id)
            if not batch.has_ended:
                raise NotFoundError("The batch has not ended: it has no results yet.")
            file = StoredFile.objects.get_readable(batch.project_id, batch.output_file_id)
        return StreamingHttpResponse(
            storage.read_for_client(file),
            content_type=_MEDIA_TYPE,
            headers={"Content-Length": str(file.size_bytes)},
        )


def _find(request: Request, message_batch_id: str) -> Batch:
    """Return a batch. Raise NotFoundError."""
    try:
        return Batch.objects.get_of(caller_of(request).project_id, ANTHROPIC, message_batch_id)
    except NotFoundError as exc:
        exc.param = "message_batch_id"
        raise


def _position(request: Request, batch_id: str, param: str) -> int:
    """Return the primary key of a batch of the list, or of a deleted one.

    Raise InvalidRequestError, which names ``param``.
    """
    project_id = caller_of(request).project_id
    try:
        return int(Batch.objects.get_of(project_id, ANTHROPIC, batch_id).pk)
    except NotFoundError as exc:
        if (kept := kept_position(project_id, _PATH, batch_id)) is not None:
            return int(kept)
        raise InvalidRequestError(exc.message, param=param) from exc


def _wire(batch: Batch, request: Request) -> MessageBatch:
    """Return a batch as Anthropic's API shows it."""
    ended = batch.completed + batch.failed
    is_expired = batch.ends_as == BatchStatus.EXPIRED
    path = f"/v1/messages/batches/{batch.public_id}/results"
    status: Literal["in_progress", "canceling", "ended"] = "in_progress"
    if batch.has_ended:
        status = "ended"
    elif batch.status == BatchStatus.CANCELLING:
        status = "canceling"
    return MessageBatch(
        id=batch.public_id,
        processing_status=status,
        request_counts=MessageBatchCounts(
            processing=0 if batch.has_ended else batch.total - ended,
            succeeded=batch.completed,
            errored=batch.failed,
            canceled=0 if is_expired else batch.skipped,
            expired=batch.skipped if is_expired else 0,
        ),
        created_at=_time(batch.created_at.timestamp()) or "",
        expires_at=_time(batch.expires_at.timestamp()) or "",
        ended_at=_time(batch.time_of(BatchStatus(batch.status))) if batch.has_ended else None,
        cancel_initiated_at=_time(batch.time_of(BatchStatus.CANCELLING)),
        results_url=request.build_absolute_uri(path) if batch.has_ended else None,
    )


def _time(unix_s: float | None) -> str | None:
    if unix_s is None:
        return None
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
