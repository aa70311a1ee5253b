"""``[TOOL_CALLS][{…}, {…}]`` and ``[TOOL_CALLS]name[ARGS]{…}``: Mistral, before and after v11."""

from __future__ import annotations

import re
from collections.abc import Sequence

from inference_site.domain.request import Tool
from worker.engines.chat.parser.json_call import read_call, stream_object
from worker.engines.chat.parser.output import Output
from worker.engines.chat.parser.source import Reading, Source
from worker.engines.chat.parser.syntax import ToolFormat

_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_MAX_HEAD = 512


def _read(source: Source, output: Output, tools: Sequence[Tool], start: str) -> Reading[bool]:
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


MISTRAL = ToolFormat("mistral", _read, starts=("[TOOL_CALLS]",), tags=("[ARGS]", "[CALL_ID]"))
