"""Output in channels: messages in the harmony format, and ``<|channel>NAME``.

Harmony: ``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…``.
What goes to ``analysis`` is reasoning, to ``final`` content, to a recipient (``to=functions.f``) a
call, and anything else content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from inference_site.domain.request import Tool
from worker.engines.chat.parser.output import Output
from worker.engines.chat.parser.source import Markers, Reading, Source
from worker.engines.chat.parser.syntax import ToolFormat

Put = Callable[[str], None]
REASONING_CHANNELS = frozenset({"analysis", "reasoning", "thinking", "thought"})

HARMONY_TAGS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    *("<|end|>", "<|return|>", "<|call|>"),
)
_MARKS = Markers(HARMONY_TAGS)
_TO = Markers(["to="])
_HEADER = re.compile(r"([^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*)<\|message\|>")
_MAX_HEADER = 512
_HALF_HEADER = re.compile(
    r"\s*(?:assistant)?(?:\s*to=\S*)?\s*(?:<\|channel\|>)?\s*(?:analysis|commentary|final)?"
    r"(?:\s*to=[^\s<]*)?\s*(?:<\|constrain\|>)?\s*(?:json)?(?:<[|a-z]*)?"
)
_CHANNEL = re.compile(r"<\|channel\|>\s*([\w-]+)")
_RECIPIENT = re.compile(r"to=([\w.-]+)")

CHANNEL, CHANNEL_END = "<|channel>", "<channel|>"
_NAME = re.compile(r"([A-Za-z0-9_-]{1,64})(?=[^A-Za-z0-9_-])")


def read_harmony(source: Source, output: Output) -> Reading[None]:
    """Read messages until the text ends, beginning inside of one."""
    put: Put = output.reasoning
    if not output.in_reasoning:
        put = yield from _first(source, output)
    while (mark := (yield from source.copy_until(_MARKS, put))) is not None:
        output.end_call()
        output.in_reasoning = False
        put = output.text
        if mark in ("<|start|>", "<|channel|>"):
            put = yield from _harmony_header(source, output, mark)


def _first(source: Source, output: Output) -> Reading[Put]:
    """Read the rest of a header that the prompt began, if a recipient is what comes first."""
    spaces = yield from source.spaces()
    if recipient := (yield from source.starts_with(_TO)):
        return (yield from _harmony_header(source, output, recipient))
    if spaces:
        output.text(spaces)
    return output.text


def _harmony_header(source: Source, output: Output, begun: str) -> Reading[Put]:
    """Read a header that began with a mark or a recipient; return where its message goes."""
    found = yield from source.match(_HEADER, _MAX_HEADER)
    if found is None:
        if begun not in HARMONY_TAGS:
            output.text(begun)
            return output.text
        if source.has_ended and (half := _HALF_HEADER.fullmatch(source.text)):
            source.take(half.end())
        return output.text
    source.take(found.end())
    header = begun + found[1]
    recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
    if recipient and recipient[1] not in ("user", "all", "assistant"):
        output.begin_call(recipient[1].removeprefix("functions."))
        return output.arguments
    output.in_reasoning = channel is not None and channel[1].lower() in REASONING_CHANNELS
    return output.reasoning if output.in_reasoning else output.text


def read_named(
    source: Source, output: Output, tool_format: ToolFormat | None, tools: Sequence[Tool]
) -> Reading[None]:
    """Read until the text ends; ``<|channel>NAME`` says where what follows it goes."""
    starts = tool_format.starts if tool_format else ()
    tags = tool_format.tags if tool_format else ()
    marks = Markers([CHANNEL, CHANNEL_END, *starts, *tags])
    while True:
        put = output.reasoning if output.in_reasoning else output.text
        mark = yield from source.copy_until(marks, put)
        if mark is None:
            return
        if mark == CHANNEL:
            yield from _switch(source, output)
        elif mark == CHANNEL_END and output.in_reasoning:
            output.in_reasoning = False
            yield from source.spaces()
        elif (
            mark in starts
            and tool_format
            and (yield from tool_format.read(source, output, tools, mark))
        ):
            yield from source.spaces()


def _switch(source: Source, output: Output) -> Reading[None]:
    """Read the name of a channel; the mark of one without a name is text."""
    found = yield from source.match(_NAME, 65)
    name = found[1] if found else _last_name(source)
    if not name:
        (output.reasoning if output.in_reasoning else output.text)(CHANNEL)
        return
    source.take(len(name))
    output.in_reasoning = name.lower() in REASONING_CHANNELS
    yield from source.spaces()


def _last_name(source: Source) -> str:
    """Return the name that ends the text, if nothing else follows."""
    return source.text if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", source.text) else ""
