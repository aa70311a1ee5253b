"""``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``.

A call goes out parameter by parameter. The schema of a tool says which values are text; others are
JSON where they can be read as such.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from inference_site.domain.request import Tool
from worker.engines.chat.parser.output import Output
from worker.engines.chat.parser.source import Markers, Reading, Source
from worker.engines.chat.parser.syntax import ToolFormat

_START, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"\s*([^\s<>]+)\s*>")
_MAX_NAME = 256
_FUNCTIONS, _ENDS = Markers([_FUNCTION]), Markers([_END])
_INSIDE = Markers([_PARAMETER, _FUNCTION_END])
_VALUE_ENDS = Markers([_PARAMETER_END, _FUNCTION_END])
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def _read(source: Source, output: Output, tools: Sequence[Tool], start: str) -> Reading[bool]:
    is_call = start == _FUNCTION and (yield from _function(source, output, tools))
    while not (start == _FUNCTION and not is_call):
        at = yield from source.after_spaces(0)
        if (yield from source.character(at)) != "<":
            break
        yield from source.spaces()
        if (yield from source.starts_with(_FUNCTIONS)) is None:
            break
        if not (yield from _function(source, output, tools)):
            break
        is_call = True
    if is_call:
        yield from source.spaces()
        yield from source.starts_with(_ENDS)
    return is_call


def _function(source: Source, output: Output, tools: Sequence[Tool]) -> Reading[bool]:
    """Read a function after its start; return False, with nothing read, if it has no name."""
    head = yield from source.match(_NAME, _MAX_NAME)
    if head is None:
        return False
    source.take(head.end())
    output.begin_call(head[1])
    schemas = next((tool.parameters for tool in tools if tool.name == head[1]), {})
    is_first = True
    while True:
        yield from source.spaces()
        tag = yield from source.starts_with(_INSIDE)
        if tag == _PARAMETER:
            tag = yield from _parameter(source, output, schemas, is_first)
            is_first = False
        if tag != _PARAMETER_END:
            break
    if tag == _FUNCTION_END or not source.has_ended:
        output.arguments("{}" if is_first else "}")
        output.end_call()
    return True


def _parameter(
    source: Source, output: Output, schemas: dict[str, Any], is_first: bool
) -> Reading[str | None]:
    """Read a parameter and put it out; return the tag that ended it."""
    head = yield from source.match(_NAME, _MAX_NAME)
    if head is None:
        return None
    source.take(head.end())
    pieces: list[str] = []
    end = yield from source.copy_until(_VALUE_ENDS, pieces.append)
    if end is not None:
        key, value = head[1], _value("".join(pieces), _schema(schemas, head[1]))
        key = json.dumps(key, ensure_ascii=False)
        output.arguments(f"{'{' if is_first else ', '}{key}: {value}")
    return end


def _schema(schemas: dict[str, Any], key: str) -> dict[str, Any]:
    properties = schemas.get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    return schema if isinstance(schema, dict) else {}


def _value(text: str, schema: dict[str, Any]) -> str:
    """Return the value as JSON. A line break after the start tag and before the end tag is none."""
    text = text.removeprefix("\n").removesuffix("\n")
    if schema.get("type") != "string":
        bare = _PYTHON.get(text.strip(), text)
        try:
            return json.dumps(json.loads(bare), ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    _read,
    starts=(_START, _FUNCTION),
    tags=(_END, _FUNCTION_END, _PARAMETER_END),
)
