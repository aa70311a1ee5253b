"""Formats whose calls are JSON objects.

- Hermes, Qwen 2.5 and 3, and others: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.
- Llama 3: ``{"name": …, "parameters": {…}}`` as the whole answer, maybe after ``<|python_tag|>``.
  Several are separated by semicolons, commas or white space.
- Mistral, before and after v11: ``[TOOL_CALLS][{…}, {…}]`` and ``[TOOL_CALLS]name[ARGS]{…}``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from inference_site.domain.request import Tool
from worker.engines.chat.parser.json_call import read_call, stream_object
from worker.engines.chat.parser.output import Output
from worker.engines.chat.parser.source import Markers, Reading, Source
from worker.engines.chat.parser.syntax import ToolFormat

_HERMES_ENDS = Markers(["</tool_call>"])
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_MAX_HEAD = 512


def _read_hermes(
    source: Source, output: Output, tools: Sequence[Tool], start: str
) -> Reading[bool]:
    is_call = False
    while (yield from read_call(source, output)):
        is_call = True
    if is_call:
        yield from source.spaces()
        yield from source.starts_with(_HERMES_ENDS)
    return is_call


HERMES = ToolFormat("hermes", _read_hermes, starts=("<tool_call>",), tags=("</tool_call>",))


def _read_llama3(
    source: Source, output: Output, tools: Sequence[Tool], start: str
) -> Reading[bool]:
    # Without the tag an answer in JSON is no call unless it is one of a tool there is.
    names = None if start else {tool.name for tool in tools}
    is_call = False
    while (yield from read_call(source, output, names)):
        is_call = True
        yield from source.spaces()
        if (yield from source.character(0)) in (";", ","):
            source.take(1)
    return is_call


LLAMA3_JSON = ToolFormat(
    "llama3_json", _read_llama3, starts=("<|python_tag|>",), tags=("<|eom_id|>",), bare_start="{"
)


def _read_mistral(
    source: Source, output: Output, tools: Sequence[Tool], start: str
) -> Reading[bool]:
    at = yield from source.after_spaces(0)
    if (yield from source.character(at)) == "[":
        return (yield from _array(source, output, at + 1))
    head = yield from source.match(_NAMED, _MAX_HEAD)
    if head is None:
        return False
    source.take(head.end())
    output.begin_call(head[1])
    if (yield from stream_object(source, output)):
        output.end_call()
    return True


def _array(source: Source, output: Output, at: int) -> Reading[bool]:
    """Read the calls of an array whose bracket ends at this place."""
    if not (yield from _is_object(source, at)):
        return False
    bracket = source.take(at)
    is_call = False
    while (yield from read_call(source, output)):
        is_call = True
        yield from source.spaces()
        separator = yield from source.character(0)
        if separator in (",", "]"):
            source.take(1)
        if separator != ",":
            break
    if not is_call:
        output.text(bracket)
    return is_call


def _is_object(source: Source, at: int) -> Reading[bool]:
    at = yield from source.after_spaces(at)
    return (yield from source.character(at)) == "{"


MISTRAL = ToolFormat(
    "mistral", _read_mistral, starts=("[TOOL_CALLS]",), tags=("[ARGS]", "[CALL_ID]")
)
