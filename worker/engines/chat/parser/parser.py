"""The incremental parser: from pieces of a model's text to content, reasoning and calls.

A fold: ``feed`` takes a piece of text and returns the deltas it completes; ``finish`` returns the
rest. The result does not depend on the pieces. Rules for all formats:

- Tags are dropped. So is whitespace after a reasoning or a call, between content and a call, and at
  the beginning of a reasoning.
- Text that begins like a call but is none becomes content, without its tags.
- A call that ends too early keeps the part that was sent.
- Without tools, calls are parsed and dropped. Calls without tags are then content.
- After content, tags of reasoning are text, unless the syntax allows more reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from inference_site.core.domain.deltas import TokenLogprob
from inference_site.core.domain.request import Tool
from worker.engines.chat.parser.output import (
    Markers,
    Output,
    ParsedDelta,
    Reading,
    Source,
    Syntax,
    ToolFormat,
)

_NO_LIMIT = 10_000


class OutputParser:
    """Parses one choice.

    ``in_reasoning``: the prompt ends inside a reasoning. Without ``parallel``, calls after the
    first are dropped, and with ``only_tools`` those of other tools.
    """

    def __init__(
        self,
        syntax: Syntax,
        tools: Sequence[Tool] = (),
        *,
        index: int = 0,
        in_reasoning: bool = False,
        parallel: bool = True,
        only_tools: bool = False,
    ) -> None:
        self._source = Source()
        max_calls = 0 if not tools else _NO_LIMIT if parallel else 1
        names = [tool.name for tool in tools] if only_tools else None
        self._output = Output(self._source, index, max_calls, names)
        self._output.in_reasoning = in_reasoning
        self._early: tuple[TokenLogprob, ...] = ()
        self._reading = _reading(syntax, tools, self._source, self._output)
        next(self._reading)

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text is reasoning, unless it is a tag."""
        return self._output.in_reasoning

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return self._output.calls

    @property
    def call_is_open(self) -> bool:
        """Whether the last call is not complete."""
        return self._output.call_is_open

    @property
    def is_holding(self) -> bool:
        """Whether text is held back that may be a part of a tag."""
        return bool(self._source.text)

    def feed(self, text: str, logprobs: tuple[TokenLogprob, ...] = ()) -> list[ParsedDelta]:
        """Take the next piece of text; return the deltas it completes.

        The log probabilities of the piece's tokens come with the content that they end in; those
        of other text are dropped.
        """
        if not text:
            self._early += logprobs  # Of a token that is only a part of a character.
            return []
        self._source.text += text
        if logprobs or self._early:
            self._output.add_logprobs(self._early + logprobs)
            self._early = ()
        next(self._reading)
        return self._output.take()

    def finish(self) -> list[ParsedDelta]:
        """Return the rest after the last piece. Call it once."""
        self._source.has_ended = True
        for _ in self._reading:
            pass
        self._output.end()
        return self._output.take()


def _reading(
    syntax: Syntax, tools: Sequence[Tool], source: Source, output: Output
) -> Reading[None]:
    match syntax.channels:
        case "harmony":
            return read_harmony(source, output)
        case "named":
            return read_named(source, output, syntax.tool_format, tools)
        case _:
            return _Tagged(syntax, tools, source, output).read()


class _Tagged:
    """Reads an answer in which tags mark reasoning and calls."""

    def __init__(
        self, syntax: Syntax, tools: Sequence[Tool], source: Source, output: Output
    ) -> None:
        self._tools, self._source, self._output = tools, source, output
        self._format, self._reasoning = syntax.tool_format, syntax.reasoning
        self._starts = self._format.starts if self._format else ()
        tags = (*self._starts, *(self._format.tags if self._format else ()))
        start = self._reasoning.start if self._reasoning else ""
        end = self._reasoning.end if self._reasoning else ""
        reenters = self._reasoning is not None and self._reasoning.reenters
        has_calls = self._reasoning is not None and self._reasoning.has_calls
        self._in_opening = Markers([start, end, *tags])
        self._in_content = Markers([*tags, *([start, end] if reenters else [])])
        self._in_reasoning = Markers([end, *(self._starts if has_calls else ())])
        self._header = Markers([self._reasoning.header if self._reasoning else ""])

    def read(self) -> Reading[None]:
        """Read until the text ends."""
        is_first = not self._output.in_reasoning
        if self._output.in_reasoning:
            yield from self._reason()
        while True:
            marker = yield from self._until_marker(is_first)
            if marker is None:
                return
            if self._reasoning and marker == self._reasoning.start:
                yield from self._reason()
            elif marker in self._starts and (yield from self._calls(marker)):
                yield from self._source.spaces()
            is_first = False

    def _until_marker(self, is_first: bool) -> Reading[str | None]:
        """Read content, if any, and the marker after it."""
        if not self._output.has_text:
            spaces = yield from self._source.spaces()
            if marker := (yield from self._source.starts_with(self._in_opening)):
                return marker
            form = self._format if self._tools else None
            if (  # Calls without tags.
                form is not None
                and form.bare_start
                and (yield from self._source.character(0)) == form.bare_start
                and (yield from form.read(self._source, self._output, self._tools, ""))
            ):
                yield from self._source.spaces()
            elif is_first and spaces:
                self._output.text(spaces)
        return (yield from self._source.copy_until(self._in_content, self._output.text))

    def _calls(self, start: str) -> Reading[bool]:
        if self._format is None:
            return False
        return (yield from self._format.read(self._source, self._output, self._tools, start))

    def _reason(self) -> Reading[None]:
        """Read a reasoning after its start tag, including its end tag."""
        self._output.in_reasoning = True
        yield from self._source.spaces()
        if (yield from self._source.starts_with(self._header)):
            yield from self._source.spaces()
        put = self._output.reasoning
        while (marker := (yield from self._source.copy_until(self._in_reasoning, put))) is not None:
            if marker not in self._starts:
                break
            yield from self._calls(marker)
        self._output.in_reasoning = False
        yield from self._source.spaces()


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
        put = output.text
        spaces = yield from source.spaces()
        # The text may begin with a recipient: the rest of a header that begins in the prompt.
        if recipient := (yield from source.starts_with(_TO)):
            put = yield from _harmony_header(source, output, recipient)
        elif spaces:
            output.text(spaces)
    while (mark := (yield from source.copy_until(_MARKS, put))) is not None:
        output.end_call()
        output.in_reasoning = False
        put = output.text
        if mark in ("<|start|>", "<|channel|>"):
            put = yield from _harmony_header(source, output, mark)


def _harmony_header(source: Source, output: Output, begun: str) -> Reading[Put]:
    """Read a header that began with a mark or a recipient; return where its message goes."""
    found = yield from source.match(_HEADER, _MAX_HEADER)
    if found is None:
        if begun not in HARMONY_TAGS:
            output.text(begun)
            return output.text
        if source.has_ended and _HALF_HEADER.fullmatch(" ".join(source.text.split())):
            source.take(len(source.text))
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
    """Read until the text ends; ``<|channel>NAME`` selects reasoning or content."""
    starts = tool_format.starts if tool_format else ()
    tags = tool_format.tags if tool_format else ()
    marks = Markers([CHANNEL, CHANNEL_END, *starts, *tags])
    while True:
        put = output.reasoning if output.in_reasoning else output.text
        mark = yield from source.copy_until(marks, put)
        if mark is None:
            return
        if mark == CHANNEL:
            found = yield from source.match(_NAME, 65)
            name = found[1] if found else source.text  # The name may end the text.
            if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
                put(CHANNEL)  # Without a name it is text.
                continue
            source.take(len(name))
            output.in_reasoning = name.lower() in REASONING_CHANNELS
            yield from source.spaces()
        elif mark == CHANNEL_END and output.in_reasoning:
            output.in_reasoning = False
            yield from source.spaces()
        elif (
            mark in starts
            and tool_format
            and (yield from tool_format.read(source, output, tools, mark))
        ):
            yield from source.spaces()
