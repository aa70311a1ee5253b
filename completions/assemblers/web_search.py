"""Chat completions whose model may search the web: model → searches → results → model.

The client sees one answer. The searches are not part of it; ``annotations`` say what it cites. A
turn that calls a function of the client ends the answer, and its searches are not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import orjson
from django.conf import settings

from completions.assemblers.chat import ChatAssembler, ChatAssembly
from completions.wire.chat import ChatCitation, ChatUrlCitation
from inference_site.core.domain.citations import find_citations
from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from inference_site.core.domain.request import GenerationRequest, Message, ToolCall
from inference_site.core.domain.site_tools import SiteCall, Source, ToolResult
from inference_site.gateway.request_fields.web_search import ARGUMENTS
from inference_site.runs.streams.batches import Ending


@dataclass(slots=True)
class _Search:
    """A call of the turn that the site runs. ``output`` is None until its result is there."""

    number: int
    id: str
    name: str
    arguments: str = ""
    output: str | None = None


class SearchingAssembler(ChatAssembler):
    """Assembles a chat completion with one choice (see ``Assembler.calls``)."""

    def __init__(self, assembly: ChatAssembly) -> None:
        super().__init__(assembly)
        self._numbers = count()
        self._made = self._spent = 0
        self._sources: list[Source] = []
        self._messages: list[Message] = []
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._searches: list[_Search] = []
        self._shown: dict[int, int] = {}
        """The places of the client's calls among all that it is shown, by those in the turn."""
        self._by_call: dict[int, _Search | None] = {}
        self._has_ended = False

    @property
    def sources(self) -> Sequence[Source]:
        """See ``Assembler``."""
        return self._sources

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta; return the chunks it makes, none of a search."""
        match delta:
            case ToolCallDelta():
                return self._feed_call(delta)
            case TextDelta(text):
                self._text.append(text)
            case ReasoningDelta(text):
                self._reasoning.append(text)
            case Usage(output_tokens=spent):
                self._spent = spent
            case Finish():
                self._has_ended = True
                if self.calls():
                    return ()
                return [*self._annotations_chunk(), *super().feed(delta)]
        return super().feed(delta)

    def _feed_call(self, delta: ToolCallDelta) -> Sequence[bytes]:
        if delta.id is not None and delta.name in ARGUMENTS:
            is_run = self._made < settings.TOOL_CALLS_MAX
            search = _Search(next(self._numbers), delta.id, delta.name) if is_run else None
            self._made += 1
            self._by_call[delta.call] = search
            self._searches += [search] if search else []
        if delta.call in self._by_call:
            if search := self._by_call[delta.call]:
                search.arguments += delta.arguments
            return ()
        place = self._shown.setdefault(delta.call, len(self._shown))
        return super().feed(replace(delta, call=place))

    def calls(self) -> Sequence[SiteCall]:
        """Return the searches of the turn that has ended."""
        if not self._has_ended or self._shown:
            return []
        waiting = [search for search in self._searches if search.output is None]
        return [SiteCall(one.number, 0, one.name, one.arguments) for one in waiting]

    def add_result(self, result: ToolResult) -> Sequence[bytes]:
        """Take the result of the first of the ``calls``; the client is shown nothing of it."""
        next(one for one in self._searches if one.output is None).output = result.output
        known = {source.url for source in self._sources}
        self._sources += [source for source in result.sources if source.url not in known]
        return ()

    def next_request(self, request: GenerationRequest) -> GenerationRequest | None:
        """Return the request of the next turn; None if no token is left for it."""
        left = request.max_output_tokens
        if left is not None and (left := left - self._spent) <= 0:
            return None
        calls = tuple(ToolCall(one.id, one.name, one.arguments or "{}") for one in self._searches)
        text, reasoning = "".join(self._text), "".join(self._reasoning)
        said = Message("assistant", text or None, tool_calls=calls, reasoning=reasoning or None)
        results = [Message("tool", o.output, o.name, tool_call_id=o.id) for o in self._searches]
        self._messages += [said, *results]
        self._begin_turn()
        is_over = self._made >= settings.TOOL_CALLS_MAX
        tools = tuple(tool for tool in request.tools if not (is_over and tool.name in ARGUMENTS))
        messages = (*request.messages, *self._messages)
        return replace(request, messages=messages, tools=tools, max_output_tokens=left)

    def complete(self) -> Ending:
        """End the answer; one that has spent its tokens before its last turn was cut."""
        cut = () if self._choices[0].finish else super().feed(Finish("length"))
        ending = super().complete()
        return replace(ending, frames=[*cut, *ending.frames])

    def _annotations(self) -> list[ChatUrlCitation]:
        return [
            ChatUrlCitation(
                url_citation=ChatCitation(
                    start_index=found.start,
                    end_index=found.end,
                    title=found.source.title,
                    url=found.source.url,
                )
            )
            for found in find_citations("".join(self._choices[0].text), self._sources)
        ]

    def _annotations_chunk(self) -> Sequence[bytes]:
        annotations = [annotation.model_dump() for annotation in self._annotations()]
        if not annotations:
            return ()
        return self._chunks(0, orjson.dumps({"annotations": annotations}), b"null")

    def completion(self) -> dict[str, object]:
        """Return the whole object, with its annotations."""
        completion = super().completion()
        annotations = [annotation.model_dump() for annotation in self._annotations()]
        completion["choices"][0]["message"]["annotations"] = annotations
        return completion


def chat_assembler(assembly: ChatAssembly) -> ChatAssembler:
    """Return the assembler of a chat completion."""
    return SearchingAssembler(assembly) if assembly.site_tools else ChatAssembler(assembly)
