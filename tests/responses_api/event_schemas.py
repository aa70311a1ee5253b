"""JSON schemas of the events of a response (see ``schemas``)."""

from __future__ import annotations

from tests.responses_api.schemas import (
    COUNT,
    ERROR,
    FILE_CITATION,
    INTEGER,
    LOGPROB,
    LOST_USAGE,
    OUTPUT_ITEM,
    OUTPUT_TEXT,
    REASONING_TEXT,
    REFUSAL,
    RESPONSE,
    STRING,
    SUMMARY_TEXT,
    URL_CITATION,
    Schema,
    any_of,
    array,
    const,
    nullable,
    record,
)

_ITEM_PLACE: Schema = {"item_id": STRING, "output_index": COUNT}
_PART_PLACE: Schema = {**_ITEM_PLACE, "content_index": COUNT}
_SUMMARY_PLACE: Schema = {**_ITEM_PLACE, "summary_index": COUNT}
_COMMAND_PLACE: Schema = {"output_index": COUNT, "command_index": COUNT}
_PART = any_of(OUTPUT_TEXT, REFUSAL, REASONING_TEXT)
_LOGPROBS: Schema = {"logprobs": array(LOGPROB)}


def _event(type_: str, **fields: Schema) -> Schema:
    return record({"type": const(type_), "sequence_number": COUNT, **fields})


def _lifecycle(name: str, *statuses: str) -> Schema:
    status: Schema = {"properties": {"status": const(*statuses)}}
    return _event(f"response.{name}", response={"allOf": [RESPONSE, status]})


_EVENTS = (
    _lifecycle("created", "queued", "in_progress"),
    _lifecycle("queued", "queued"),
    _lifecycle("in_progress", "in_progress"),
    _lifecycle("completed", "completed"),
    _lifecycle("incomplete", "incomplete"),
    _lifecycle("failed", "failed", "cancelled"),
    _event("response.output_item.added", output_index=COUNT, item=OUTPUT_ITEM),
    _event("response.output_item.done", output_index=COUNT, item=OUTPUT_ITEM),
    _event("response.content_part.added", **_PART_PLACE, part=_PART),
    _event("response.content_part.done", **_PART_PLACE, part=_PART),
    _event("response.output_text.delta", **_PART_PLACE, delta=STRING, **_LOGPROBS),
    _event(
        "response.output_text.annotation.added",
        **_PART_PLACE,
        annotation_index=COUNT,
        annotation=any_of(URL_CITATION, FILE_CITATION),
    ),
    _event("response.output_text.done", **_PART_PLACE, text=STRING, **_LOGPROBS),
    _event("response.reasoning_text.delta", **_PART_PLACE, delta=STRING),
    _event("response.reasoning_text.done", **_PART_PLACE, text=STRING),
    _event("response.refusal.delta", **_PART_PLACE, delta=STRING),
    _event("response.refusal.done", **_PART_PLACE, refusal=STRING),
    _event("response.reasoning_summary_part.added", **_SUMMARY_PLACE, part=SUMMARY_TEXT),
    _event("response.reasoning_summary_text.delta", **_SUMMARY_PLACE, delta=STRING),
    _event("response.reasoning_summary_text.done", **_SUMMARY_PLACE, text=STRING),
    record(
        {
            "type": const("response.reasoning_summary_part.done"),
            "sequence_number": COUNT,
            **_SUMMARY_PLACE,
            "part": SUMMARY_TEXT,
        },
        status=const("incomplete"),
    ),
    _event("response.function_call_arguments.delta", **_ITEM_PLACE, delta=STRING),
    _event("response.function_call_arguments.done", **_ITEM_PLACE, arguments=STRING, name=STRING),
    _event("response.custom_tool_call_input.delta", **_ITEM_PLACE, delta=STRING),
    _event("response.custom_tool_call_input.done", **_ITEM_PLACE, input=STRING),
    _event("response.shell_call_command.added", **_COMMAND_PLACE, command=const("")),
    _event("response.shell_call_command.delta", **_COMMAND_PLACE, delta=STRING),
    _event("response.shell_call_command.done", **_COMMAND_PLACE, command=STRING),
    *(
        _event(f"response.{item}.{state}", **_ITEM_PLACE)
        for item in ("web_search_call", "file_search_call")
        for state in ("in_progress", "searching", "completed")
    ),
    *(
        _event(f"response.{item}.{state}", **_ITEM_PLACE)
        for item in ("mcp_call", "mcp_list_tools")
        for state in ("in_progress", "completed", "failed")
    ),
    _event("response.mcp_call_arguments.delta", **_ITEM_PLACE, delta=STRING),
    _event("response.mcp_call_arguments.done", **_ITEM_PLACE, arguments=STRING),
    _event(
        "error",
        code=STRING,
        message=STRING,
        param=nullable(STRING),
        error=record({**ERROR}, usage=LOST_USAGE),
    ),
)
EVENTS: dict[str, Schema] = {schema["properties"]["type"]["enum"][0]: schema for schema in _EVENTS}
"""The schema of each event, by its type."""
SOCKET_ERROR = record(
    {
        "type": const("error"),
        "status": INTEGER,
        "error": record({**ERROR, "code": STRING}),
    },
    stream_id=STRING,
)
"""What a WebSocket is told of a message that made no response."""
