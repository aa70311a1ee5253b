"""The incremental parser: from a model's text, cut anywhere, to content, reasoning and calls.

A fold: ``feed`` takes a piece of text and returns the deltas it completes; ``finish`` returns what
was still held back. Whatever the pieces are, the deltas add up to the same. Rules for all formats:

- Tags never are part of anything. Of white space, what directly follows a reasoning or a call, or
  comes between content and a call, is dropped, and so is what begins a reasoning.
- What begins like a call and is none is content, without its tags.
- A call that ends too early stands as far as it was sent.
- Without tools, calls are read all the same, and dropped. Calls without tags are then content.
- Once there is content, tags of reasoning are text, unless the model may reason again.
"""

from __future__ import annotations

from collections.abc import Sequence

from inference_site.domain.deltas import TokenLogprob
from inference_site.domain.request import Tool
from worker.engines.chat.parser.channels import read_harmony, read_named
from worker.engines.chat.parser.output import Output, ParsedDelta
from worker.engines.chat.parser.source import Markers, Reading, Source
from worker.engines.chat.parser.syntax import Syntax

_NO_LIMIT = 10_000


class OutputParser:
    """Parses one choice.

    ``in_reasoning``: the prompt ends inside of a reasoning. ``parallel``: more than one call may
    come; otherwise those after the first are dropped.
    """

    def __init__(
        self,
        syntax: Syntax,
        tools: Sequence[Tool] = (),
        *,
        index: int = 0,
        in_reasoning: bool = False,
        parallel: bool = True,
    ) -> None:
        self._source = Source()
        max_calls = 0 if not tools else _NO_LIMIT if parallel else 1
        self._output = Output(self._source, index, max_calls)
        self._output.in_reasoning = in_reasoning
        self._early: tuple[TokenLogprob, ...] = ()
        self._reading = _reading(syntax, tools, self._source, self._output)
        next(self._reading)

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is reasoning, unless a tag comes."""
        return self._output.in_reasoning

    @property
    def calls(self) -> int:
        """How many calls there are."""
        return self._output.calls

    @property
    def call_is_open(self) -> bool:
        """Whether the last call is not complete."""
        return self._output.call_is_open

    @property
    def is_holding(self) -> bool:
        """Whether text waits that may be a part of a tag."""
        return bool(self._source.text)

    def feed(self, text: str, logprobs: tuple[TokenLogprob, ...] = ()) -> list[ParsedDelta]:
        """Take the next piece of text; return the deltas it completes.

        The log probabilities of the piece's tokens go out with the content that they end in, and
        with nothing else.
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
        """Return what is left after the last piece. Called once."""
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
            yield from self._follow(marker)
            is_first = False

    def _until_marker(self, is_first: bool) -> Reading[str | None]:
        """Read content, if any, and the marker after it."""
        if not self._output.has_text:
            spaces = yield from self._source.spaces()
            if marker := (yield from self._source.starts_with(self._in_opening)):
                return marker
            if (yield from self._bare_calls()):
                yield from self._source.spaces()
            elif is_first and spaces:
                self._output.text(spaces)
        return (yield from self._source.copy_until(self._in_content, self._output.text))

    def _bare_calls(self) -> Reading[bool]:
        """Read calls that have no tags, if that is what comes; return whether it was."""
        if self._format is None or not self._format.bare_start or not self._tools:
            return False
        if (yield from self._source.character(0)) != self._format.bare_start:
            return False
        return (yield from self._format.read(self._source, self._output, self._tools, ""))

    def _follow(self, marker: str) -> Reading[None]:
        """Read what a marker begins."""
        if self._reasoning and marker == self._reasoning.start:
            yield from self._reason()
        elif marker in self._starts and (yield from self._calls(marker)):
            yield from self._source.spaces()

    def _calls(self, start: str) -> Reading[bool]:
        if self._format is None:
            return False
        return (yield from self._format.read(self._source, self._output, self._tools, start))

    def _reason(self) -> Reading[None]:
        """Read a reasoning after its start, with its end."""
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
