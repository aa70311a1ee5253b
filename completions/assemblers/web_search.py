"""Chat completions whose model may search the web: model → searches → results → model.

The client sees one answer. The searches are not part of it; ``annotations`` say what it cites. A
turn that calls a function of the client ends the answer, and its searches are not run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
from django.conf import settings

from completions.assemblers.chat import ChatAssembler, ChatAssembly
from completions.assemblers.site_turns import SiteTurns, TurnCall
from completions.wire.chat import ChatCitation, ChatUrlCitation
from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from inference_site.core.domain.request import GenerationRequest
from inference_site.core.domain.site_tools import SiteCall, Source, ToolResult, find_citations
from inference_site.gateway.request_fields.web_search import ARGUMENTS
from inference_site.runs.streams.batches import Ending, Sent


class SearchingAssembler(ChatAssembler):
    """Assembles a chat completion with one choice (see ``Assembler.calls``)."""

    def __init__(self, assembly: ChatAssembly) -> None:
        super().__init__(assembly)
        self._turns = SiteTurns()
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._shown: dict[int, int] = {}
        """The places of the client's calls among all that it is shown, by those in the turn."""
        self._by_call: dict[int, TurnCall | None] = {}

    @property
    def sources(self) -> Sequence[Source]:
        """See ``Assembler``."""
        return self._turns.sources

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta; return the chunks it makes, none of a search."""
        if isinstance(delta, ToolCallDelta):
            return self._feed_call(delta)
        self._turns.take(delta)
        if not isinstance(delta, Finish):
            return super().feed(delta)
        return () if self.calls() else [*self._annotations_chunk(), *super().feed(delta)]

    def _feed_call(self, delta: ToolCallDelta) -> Sequence[bytes]:
        if delta.id is not None and delta.name in ARGUMENTS:
            is_run = self._turns.made < settings.TOOL_CALLS_MAX
            self._by_call[delta.call] = (
                self._turns.begin_call(0, delta.name, delta.id, delta.name) if is_run else None
            )
        if delta.call in self._by_call:
            if search := self._by_call[delta.call]:
                search.arguments += delta.arguments
            return ()
        place = self._shown.setdefault(delta.call, len(self._shown))
        return super().feed(replace(delta, call=place))

    def calls(self) -> Sequence[SiteCall]:
        """Return the searches of the turn that has ended."""
        return self._turns.waiting if self._turns.has_ended and not self._shown else []

    def save(self) -> Mapping[str, Any]:
        """Return what was said so far, and the turns (see ``Assembler``)."""
        choice = self._choices[0]
        said = {"text": "".join(choice.text), "reasoning": "".join(choice.reasoning)}
        return {**said, "turns": self._turns.save()}

    def restart(self, sent: Sent, saved: Mapping[str, Any] | None = None) -> Sequence[bytes]:
        """Continue with the searches of the last turn; nothing of a whole answer was sent."""
        if saved and "turns" in saved:
            super().feed(ReasoningDelta(saved["reasoning"]))
            super().feed(TextDelta(saved["text"]))
            self._turns.restore(saved["turns"])
        return ()

    def add_result(self, result: ToolResult) -> Sequence[bytes]:
        """Take the result of the first of the ``calls``; the client is shown nothing of it."""
        self._turns.add_result(result)
        return ()

    def next_request(self, request: GenerationRequest) -> GenerationRequest | None:
        """Return the request of the next turn; None if no token is left for it."""
        following = self._turns.next_request(request)
        if following is None:
            return None
        self._begin_turn()
        is_over = self._turns.made >= settings.TOOL_CALLS_MAX
        tools = tuple(tool for tool in request.tools if not (is_over and tool.name in ARGUMENTS))
        return replace(following, tools=tools)

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
            for found in find_citations("".join(self._choices[0].text), self._turns.sources)
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
