"""Stored responses as clients read them: the row, the response object, the stream.

The rows are read by prepared statements, which PostgreSQL plans once. Building and planning the
queries of Django's ORM takes several times as long as running them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import count, zip_longest
from typing import Any

import orjson
from django.conf import settings
from django.db import DEFAULT_DB_ALIAS
from django.db.models import Func, JSONField, Sum, TextField
from django.db.models.functions import Cast
from pydantic_core import to_json

from inference_site.core.errors.api_errors import NotFoundError
from inference_site.core.storage.postgresql import execute_prepared
from inference_site.runs.models import Generation, Status
from inference_site.runs.streams.batches import Batch, Ending, Sent, StoredStream, sent_so_far
from inference_site.runs.streams.event_log import read_log
from responses_api import events
from responses_api.assembler import ResponseAssembler, ResponseAssembly
from responses_api.events import ItemEvents, decode, encode
from responses_api.models import ENDED, Conversation, StoredResponse
from responses_api.output import Output
from responses_api.wire.objects import (
    ConversationId,
    Event,
    ReasoningEcho,
    ResponseObject,
    TextEcho,
    changed,
)
from responses_api.wire.requests import JsonSchemaFormat, ResponseRequest
from responses_api.wire.tools import tool_object

# The ids are selected, because the planner does not see the length of a selected array. If it saw
# it, it would plan the statement again for each length.
_OUTPUT = """
SELECT response_id, public_id, data FROM responses_api_item
WHERE response_id = ANY((SELECT %(responses)s)::bigint[]) AND is_output
ORDER BY response_id, position
"""
_OMITTED_EVENT = b": left out\n\n"
_OUTPUT_COPIES = 6
"""How often a stream contains the output: as deltas, in the events that end items, as the body."""
_REQUEST_COPIES = 5
"""How often a stream contains the fields of the request: once in each state event."""
_DELTA_BYTES = 250
"""Bytes of a delta's event without its text."""


def find_response(project_id: int, public_id: str) -> StoredResponse:
    """Return a stored response of the project. Raise NotFoundError."""
    found = row_of(project_id, public_id)
    if found is None:
        raise _not_found(public_id)
    return found


def _not_found(public_id: str) -> NotFoundError:
    message = f"Response with id '{public_id[:100]}' not found."
    return NotFoundError(message, code="response_not_found")


def row_of(project_id: int, public_id: str) -> StoredResponse | None:
    """Return the response of a project with this id, or None."""
    return next(iter(rows_of(project_id, [public_id])), None)


def rows_of(project_id: int, public_ids: Sequence[str]) -> list[StoredResponse]:
    """Return the responses of a project with these ids, in any order, without deleted ones.

    Their ``previous`` and ``conversation`` have only ids; other fields are read on access.
    """
    parameters = {"project": project_id, "ids": list(public_ids)}
    fields, of_other = StoredResponse._meta.concrete_fields, ("id", "public_id")
    found = []
    for *values, previous_id, conversation_id in execute_prepared(_rows_statement(), parameters):
        response = StoredResponse.from_db(
            DEFAULT_DB_ALIAS,
            [field.attname for field in fields],
            [
                orjson.loads(value) if isinstance(field, JSONField) and value is not None else value
                for field, value in zip(fields, values, strict=True)
            ],
        )
        if previous_id is not None:
            ids = (response.previous_id, previous_id)
            response.previous = StoredResponse.from_db(DEFAULT_DB_ALIAS, of_other, ids)
        if conversation_id is not None:
            ids = (response.conversation_id, conversation_id)
            response.conversation = Conversation.from_db(DEFAULT_DB_ALIAS, of_other, ids)
        found.append(response)
    return found


@cache
def _rows_statement() -> str:
    columns = (f"response.{field.column}" for field in StoredResponse._meta.concrete_fields)
    return f"""
        SELECT {", ".join(columns)}, previous.public_id, conversation.public_id
        FROM responses_api_storedresponse response
        LEFT JOIN responses_api_storedresponse previous ON previous.id = response.previous_id
        LEFT JOIN responses_api_conversation conversation
             ON conversation.id = response.conversation_id
        WHERE response.public_id = ANY((SELECT %(ids)s)::text[])
              AND response.project_id = %(project)s AND response.deleted_at IS NULL
    """  # noqa: S608  # Only names of columns are inserted.


def new_response(
    body: ResponseRequest,
    *,
    response_id: str,
    created_at: int,
    model: str,
    previous_response_id: str | None,
    conversation_id: str | None,
    metadata: dict[str, str],
) -> ResponseObject:
    """Return the object of an accepted response: in progress, without output."""
    reasoning, choice = body.reasoning, body.tool_choice or "auto"
    context = reasoning.context if reasoning else None
    return ResponseObject(
        id=response_id,
        created_at=created_at,
        completed_at=None,
        status="in_progress",
        background=bool(body.background),
        error=None,
        incomplete_details=None,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ReasoningEcho(
            effort=reasoning.effort if reasoning else None,
            summary=reasoning.asked_summary if reasoning else None,
            # By default, the template of the model gets all reasoning.
            context="all_turns" if context == "auto" else context,
        ),
        safety_identifier=body.safety_identifier,
        service_tier=(
            body.service_tier if body.service_tier in ("flex", "priority") else "default"
        ),
        store=body.store is not False,
        temperature=1.0 if body.temperature is None else body.temperature,
        text=TextEcho(
            format=_text_format(body), verbosity=body.text.verbosity if body.text else None
        ),
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(mode="json"),
        tools=[tool_object(tool) for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        truncation=body.truncation or "disabled",
        usage=None,
        metadata=metadata,
        conversation=None if conversation_id is None else ConversationId(id=conversation_id),
        prompt=None
        if body.prompt is None
        else body.prompt.model_dump(mode="json", exclude_none=True),
        user=body.user,
    )


def _text_format(body: ResponseRequest) -> dict[str, Any]:
    given = body.text.format if body.text else None
    if given is None:
        return {"type": "text"}
    if isinstance(given, JsonSchemaFormat):
        return {
            "type": "json_schema",
            "name": given.name,
            # Open Responses demands the field, and OpenAI's document allows no null.
            "description": given.description or "",
            "schema": given.json_schema,
            "strict": bool(given.strict),
        }
    return {"type": given.type}


def current_response(stored: StoredResponse) -> ResponseObject:
    """Return the object of a response, with its output so far.

    Raise NotFoundError if its output was deleted after its row had been read.
    """
    response = current_responses([stored])[0]
    if stored.status in ENDED and not response.output and is_deleted(stored.public_id):
        raise _not_found(stored.public_id)
    return response


def current_responses(rows: Sequence[StoredResponse]) -> list[ResponseObject]:
    """Return the objects of responses, in order. One query reads the stored output of all."""
    output: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for pk, public_id, data in execute_prepared(_OUTPUT, {"responses": [row.pk for row in rows]}):
        output[pk].append({"id": public_id, **orjson.loads(data)})
    in_background = [row.public_id for row in rows if row.background and row.status not in ENDED]
    queued = Generation.objects.filter(public_id__in=in_background, status=Status.QUEUED)
    waiting = set(queued.values_list("public_id", flat=True))
    responses = []
    for row in rows:
        if row.status in ENDED:
            responses.append(stored_response(row, output[row.pk]))
        elif row.public_id in waiting:  # The output of an earlier attempt is void.
            responses.append(stored_response(row, [], "queued"))
        else:
            sent = Output(sent_so_far(read_log(row.public_id)).frames)
            responses.append(stored_response(row, sent.so_far(), "in_progress"))
    return responses


def stored_response(
    stored: StoredResponse, output: list[Any], status: str | None = None
) -> ResponseObject:
    """Return the object of a stored response with this output, as models or as JSON objects.

    ``status`` replaces that of the row, which is not current while the response runs.
    """
    accepted = new_response(
        ResponseRequest.model_validate(stored.request),
        response_id=stored.public_id,
        created_at=int(stored.created_at.timestamp()),
        model=stored.model,
        previous_response_id=stored.previous.public_id if stored.previous else None,
        conversation_id=stored.conversation.public_id if stored.conversation else None,
        metadata=stored.metadata,
    )
    error, completed_at, reason = stored.error, stored.completed_at, stored.incomplete_reason
    result = {
        "status": status or stored.status,
        "output": output,
        "usage": stored.usage,
        "error": error and events.response_error(error),
        "completed_at": completed_at and int(completed_at.timestamp()),
        "incomplete_details": {"reason": reason} if reason else None,
        "moderation": stored.moderation,
    }
    return ResponseObject.model_validate({**accepted.__dict__, **result})


def replay_of(public_id: str, after: int = -1, *, may_renumber: bool = True) -> StoredStream | None:
    """Return the replay of an ended response (see ``inference_site.runs.kinds.Replay``)."""
    rows = StoredResponse.objects.filter(public_id=public_id, deleted_at=None, status__in=ENDED)
    stored = rows.select_related("previous", "conversation").first()
    if stored is None or (stored.deltas is None and not may_renumber):
        return None
    output = stored.items.filter(is_output=True)
    text = Cast("data", TextField())
    size = output.aggregate(size=Sum(Func(text, function="octet_length")))["size"] or 0
    deltas = sum(len(item["sizes"]) for item in (stored.deltas or {}).get("items", ()) if item)
    request_size = len(str(stored.request))
    size_bytes = _OUTPUT_COPIES * size + _REQUEST_COPIES * request_size + _DELTA_BYTES * deltas
    return StoredStream(size_bytes, partial(replay, stored, after))


def replay(stored: StoredResponse, after: int = -1) -> Batch:
    """Return the stream of an ended response, rebuilt from the database.

    The events have their original numbers. Comments stand for the events of earlier attempts, which
    are not stored. If the sizes of the deltas are not stored (a compacted stream), each text is one
    delta, and the numbers are lower than they were: a client that has all events up to ``after``
    gets the last event with the number that it expects.
    """
    response = current_response(stored)
    first, frames = 0, list[bytes]()
    for event in _replayed_events(stored, response):
        frames += [_OMITTED_EVENT] * (event.sequence_number - len(frames))
        frames.append(encode(event))
    if stored.deltas is None and after >= len(frames) - 1:
        last = events.terminal_event(response, count(after + 1))
        first, frames = after + 1, [encode(last)]
    if settings.RESPONSES_SEND_DONE:
        frames.append(events.DONE)
    return Batch(first, frames, Ending((), 200, to_json(response)))


def _replayed_events(stored: StoredResponse, response: ResponseObject) -> Iterator[Event]:
    numbers = count()
    deltas = stored.deltas or {"items": [], "end": None}
    unset = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage", "moderation"))
    accepted = changed(response, **unset, status="in_progress", output=[])
    yield from events.opening_events(accepted, numbers)
    for (index, item), sent in zip_longest(enumerate(response.output), deltas["items"]):
        if sent is None:
            yield from ItemEvents(item.id, index, numbers).whole(item)
            continue
        numbers = count(sent["first"])
        sizes, counts = sent["sizes"], sent["logprob_counts"]
        yield from ItemEvents(item.id, index, numbers).whole(item, sizes, counts)
    if deltas["end"] is not None:
        numbers = count(deltas["end"] - (stored.error is not None))
    if stored.error is not None:
        yield events.error_event(stored.error, numbers)
    yield events.terminal_event(response, numbers)


def is_deleted(public_id: str) -> bool:
    """Whether a response that was stored may not be read any more."""
    return not StoredResponse.objects.filter(public_id=public_id, deleted_at=None).exists()


def recover(generation_id: str, sent: Sent) -> ResponseAssembler | None:
    """Return an assembler that can end a response in place of its worker.

    It continues after the frames ``sent``; the first of them has the response object. If the frames
    are lost, the object is read from the database. Return None if it is not stored either.
    """
    if sent.frames:
        response = decode(sent.frames[0])["response"]
    elif stored := StoredResponse.objects.find(generation_id):
        response = stored_response(stored, []).model_dump()
    else:
        return None
    sends_done = settings.RESPONSES_SEND_DONE
    assembler = ResponseAssembler(ResponseAssembly(response, sends_done=sends_done))
    assembler.recover(sent)
    return assembler
