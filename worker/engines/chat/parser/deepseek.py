"""``<｜tool▁calls▁begin｜>…``: DeepSeek V3 and R1, and V3.1 with its shorter form.

A call is ``function<｜tool▁sep｜>NAME``, a line break and a fenced block of JSON; since V3.1 it is
``NAME<｜tool▁sep｜>`` and JSON. The formats name themselves by what is before the separator.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from inference_site.domain.request import Tool
from worker.engines.chat.parser.json_call import stream_object
from worker.engines.chat.parser.output import Output
from worker.engines.chat.parser.source import Markers, Reading, Source
from worker.engines.chat.parser.syntax import ToolFormat

_START, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_HEAD = re.compile(
    rf"\s*(?:function{_SEPARATOR}\s*([^\s<`{{]+)|([^\s<`{{]+){_SEPARATOR})\s*(?:```(?:json)?\s*)?(?={{)"
)
_FENCE = Markers(["```"])
_MAX_HEAD = 512
_CALLS, _CALL_ENDS, _ENDS = Markers([_CALL]), Markers([_CALL_END]), Markers([_END])


def _read(source: Source, output: Output, tools: Sequence[Tool], start: str) -> Reading[bool]:
    is_call = start == _CALL and (yield from _call(source, output))
    while start == _START or is_call:
        yield from source.spaces()
        if (yield from source.starts_with(_CALLS)) is None:
            break
        if not (yield from _call(source, output)):
            break
        is_call = True
    if is_call:
        yield from source.starts_with(_ENDS)
    return is_call


def _call(source: Source, output: Output) -> Reading[bool]:
    """Read a call after its start; return False, with nothing read, if it is none."""
    head = yield from source.match(_HEAD, _MAX_HEAD)
    if head is None:
        return False
    source.take(head.end())
    output.begin_call(head[1] or head[2])
    if (yield from stream_object(source, output)):
        output.end_call()
        yield from source.spaces()
        yield from source.starts_with(_FENCE)
        yield from source.spaces()
        yield from source.starts_with(_CALL_ENDS)
    return True


DEEPSEEK = ToolFormat(
    "deepseek",
    _read,
    starts=(_START, _CALL),
    tags=(_END, _CALL_END, _SEPARATOR),
)
