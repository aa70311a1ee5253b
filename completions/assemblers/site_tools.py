"""Chat completions with tools of the site: web search, and moderation of input and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
from django.conf import settings

from completions.assemblers.chat import ChatAssembler, ChatAssembly
from completions.wire.chat import ChatCitation, ChatModeration, ChatUrlCitation, ModerationResults
from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from inference_site.core.domain.request import GenerationRequest
from inference_site.core.domain.site_tools import SiteCall, Source, ToolResult, find_citations
from inference_site.gateway.request_fields.moderation import (
    MODERATION,
    AnswerModeration,
    ModerationErrorBody,
)
from inference_site.gateway.request_fields.web_search import ARGUMENTS
from inference_site.runs.streams.batches import Ending, Sent
from inference_site.runs.tool_calls.turns import TurnCall, Turns


def chat_assembler(assembly: ChatAssembly) -> ChatAssembler:
    """Return the assembler of a chat completion."""
    searches = any(options["type"] != MODERATION for options in assembly.site_tools)
    moderation = AnswerModeration.of(assembly.site_tools)
    if moderation is None:
        return SearchingAssembler(assembly) if searches else ChatAssembler(assembly)
    made = ModeratedSearchingAssembler if searches else ModeratedAssembler
    return made(assembly, moderation)


class SearchingAssembler(ChatAssembler):
    """Assembles a chat completion that searches, with one choice (see ``Assembler.calls``).

    The client sees one answer. The searches are not part of it; ``annotations`` say what it cites.
    A turn that calls a function of the client ends the answer, and its searches are not run; so
    does a turn that is cut off.
    """

    def __init__(self, assembly: ChatAssembly) -> None:
        super().__init__(assembly)
        self._turns = Turns(settings.TOOL_CALLS_MAX)
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._shown: dict[int, int] = {}
        """The places of the client's calls among all that it is shown, by those in the turn."""
        self._by_call: dict[int, TurnCall | None] = {}
        self._is_cut = False

    @property
    def sources(self) -> Sequence[Source]:
        """See ``Assembler``."""
        return self._turns.sources

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta; return the chunks it makes, none of a search."""
        if isinstance(delta, ToolCallDelta):
            if delta.id is not None and delta.name in ARGUMENTS:
                self._by_call[delta.call] = (
                    self._turns.begin_call(0, delta.name, delta.id, delta.name)
                    if self._turns.may_call
                    else None
                )
            if delta.call in self._by_call:
                if search := self._by_call[delta.call]:
                    search.arguments += delta.arguments
                return ()
            place = self._shown.setdefault(delta.call, len(self._shown))
            return super().feed(replace(delta, call=place))
        self._turns.take(delta)
        if not isinstance(delta, Finish):
            return super().feed(delta)
        self._is_cut = delta.reason in ("length", "content_filter")
        if self.calls():
            return ()
        annotations = self._annotations()
        chunk: Sequence[bytes] = ()
        if annotations:
            chunk = self._chunks(0, orjson.dumps({"annotations": annotations}), b"null")
        return [*chunk, *super().feed(delta)]

    def calls(self) -> Sequence[SiteCall]:
        """Return the searches of the turn that has ended."""
        return [] if self._shown or self._is_cut else self._turns.waiting

    def save(self) -> Mapping[str, Any]:
        """Return the text and reasoning so far, and the turns (see ``Assembler``)."""
        choice = self._choices[0]
        return {
            "text": "".join(choice.text),
            "reasoning": "".join(choice.reasoning),
            "turns": self._turns.save(),
        }

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
        if self._turns.may_call:
            return following
        tools = tuple(tool for tool in request.tools if tool.name not in ARGUMENTS)
        return replace(following, tools=tools)

    def complete(self) -> Ending:
        """End the answer; one that has spent its tokens before its last turn was cut."""
        cut = () if self._choices[0].finish else super().feed(Finish("length"))
        ending = super().complete()
        return replace(ending, frames=[*cut, *ending.frames])

    def _annotations(self) -> list[dict[str, Any]]:
        return [
            ChatUrlCitation(
                url_citation=ChatCitation(
                    start_index=found.start,
                    end_index=found.end,
                    title=found.source.title,
                    url=found.source.url,
                )
            ).model_dump()
            for found in find_citations("".join(self._choices[0].text), self._turns.sources)
        ]

    def completion(self) -> dict[str, object]:
        """Return the whole object, with its annotations."""
        completion = super().completion()
        completion["choices"][0]["message"]["annotations"] = self._annotations()
        return completion


class ModeratedAssembler(ChatAssembler):
    """Assembles a chat completion that is judged (see ``AnswerModeration``).

    The results for the input and the answers are part of the completion; in a stream, they are a
    chunk of their own after the last choice. With the mode ``block``, an answer that is flagged, or
    could not be judged, is empty and has the finish reason ``content_filter``.
    """

    def __init__(self, assembly: ChatAssembly, moderation: AnswerModeration) -> None:
        super().__init__(assembly)
        self._moderation = moderation
        self._unjudged: list[bytes] = []
        """Chunks that are sent once the answers were judged."""
        self._has_begun = self._is_over = False
        self._saved: Mapping[str, Any] = {}

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta; return the chunks it makes that may be sent now."""
        return self._judged_first(super().feed(delta))

    def _judged_first(self, frames: Sequence[bytes]) -> Sequence[bytes]:
        if not self._moderation.withholds(len(self._choices)):
            return frames
        self._unjudged += frames
        return ()

    def calls(self) -> Sequence[SiteCall]:
        """Return the calls that judge the input, then searches, then those that judge answers."""
        moderation = self._moderation
        if moderation.is_blocked:
            return []
        if calls := moderation.input_calls() or super().calls():
            return calls
        if not self._have_ended:
            return []
        return moderation.output_calls([choice.said for choice in self._choices])

    @property
    def _have_ended(self) -> bool:
        """Whether the answers have ended, all but their judgement."""
        return self._is_over or all(choice.finish for choice in self._choices)

    def save(self) -> Mapping[str, Any]:
        """Return the state of the last searches, also while something is judged."""
        if super().calls():
            self._saved = super().save()
        return self._saved

    def restart(self, sent: Sent, saved: Mapping[str, Any] | None = None) -> Sequence[bytes]:
        """Continue with the searches of the last turn; the input is judged first."""
        self._has_begun, self._saved = bool(saved), saved or {}
        return super().restart(sent, saved)

    def add_result(self, result: ToolResult) -> Sequence[bytes]:
        """Take the result of the first of the ``calls``; return the chunks that waited for it."""
        if not self._moderation.input_calls() and super().calls():
            return self._judged_first(super().add_result(result))
        self._moderation.take(result)
        if self._moderation.withholds(len(self._choices)):
            return ()
        frames, self._unjudged = self._unjudged, []
        return frames

    def next_request(self, request: GenerationRequest) -> GenerationRequest | None:
        """Return the request of the first turn after the input was judged, or of the next one."""
        if self._moderation.is_blocked or self._have_ended:
            return None
        if not self._has_begun:
            self._has_begun = True
            return request
        following = super().next_request(request)
        self._is_over = following is None
        return following

    def complete(self) -> Ending:
        """End the answers; those that were blocked are empty."""
        if not self._moderation.is_blocked:
            return super().complete()
        self._discard()
        ends = [Finish("content_filter", index) for index in range(len(self._choices))]
        frames = [frame for end in ends for frame in super(ModeratedAssembler, self).feed(end)]
        ending = super().complete()
        return replace(ending, frames=[*frames, *ending.frames])

    def fail(self, error: Exception) -> Ending:
        """End with the error, and with the partial answers if they may be shown."""
        if self._moderation.withholds(len(self._choices)):
            self._discard()
        return super().fail(error)

    def _discard(self) -> None:
        """Forget the answers; nothing of them was sent."""
        self._unjudged.clear()
        self.reset()

    def last_chunks(self) -> list[bytes]:
        """Return the chunk with the results, before the others after the last choice."""
        body = orjson.dumps(self._judged().model_dump())
        return [self.chunk_without_choices(b',"moderation":' + body), *super().last_chunks()]

    def completion(self) -> dict[str, Any]:
        """Return the whole object, with the results of the moderation."""
        return {**super().completion(), "moderation": self._judged().model_dump()}

    def _judged(self) -> ChatModeration:
        return ChatModeration(input=self._results("input"), output=self._results("output"))

    def _results(self, name: str) -> ModerationResults | ModerationErrorBody:
        """Return the results for the input or the answers; the first error if there is one."""
        shown = self._moderation.shown(name)
        results = [one for one in shown if not isinstance(one, ModerationErrorBody)]
        if len(results) == len(shown):
            return ModerationResults(model=results[0].model, results=results)
        return next(one for one in shown if isinstance(one, ModerationErrorBody))


class ModeratedSearchingAssembler(ModeratedAssembler, SearchingAssembler):
    """Assembles a chat completion that searches the web and is judged."""
