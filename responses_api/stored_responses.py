"""Stored responses and their output, read by statements that PostgreSQL plans once.

To make and to plan what Django says instead takes several times as long as to run it.
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
from django.db.models import Func, JSONField, QuerySet, Sum, TextField
from django.db.models.functions import Cast
from pydantic_core import to_json

from inference_site.errors.api_errors import NotFoundError
from inference_site.generations.models import Generation, Status
from inference_site.storage.prepared import execute_prepared
from inference_site.streams.batches import Batch, Remake, Sent, sent_so_far
from inference_site.streams.ending import Ending
from inference_site.streams.event_log import read_log
from responses_api.assembler import Output, ResponseAssembler
from responses_api.events import DONE, ItemEvents, decode, encode, error_event, opening, terminal
from responses_api.models import ENDED, Conversation, StoredResponse
from responses_api.wire.objects import (
    ConversationId,
    Event,
    ReasoningEcho,
    ResponseObject,
    TextEcho,
    changed,
)
from responses_api.wire.requests import (
    CustomTool,
    FunctionTool,
    HostedTool,
    JsonSchemaFormat,
    ResponseRequest,
    Tool,
)

_OUTPUT = """
SELECT response_id, public_id, data FROM responses_api_item
WHERE response_id = ANY((SELECT %(responses)s)::bigint[]) AND is_output
ORDER BY response_id, position
"""
# How short an array is that is selected, the planner does not see: else it would plan the statement
# each time, for one of that length.


def row_of(project_id: int, public_id: str) -> StoredResponse | None:
    """Return the response of a project with this id; None if there is none."""
    return next(iter(rows_of(project_id, [public_id])), None)


def rows_of(project_id: int, public_ids: Sequence[str]) -> list[StoredResponse]:
    """Return the responses of a project with these ids, in any order; deleted ones are left out.

    Of the response or conversation that one builds on only the ids are read.
    """
    given = {"project": project_id, "ids": list(public_ids)}
    return [_response(row) for row in execute_prepared(_reading(), given)]


def output_of(responses: Sequence[StoredResponse]) -> dict[int, list[dict[str, Any]]]:
    """Return the output items of responses, as the API shows them, by the response's key."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    keys = {"responses": [response.pk for response in responses]}
    for key, public_id, data in execute_prepared(_OUTPUT, keys):
        found[key].append({"id": public_id, **orjson.loads(data)})
    return found


@cache
def _reading() -> str:
    """Return the statement of ``rows_of``: all fields, then the ids of what each builds on."""
    columns = (f"response.{field.column}" for field in StoredResponse._meta.concrete_fields)
    return f"""
        SELECT {", ".join(columns)}, previous.public_id, conversation.public_id
        FROM responses_api_storedresponse response
        LEFT JOIN responses_api_storedresponse previous ON previous.id = response.previous_id
        LEFT JOIN responses_api_conversation conversation
             ON conversation.id = response.conversation_id
        WHERE response.public_id = ANY((SELECT %(ids)s)::text[])
              AND response.project_id = %(project)s AND response.deleted_at IS NULL
    """  # noqa: S608  # Names of fields.


def _response(row: Sequence[Any]) -> StoredResponse:
    *read, previous_id, conversation_id = row
    fields = StoredResponse._meta.concrete_fields
    response = StoredResponse.from_db(
        DEFAULT_DB_ALIAS,
        [field.attname for field in fields],
        [
            orjson.loads(value) if isinstance(field, JSONField) and value is not None else value
            for field, value in zip(fields, read, strict=True)
        ],
    )
    known = ("id", "public_id")  # Of another row; to ask for more of it asks the database.
    if previous_id is not None:
        its = (response.previous_id, previous_id)
        response.previous = StoredResponse.from_db(DEFAULT_DB_ALIAS, known, its)
    if conversation_id is not None:
        its = (response.conversation_id, conversation_id)
        response.conversation = Conversation.from_db(DEFAULT_DB_ALIAS, known, its)
    return response


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
    """Return the object as it is before anything ran: in progress, without output."""
    reasoning = body.reasoning
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
            summary=reasoning.summary if reasoning else None,
        ),
        safety_identifier=body.safety_identifier,
        service_tier="flex" if body.service_tier == "flex" else "default",
        store=body.store is not False,
        temperature=1.0 if body.temperature is None else body.temperature,
        text=TextEcho(
            format=_text_format(body), verbosity=body.text.verbosity if body.text else None
        ),
        tool_choice=_tool_choice(body),
        tools=[shown_tool(tool) for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        truncation=body.truncation or "disabled",
        usage=None,
        metadata=metadata,
        conversation=None if conversation_id is None else ConversationId(id=conversation_id),
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


def _tool_choice(body: ResponseRequest) -> Any:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    return choice.model_dump(mode="json")


def shown_tool(tool: Tool) -> dict[str, Any]:
    """Return the tool as the response shows it: all fields of a function, null when unset."""
    match tool:
        case FunctionTool():
            return {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": tool.strict is not False,
            }
        case CustomTool():
            described = {} if tool.description is None else {"description": tool.description}
            form = {"type": "text"} if tool.format is None else tool.format.model_dump(mode="json")
            return {"type": "custom", "name": tool.name, **described, "format": form}
        case HostedTool():
            return tool.model_dump(mode="json")


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


_LEFT_OUT = b": left out\n\n"
_TIMES = 6
"""How often a stream has the output: as deltas, in the events that end its parts, and as body."""
_STATES = 5
"""How often it has the request."""
_DELTA_BYTES = 250
"""Bytes of the event of a delta beside the text."""


def remake_of(stored: StoredResponse, after: int = -1) -> Remake:
    """Return how the stream of a response that has ended is made anew (see ``replay``)."""
    output = stored.items.filter(is_output=True)
    text = Cast("data", TextField())
    size = output.aggregate(size=Sum(Func(text, function="octet_length")))["size"] or 0
    deltas = sum(len(item["sizes"]) for item in (stored.deltas or {}).get("items", ()) if item)
    about = _TIMES * size + _STATES * len(str(stored.request)) + _DELTA_BYTES * deltas
    return Remake(about, partial(replay, stored, after))


def replay(stored: StoredResponse, after: int = -1) -> list[Batch]:
    """Return the stream of a response that has ended, made from what is stored.

    The items come in the order they had, their texts in the deltas that they were sent in. If these
    are unknown each text is one delta, and a reader who knows the events up to ``after`` may have
    seen more than there are now: it gets the last under the number that it expects. What an attempt
    has sent that was begun anew is left out, and comments stand for its events, so that each event
    has its number.
    """
    response = current_response(stored)
    first, frames = 0, list[bytes]()
    for event in _events(stored, response):
        frames += [_LEFT_OUT] * (event.sequence_number - len(frames))
        frames.append(encode(event))
    if stored.deltas is None and after >= len(frames) - 1:
        first, frames = after + 1, [encode(terminal(response, count(after + 1)))]
    if settings.RESPONSES_SEND_DONE:
        frames.append(DONE)
    return [Batch(first, frames, Ending((), 200, to_json(response)))]


def replay_of(public_id: str, *, is_begun: bool = False) -> Remake | None:
    """Return how, by the response's id; None when there is no such response.

    Also None for one that ``is_begun``, and of which it is unknown in what deltas it was sent.
    """
    stored = _kept(public_id).filter(status__in=ENDED)
    found = stored.select_related("previous", "conversation").first()
    if found is None or (is_begun and found.deltas is None):
        return None
    return remake_of(found)


def is_deleted(public_id: str) -> bool:
    """Whether a response that was stored may not be read any more."""
    return not _kept(public_id).exists()


def _kept(public_id: str) -> QuerySet[StoredResponse]:
    return StoredResponse.objects.filter(public_id=public_id, deleted_at=None)


def _events(stored: StoredResponse, response: ResponseObject) -> Iterator[Event]:
    numbers = count()
    deltas = stored.deltas or {"items": [], "end": None}
    unset = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
    yield from opening(changed(response, **unset, status="in_progress", output=[]), numbers)
    for (index, item), cut in zip_longest(enumerate(response.output), deltas["items"]):
        if cut is None:
            yield from ItemEvents(item.id, index, numbers).whole(item)
            continue
        numbers = count(cut["first"])
        yield from ItemEvents(item.id, index, numbers).whole(
            item, cut["sizes"], cut["logprob_counts"]
        )
    if deltas["end"] is not None:
        numbers = count(deltas["end"] - (stored.error is not None))
    if stored.error is not None:
        yield error_event(stored.error, numbers)
    yield terminal(response, numbers)


def find_response(project_id: int, public_id: str) -> StoredResponse:
    """Return a stored response of the project. Raise NotFoundError."""
    found = row_of(project_id, public_id)
    if found is None:
        raise NotFoundError(
            f"Response with id '{public_id[:100]}' not found.", code="response_not_found"
        )
    return found


def recover(generation_id: str, sent: Sent) -> ResponseAssembler | None:
    """Return an assembler that ends a response after these frames (see ``generations.kinds.Kind``).

    Its object is in the first of them; when they are lost it is made from what is stored.
    """
    if sent.frames:
        response = decode(sent.frames[0])["response"]
    elif stored := _find(generation_id):
        response = stored_response(stored, []).model_dump()
    else:
        return None
    assembler = ResponseAssembler(response, sends_done=settings.RESPONSES_SEND_DONE)
    assembler.recover(sent)
    return assembler


def _find(public_id: str) -> StoredResponse | None:
    rows = StoredResponse.objects.select_related("previous", "conversation")
    return rows.filter(public_id=public_id).first()
