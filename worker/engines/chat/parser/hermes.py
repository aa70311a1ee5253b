"""``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen 2.5 and 3, and others."""

from __future__ import annotations

from collections.abc import Sequence

from inference_site.domain.request import Tool
from worker.engines.chat.parser.json_call import read_call
from worker.engines.chat.parser.output import Output
from worker.engines.chat.parser.source import Markers, Reading, Source
from worker.engines.chat.parser.syntax import ToolFormat

_START, _END = "<tool_call>", "</tool_call>"
_ENDS = Markers([_END])


def _read(source: Source, output: Output, tools: Sequence[Tool], start: str) -> Reading[bool]:
    is_call = False
    while (yield from read_call(source, output)):
        is_call = True
    if is_call:
        yield from source.spaces()
        yield from source.starts_with(_ENDS)
    return is_call


HERMES = ToolFormat("hermes", _read, starts=(_START,), tags=(_END,))
