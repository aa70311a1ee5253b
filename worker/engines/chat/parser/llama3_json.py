"""``{"name": …, "parameters": {…}}`` as the whole answer, maybe after ``<|python_tag|>``: Llama 3.

Several are separated by semicolons, commas or white space.
"""

from __future__ import annotations

from collections.abc import Sequence

from inference_site.domain.request import Tool
from worker.engines.chat.parser.json_call import read_call
from worker.engines.chat.parser.output import Output
from worker.engines.chat.parser.source import Reading, Source
from worker.engines.chat.parser.syntax import ToolFormat


def _read(source: Source, output: Output, tools: Sequence[Tool], start: str) -> Reading[bool]:
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
    "llama3_json", _read, starts=("<|python_tag|>",), tags=("<|eom_id|>",), bare_start="{"
)
