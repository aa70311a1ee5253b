"""The batch API: ``/v1/batches``.

Source of the wire models: API reference, "Batch". ``estimate`` is an extension.
"""

from __future__ import annotations

import datetime as dt
import re
import time
from decimal import Decimal
from typing import Annotated, Literal

from django.conf import settings
from django.db import transaction
from django.utils import timezone
from pydantic import AfterValidator, Field
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.accounts.keys import Caller
from inference_site.batches.models import OPENAI, Batch, BatchLine, BatchStatus
from inference_site.batches.requests import endpoints
from inference_site.core.errors.api_errors import InvalidRequestError, NotFoundError
from inference_site.files.models import FilePurpose, StoredFile
from inference_site.gateway.api.authentication import caller_of
from inference_site.gateway.api.paging import PageQuery, list_object, parse_page
from inference_site.gateway.api.payload import NO_NUL, WireObject, WireRequest
from inference_site.gateway.api.schema import ListObject, documented
from inference_site.gateway.api.views import ApiView
from inference_site.gateway.file_views import ExpiresAfter
from inference_site.gateway.request_fields.wire import Metadata
from inference_site.runs.queue import new_id

_WINDOW = re.compile(r"[1-9]\d{0,3}[hd]")
_UNITS_S = {"h": 3_600, "d": 86_400}
_MAX_WINDOW_S = 30 * 86_400


def _window(given: str) -> str:
    """Return a completion window. Raise ValueError unless it is hours or days, at most 30 days."""
    if not _WINDOW.fullmatch(given) or _window_s(given) > _MAX_WINDOW_S:
        raise ValueError("Expected hours or days, such as '24h' or '7d', at most 30 days")
    return given


def _window_s(given: str) -> int:
    return int(given[:-1]) * _UNITS_S[given[-1]]


class BatchRequest(WireRequest):
    """Body of ``POST /v1/batches``."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=64, pattern=NO_NUL)]
    endpoint: str
    completion_window: Annotated[str, AfterValidator(_window)]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchError(WireObject):
    """One error of the validation; ``line`` is the number of the line, from 1."""

    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(WireObject):
    """The errors of the validation, at most a hundred."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(WireObject):
    """How many lines there are, and how many have ended."""

    total: int
    completed: int
    failed: int


class InputDetails(WireObject):
    """The input tokens that were read from a cache."""

    cached_tokens: int


class OutputDetails(WireObject):
    """The output tokens of reasoning."""

    reasoning_tokens: int


class BatchUsage(WireObject):
    """The tokens of all lines, once the batch has ended."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class BatchEstimate(WireObject):
    """What a batch will have cost, and when it will end, as far as that is known."""

    cost: float
    expected_at: int | None


class BatchObject(WireObject):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage | None
    metadata: dict[str, str] | None
    estimate: BatchEstimate | None


class BatchesView(ApiView):
    """``/v1/batches``."""

    counts_writes = True

    @documented(answer=BatchObject, body=BatchRequest, errors=(NotFoundError,))
    def post(self, request: Request) -> Response:
        """Create a batch from a file of requests."""
        body = self.parse(BatchRequest, request.data)
        return Response(wire_batch(create_batch(caller_of(request), body)).model_dump())

    @documented(answer=ListObject[BatchObject], query=PageQuery)
    def get(self, request: Request) -> Response:
        """List the project's batches, the newest first."""
        page = parse_page(request.query_params, "desc")
        project_id = caller_of(request).project_id
        rows = Batch.objects.of(project_id, OPENAI)
        found = page.rows_by_age(rows, "batch", project_id, "batches")
        entries = [wire_batch(batch).model_dump() for batch in found]
        return Response(list_object(entries, page))


class BatchView(ApiView):
    """``/v1/batches/{batch_id}``."""

    @documented(answer=BatchObject)
    def get(self, request: Request, batch_id: str) -> Response:
        """Get a batch."""
        batch = Batch.objects.get_of(caller_of(request).project_id, OPENAI, batch_id)
        return Response(wire_batch(batch).model_dump())


class BatchCancelView(ApiView):
    """``POST /v1/batches/{batch_id}/cancel``."""

    counts_writes = True

    @documented(answer=BatchObject)
    def post(self, request: Request, batch_id: str) -> Response:
        """Cancel a batch: the lines that run go on to their end, and no other begins.

        A batch that has ended is returned as it is.
        """
        batch = Batch.objects.get_of(caller_of(request).project_id, OPENAI, batch_id)
        Batch.objects.cancel(batch)
        return Response(wire_batch(batch).model_dump())


def create_batch(caller: Caller, body: BatchRequest) -> Batch:
    """Store a new batch, which beat then validates. Raise ApiError."""
    known = [path for path, endpoint in endpoints().items() if endpoint.dialect == OPENAI]
    if body.endpoint not in known:
        supported = ", ".join(f"'{path}'" for path in known)
        raise InvalidRequestError(
            f"Invalid 'endpoint': the supported values are {supported}.",
            param="endpoint",
            code="invalid_value",
        )
    file = StoredFile.objects.readable(caller.project_id).filter(public_id=body.input_file_id)
    found = file.first()
    if found is None:
        raise InvalidRequestError(
            f"Invalid 'input_file_id': there is no file '{body.input_file_id[:100]}'.",
            param="input_file_id",
        )
    if found.purpose != FilePurpose.BATCH:
        raise InvalidRequestError(
            f"Invalid 'input_file_id': the file has the purpose '{found.purpose}', not 'batch'.",
            param="input_file_id",
        )
    lifetime = body.output_expires_after
    return accept_batch(
        caller,
        Batch(
            public_id=new_id("batch_"),
            dialect=OPENAI,
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            output_lifetime_s=None if lifetime is None else lifetime.seconds,
            metadata=body.metadata or {},
            window_s=_window_s(body.completion_window),
        ),
    )


def accept_batch(caller: Caller, batch: Batch, lines: list[BatchLine] | None = None) -> Batch:
    """Store a batch of this caller, with its lines if they are known."""
    now = timezone.now()
    batch.project_id, batch.api_key_id = caller.project_id, caller.api_key_id
    batch.created_at, batch.expires_at = now, now + dt.timedelta(seconds=batch.window_s)
    with transaction.atomic():
        Batch.objects.accept(batch, settings.BATCHES_PER_PROJECT)
        BatchLine.objects.bulk_create(lines or ())
    return batch


def wire_batch(batch: Batch) -> BatchObject:
    """Return a batch as the API shows it."""
    has_run = batch.total > 0
    usage = batch.usage
    is_days = batch.window_s % _UNITS_S["d"] == 0 and batch.window_s > _UNITS_S["d"]
    unit = "d" if is_days else "h"
    return BatchObject(
        id=batch.public_id,
        endpoint=batch.endpoint,
        model=batch.model or None,
        errors=BatchErrors(data=[BatchError(**e) for e in batch.errors]) if batch.errors else None,
        input_file_id=batch.input_file_id,
        completion_window=f"{batch.window_s // _UNITS_S[unit]}{unit}",
        status=BatchStatus(batch.status),
        output_file_id=batch.output_file_id or None if batch.has_ended else None,
        error_file_id=batch.error_file_id or None if batch.has_ended else None,
        created_at=int(batch.created_at.timestamp()),
        expires_at=int(batch.expires_at.timestamp()),
        **{
            f"{status.value}_at": batch.time_of(status)
            for status in BatchStatus
            if status != BatchStatus.VALIDATING
        },
        request_counts=RequestCounts(
            total=batch.total, completed=batch.completed, failed=batch.failed + batch.skipped
        ),
        usage=None
        if usage is None
        else BatchUsage(
            input_tokens=usage["input_tokens"],
            input_tokens_details=InputDetails(cached_tokens=usage["cached_tokens"]),
            output_tokens=usage["output_tokens"],
            output_tokens_details=OutputDetails(reasoning_tokens=usage["reasoning_tokens"]),
            total_tokens=usage["input_tokens"] + usage["output_tokens"],
        ),
        metadata=batch.metadata or None,
        estimate=estimate_of(batch) if has_run else None,
    )


def estimate_of(batch: Batch) -> BatchEstimate:
    """Return the estimate: before the first answers the most that it may cost, then their mean.

    Of a batch that has ended, these are its cost and its end.
    """
    ended = batch.completed + batch.failed
    if batch.has_ended:
        at = batch.time_of(BatchStatus(batch.status))
        return BatchEstimate(cost=float(batch.cost), expected_at=at)
    left = batch.total - ended
    cost = batch.most_cost if not ended else batch.cost * (Decimal(batch.total) / ended)
    expected_at = int(time.time() + left / batch.rate) if batch.rate > 0 else None
    return BatchEstimate(cost=float(min(cost, batch.most_cost)), expected_at=expected_at)
