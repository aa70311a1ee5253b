"""JSON schemas of what ``/v1/responses`` and ``/v1/conversations`` send.

Written from the published specification (API reference, "Responses", "Streaming events" and
"Conversations"), stricter where it leaves a choice: every field is there in every state, and no
other is.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}


def const(*values: object) -> Schema:
    """One of these values."""
    return {"enum": list(values)}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def array(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


def prefixed(prefix: str) -> Schema:
    """An id: its prefix and at least 24 characters."""
    return {"type": "string", "pattern": f"^{prefix}[A-Za-z0-9]{{24,}}$"}


def record(required: Schema, **optional: Schema) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


FLAGS: Schema = {"type": "object", "additionalProperties": {"type": "boolean"}}
SCORES: Schema = {"type": "object", "additionalProperties": {"type": "number"}}
JUDGED: Schema = {
    "anyOf": [
        record(
            {
                "type": {"const": "moderation_result"},
                "model": {"type": "string"},
                "flagged": {"type": "boolean"},
                "categories": FLAGS,
                "category_scores": SCORES,
                "category_applied_input_types": {"type": "object"},
            }
        ),
        record(
            {
                "type": {"const": "error"},
                "code": {"type": "string"},
                "message": {"type": "string"},
            }
        ),
    ]
}
"""``moderation.input`` and ``output``."""

# --- Content parts -------------------------------------------------------------------------------

TOP_LOGPROB = record(
    {"token": STRING, "logprob": {"type": "number"}, "bytes": array(COUNT)},
)
LOGPROB = record(
    {
        "token": STRING,
        "logprob": {"type": "number", "maximum": 0},
        "bytes": array({"type": "integer", "minimum": 0, "maximum": 255}),
        "top_logprobs": array(TOP_LOGPROB, maxItems=20),
    }
)
URL_CITATION = record(
    {
        "type": const("url_citation"),
        "start_index": COUNT,
        "end_index": COUNT,
        "url": STRING,
        "title": STRING,
    }
)
FILE_CITATION = record(
    {
        "type": const("file_citation"),
        "index": COUNT,
        "file_id": prefixed("file-"),
        "filename": STRING,
    }
)
OUTPUT_TEXT = record(
    {
        "type": const("output_text"),
        "text": STRING,
        "annotations": array(any_of(URL_CITATION, FILE_CITATION)),
        "logprobs": array(LOGPROB),
    }
)
REFUSAL = record({"type": const("refusal"), "refusal": STRING})
REASONING_TEXT = record({"type": const("reasoning_text"), "text": STRING})
SUMMARY_TEXT = record({"type": const("summary_text"), "text": STRING})
INPUT_TEXT = record({"type": const("input_text"), "text": STRING})
INPUT_IMAGE = record(
    {
        "type": const("input_image"),
        "detail": const("auto", "low", "high", "original"),
        "image_url": nullable(STRING),
    },
    file_id=STRING,
)
INPUT_FILE = record(
    {"type": const("input_file")},
    filename=STRING,
    file_data=STRING,
    file_id=STRING,
    file_url=STRING,
)
INPUT_PART = any_of(INPUT_TEXT, INPUT_IMAGE, INPUT_FILE)

# --- Items ---------------------------------------------------------------------------------------

STATUS = const("in_progress", "completed", "incomplete")
CALL_ID: Schema = {"type": "string", "minLength": 1, "maxLength": 64}

CALLED_BY: Schema = {"namespace": STRING, "caller": {"type": "object"}}

OUTPUT_MESSAGE = record(
    {
        "id": prefixed("msg_"),
        "type": const("message"),
        "status": STATUS,
        "role": const("assistant"),
        "content": array(any_of(OUTPUT_TEXT, REFUSAL)),
    },
    phase=const("commentary", "final_answer"),
)
INPUT_MESSAGE = record(
    {
        "id": prefixed("msg_"),
        "type": const("message"),
        "status": const("completed"),
        "role": const("user", "system", "developer"),
        "content": array(INPUT_PART),
    },
    phase=const("commentary", "final_answer"),
)
FUNCTION_CALL = record(
    {
        "id": prefixed("fc_"),
        "type": const("function_call"),
        "status": STATUS,
        "call_id": CALL_ID,
        "name": STRING,
        "arguments": STRING,
    },
    **CALLED_BY,
)
CUSTOM_TOOL_CALL = record(
    {
        "id": prefixed("ctc_"),
        "type": const("custom_tool_call"),
        "status": STATUS,
        "call_id": CALL_ID,
        "name": STRING,
        "input": STRING,
    },
    **CALLED_BY,
)
REASONING = record(
    {
        "id": prefixed("rs_"),
        "type": const("reasoning"),
        "summary": array(SUMMARY_TEXT),
    },
    content=array(REASONING_TEXT),
    encrypted_content=STRING,
    status=STATUS,
)
COMPACTION = record(
    {"id": prefixed("cmp_"), "type": const("compaction"), "encrypted_content": STRING}
)


def _call_output(type_: str, prefix: str) -> Schema:
    return record(
        {
            "id": prefixed(prefix),
            "type": const(type_),
            "status": const("completed"),
            "call_id": nullable(CALL_ID),
            "output": any_of(STRING, array(INPUT_PART)),
        },
        name=STRING,
        **CALLED_BY,
    )


def _typed_call(type_: str, prefix: str, **fields: Schema) -> Schema:
    return record(
        {
            "id": prefixed(prefix),
            "type": const(type_),
            "status": STATUS,
            "call_id": CALL_ID,
            **fields,
        }
    )


SHELL_CALL = _typed_call(
    "shell_call",
    "sh_",
    action=record(
        {
            "commands": array(STRING),
            "timeout_ms": nullable(INTEGER),
            "max_output_length": nullable(INTEGER),
        }
    ),
    environment=nullable(record({"type": const("local")})),
)
LOCAL_SHELL_CALL = _typed_call(
    "local_shell_call",
    "lsh_",
    action=record(
        {
            "type": const("exec"),
            "command": array(STRING),
            "env": {"type": "object", "additionalProperties": STRING},
        },
        timeout_ms=INTEGER,
        working_directory=STRING,
        user=STRING,
    ),
)
_FILE: Schema = {"path": STRING, "diff": STRING}
APPLY_PATCH_CALL = _typed_call(
    "apply_patch_call",
    "apc_",
    status=const("in_progress", "completed"),
    operation=any_of(
        record({"type": const("create_file", "update_file"), **_FILE}),
        record({"type": const("delete_file"), "path": STRING}),
    ),
)
TOOL_SEARCH_CALL = _typed_call(
    "tool_search_call", "tsc_", execution=const("client"), arguments={"type": "object"}
)
_HOSTED_SEARCH: Schema = {
    "status": STATUS,
    "call_id": const(None),
    "execution": const("server"),
}
HOSTED_TOOL_SEARCH_CALL = record(
    {
        "id": prefixed("tsc_"),
        "type": const("tool_search_call"),
        **_HOSTED_SEARCH,
        "arguments": {"type": "object"},
    }
)
TOOL_SEARCH_OUTPUT = record(
    {
        "id": prefixed("tso_"),
        "type": const("tool_search_output"),
        **_HOSTED_SEARCH,
        "tools": array({"type": "object", "required": ["type"]}),
    }
)
_SOURCE = record({"type": const("url"), "url": STRING})
WEB_SEARCH_CALL = record(
    {
        "id": prefixed("ws_"),
        "type": const("web_search_call"),
        "status": const("in_progress", "searching", "completed", "failed"),
        "action": any_of(
            record(
                {"type": const("search"), "query": STRING, "queries": array(STRING)},
                sources=array(_SOURCE),
            ),
            record({"type": const("open_page"), "url": nullable(STRING)}),
        ),
    }
)
FILE_SEARCH_CALL = record(
    {
        "id": prefixed("fs_"),
        "type": const("file_search_call"),
        "status": const("in_progress", "searching", "completed", "incomplete", "failed"),
        "queries": array(STRING),
        "results": nullable(
            array(
                record(
                    {
                        "file_id": prefixed("file-"),
                        "filename": STRING,
                        "score": {"type": "number", "minimum": 0, "maximum": 1},
                        "text": STRING,
                        "attributes": {"type": "object"},
                    }
                )
            )
        ),
    }
)
_MCP_ERROR = any_of(
    record({"type": const("mcp_protocol_error", "http_error"), "code": INTEGER, "message": STRING}),
    record(
        {
            "type": const("mcp_tool_execution_error"),
            "content": array(record({"type": const("text"), "text": STRING})),
        }
    ),
)
MCP_CALL = record(
    {
        "id": prefixed("mcp_"),
        "type": const("mcp_call"),
        "status": const("in_progress", "calling", "completed", "incomplete", "failed"),
        "server_label": STRING,
        "name": STRING,
        "arguments": STRING,
        "output": nullable(STRING),
        "error": nullable(_MCP_ERROR),
        "approval_request_id": nullable(prefixed("mcpr_")),
    }
)
MCP_LIST_TOOLS = record(
    {
        "id": prefixed("mcpl_"),
        "type": const("mcp_list_tools"),
        "server_label": STRING,
        "tools": array(
            record(
                {
                    "name": STRING,
                    "input_schema": {"type": "object"},
                    "annotations": record({"read_only": BOOLEAN}),
                },
                description=STRING,
            )
        ),
    },
    error=STRING,
)
MCP_APPROVAL_REQUEST = record(
    {
        "id": prefixed("mcpr_"),
        "type": const("mcp_approval_request"),
        "server_label": STRING,
        "name": STRING,
        "arguments": STRING,
    }
)
OUTPUT_ITEM = any_of(
    OUTPUT_MESSAGE,
    FUNCTION_CALL,
    CUSTOM_TOOL_CALL,
    REASONING,
    SHELL_CALL,
    LOCAL_SHELL_CALL,
    APPLY_PATCH_CALL,
    TOOL_SEARCH_CALL,
    HOSTED_TOOL_SEARCH_CALL,
    TOOL_SEARCH_OUTPUT,
    COMPACTION,
    WEB_SEARCH_CALL,
    FILE_SEARCH_CALL,
    MCP_CALL,
    MCP_LIST_TOOLS,
    MCP_APPROVAL_REQUEST,
)
_OWN_SCHEMA = (
    *("message", "function_call", "function_call_output", "custom_tool_call"),
    *("custom_tool_call_output", "reasoning", "compaction"),
)
KEPT_ITEM: Schema = {
    "type": "object",
    "properties": {"id": STRING, "type": {"type": "string", "not": const(*_OWN_SCHEMA)}},
    "required": ["id", "type"],
}
"""An item that is listed as the client sent it."""
ITEM = any_of(
    OUTPUT_ITEM,
    INPUT_MESSAGE,
    KEPT_ITEM,
    _call_output("function_call_output", "fco_"),
    _call_output("custom_tool_call_output", "ctco_"),
)

# --- The response --------------------------------------------------------------------------------

USAGE = record(
    {
        "input_tokens": COUNT,
        "input_tokens_details": record({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
        "output_tokens": COUNT,
        "output_tokens_details": record({"reasoning_tokens": COUNT}),
        "total_tokens": COUNT,
    }
)
HOSTED: Schema = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"not": const("function", "custom", "allowed_tools"), "type": "string"},
    },
}
_SELDOM: Schema = {
    "defer_loading": BOOLEAN,
    "allowed_callers": array(const("direct", "programmatic"), minItems=1),
}
CALLABLE_TOOLS = (
    record(
        {
            "type": const("function"),
            "name": STRING,
            "description": nullable(STRING),
            "parameters": nullable({"type": "object"}),
            "strict": BOOLEAN,
        },
        output_schema={"type": "object"},
        **_SELDOM,
    ),
    record(
        {
            "type": const("custom"),
            "name": STRING,
            "format": any_of(
                record({"type": const("text")}),
                record(
                    {
                        "type": const("grammar"),
                        "syntax": const("lark", "regex"),
                        "definition": STRING,
                    }
                ),
            ),
        },
        description=STRING,
        **_SELDOM,
    ),
)
TOOL = any_of(
    *CALLABLE_TOOLS,
    record(
        {
            "type": const("namespace"),
            "name": STRING,
            "description": STRING,
            "tools": array(any_of(*CALLABLE_TOOLS), minItems=1),
        }
    ),
    record(
        {"type": const("tool_search"), "execution": const("server", "client")},
        description=STRING,
        parameters={"type": "object"},
    ),
    {"allOf": [HOSTED, {"properties": {"type": {"not": const("namespace", "tool_search")}}}]},
)
NAMED_TOOL = record({"type": const("function", "custom"), "name": STRING}, namespace=STRING)
TOOL_CHOICE = any_of(
    const("none", "auto", "required"),
    NAMED_TOOL,
    HOSTED,
    record(
        {
            "type": const("allowed_tools"),
            "mode": const("auto", "required"),
            "tools": array(any_of(NAMED_TOOL, HOSTED), minItems=1),
        }
    ),
)
TEXT_FORMAT = any_of(
    record({"type": const("text", "json_object")}),
    record(
        {
            "type": const("json_schema"),
            "name": STRING,
            "description": STRING,
            "schema": {"type": "object"},
            "strict": BOOLEAN,
        }
    ),
)
METADATA: Schema = {
    "type": "object",
    "maxProperties": 16,
    "propertyNames": {"maxLength": 64},
    "additionalProperties": {"type": "string", "maxLength": 512},
}
EFFORT = const(None, "none", "minimal", "low", "medium", "high", "xhigh", "max")
ENDED = ("completed", "incomplete", "failed", "cancelled")


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _only_when(field: str, statuses: tuple[str, ...]) -> Schema:
    """The field is null, but in these states, in which it is not."""
    return {
        "if": {"properties": {"status": const(*statuses)}},
        "then": {"properties": {field: {"not": NULL}}},
        "else": {"properties": {field: NULL}},
    }


ERROR_CODE = const(
    *("server_error", "rate_limit_exceeded", "invalid_prompt", "data_residency_mismatch"),
    *("bio_policy", "vector_store_timeout", "invalid_image", "invalid_image_format"),
    *("invalid_base64_image", "invalid_image_url", "image_too_large", "image_too_small"),
    *("image_parse_error", "image_content_policy_violation", "invalid_image_mode"),
    *("image_file_too_large", "unsupported_image_media_type", "empty_image_file"),
    *("failed_to_download_image", "image_file_not_found"),
    "context_length_exceeded",  # Of OpenAI's servers, and not of the specification.
)
RESPONSE: Schema = {
    **record(
        {
            "id": prefixed("resp_"),
            "object": const("response"),
            "created_at": INTEGER,
            "completed_at": nullable(INTEGER),
            "status": const("queued", "in_progress", *ENDED),
            "background": BOOLEAN,
            "error": nullable(record({"code": ERROR_CODE, "message": STRING})),
            "incomplete_details": nullable(
                record({"reason": const("max_output_tokens", "content_filter")})
            ),
            "instructions": nullable(STRING),
            "max_output_tokens": nullable(INTEGER),
            "max_tool_calls": nullable(INTEGER),
            "model": STRING,
            "output": array(OUTPUT_ITEM),
            "parallel_tool_calls": BOOLEAN,
            "previous_response_id": nullable(prefixed("resp_")),
            "prompt_cache_key": nullable(STRING),
            "reasoning": record(
                {
                    "effort": EFFORT,
                    "summary": const(None, "auto", "concise", "detailed"),
                },
                context=const("current_turn", "all_turns"),
            ),
            "safety_identifier": nullable(STRING),
            "service_tier": const("default", "flex", "priority"),
            "store": BOOLEAN,
            "temperature": _number(0, 2),
            "text": record({"format": TEXT_FORMAT}, verbosity=const("low", "medium", "high")),
            "tool_choice": TOOL_CHOICE,
            "tools": array(TOOL),
            "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
            "top_p": _number(0, 1),
            "presence_penalty": _number(-2, 2),
            "frequency_penalty": _number(-2, 2),
            "truncation": const("auto", "disabled"),
            "usage": nullable(USAGE),
            "metadata": METADATA,
        },
        conversation=record({"id": prefixed("conv_")}),
        moderation=record({"input": JUDGED, "output": JUDGED}),
        prompt=record({"id": prefixed("pmpt_"), "version": STRING}, variables={"type": "object"}),
        user=STRING,
    ),
    "allOf": [
        _only_when("completed_at", ("completed",)),
        _only_when("error", ("failed",)),
        _only_when("incomplete_details", ("incomplete",)),
        _only_when("usage", ENDED),
        {
            "if": {"properties": {"status": const("completed")}},
            "then": {
                # A call that the site runs may fail, and the answer go on.
                "properties": {
                    "output": array({"properties": {"status": const("completed", "failed")}})
                }
            },
        },
    ],
}

# --- The other objects ---------------------------------------------------------------------------

ERROR = {"message": STRING, "type": STRING, "param": nullable(STRING), "code": nullable(STRING)}
LOST_USAGE = record(dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), COUNT))
ERROR_ENVELOPE = record({"error": record(ERROR, partial_response=RESPONSE, usage=LOST_USAGE)})
DELETED_RESPONSE = record(
    {"id": prefixed("resp_"), "object": const("response"), "deleted": const(True)}
)
INPUT_TOKENS = record({"object": const("response.input_tokens"), "input_tokens": COUNT})
COMPACTED = record(
    {
        "id": prefixed("resp_"),
        "object": const("response.compaction"),
        "created_at": INTEGER,
        "output": array(any_of(INPUT_MESSAGE, COMPACTION), minItems=1),
        "usage": USAGE,
    }
)
CONVERSATION = record(
    {
        "id": prefixed("conv_"),
        "object": const("conversation"),
        "created_at": INTEGER,
        "metadata": METADATA,
    }
)
DELETED_CONVERSATION = record(
    {"id": prefixed("conv_"), "object": const("conversation.deleted"), "deleted": const(True)}
)

FEEDBACK = record(
    {
        "object": const("feedback"),
        "answer_id": prefixed("resp_"),
        "author": STRING,
        "rating": const("up", "down"),
        "note": STRING,
        "created_at": INTEGER,
    }
)
DELETED_FEEDBACK = record(
    {"object": const("feedback.deleted"), "answer_id": prefixed("resp_"), "deleted": BOOLEAN}
)


def listing(entries: Schema) -> Schema:
    """A list object of such entries."""
    return record(
        {
            "object": const("list"),
            "data": array(entries, maxItems=100),
            "first_id": nullable(STRING),
            "last_id": nullable(STRING),
            "has_more": BOOLEAN,
        }
    )
