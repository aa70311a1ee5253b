"""Stored responses as they are read, in any state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inference_site.generations.models import Generation, Status
from inference_site.streams.batches import sent_so_far
from inference_site.streams.event_log import read_log
from responses_api.models import ENDED, StoredResponse
from responses_api.output.objects import new_response
from responses_api.output.sent_output import Output
from responses_api.state.rows import output_of
from responses_api.wire.request import ResponseRequest
from responses_api.wire.response import ResponseObject


def current_response(stored: StoredResponse) -> ResponseObject:
    """Return the object of a response, with what there is of its output."""
    return current_responses([stored])[0]


def current_responses(rows: Sequence[StoredResponse]) -> list[ResponseObject]:
    """Return the objects of responses, in order; the output of all of them is one query."""
    output = output_of(rows)
    return [
        stored_response(row, output[row.pk]) if row.status in ENDED else _running(row)
        for row in rows
    ]


def _running(stored: StoredResponse) -> ResponseObject:
    waits = Generation.objects.filter(public_id=stored.public_id, status=Status.QUEUED)
    if stored.background and waits.exists():
        return stored_response(stored, [], "queued")  # An earlier attempt's output is void.
    output = Output(sent_so_far(read_log(stored.public_id)).frames)
    return stored_response(stored, output.so_far(), "in_progress")


def stored_response(
    stored: StoredResponse, output: list[Any], status: str | None = None
) -> ResponseObject:
    """Return the object of a stored response with this output, as items or as they are stored.

    ``status`` is given for one that has not ended, whose generation knows it better.
    """
    begun = new_response(
        ResponseRequest.model_validate(stored.request),
        response_id=stored.public_id,
        created_at=int(stored.created_at.timestamp()),
        model=stored.model,
        previous_response_id=stored.previous.public_id if stored.previous else None,
        conversation_id=stored.conversation.public_id if stored.conversation else None,
        metadata=stored.metadata,
    )
    error, completed_at, reason = stored.error, stored.completed_at, stored.incomplete_reason
    kept = {
        "status": status or stored.status,
        "output": output,
        "usage": stored.usage,
        "error": error and {"code": error["code"] or error["type"], "message": error["message"]},
        "completed_at": completed_at and int(completed_at.timestamp()),
        "incomplete_details": {"reason": reason} if reason else None,
    }
    return ResponseObject.model_validate({**begun.__dict__, **kept})
