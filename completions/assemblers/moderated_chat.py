"""Chat completions whose input and answers are judged by a moderation model.

What is said of them is part of the completion; in a stream, it is a chunk of its own after the last
choice. With the mode ``block``, an answer that is flagged, or could not be judged, is empty and has
the finish reason ``content_filter``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from completions.assemblers.chat import ChatAssembler, ChatAssembly
from completions.assemblers.web_search import SearchingAssembler
from completions.wire.chat import ChatModeration, ModerationResults
from inference_site.core.domain.deltas import Delta, Finish
from inference_site.core.domain.request import GenerationRequest
from inference_site.core.domain.site_tools import SiteCall, ToolResult
from inference_site.gateway.request_fields.moderation import (
    MODERATION,
    AnswerModeration,
    ModerationErrorBody,
)
from inference_site.runs.streams.batches import Ending, Sent


def chat_assembler(assembly: ChatAssembly) -> ChatAssembler:
    """Return the assembler of a chat completion."""
    searches = any(options["type"] != MODERATION for options in assembly.site_tools)
    moderation = AnswerModeration.of(assembly.site_tools)
    if moderation is None:
        return SearchingAssembler(assembly) if searches else ChatAssembler(assembly)
    made = ModeratedSearchingAssembler if searches else ModeratedAssembler
    return made(assembly, moderation)


class ModeratedAssembler(ChatAssembler):
    """Assembles a chat completion that is judged (see ``AnswerModeration``)."""

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
        if not self._must_wait:
            return frames
        self._unjudged += frames
        return ()

    @property
    def _must_wait(self) -> bool:
        """Whether nothing may be sent yet: the answers may be blocked, and were not judged."""
        return self._moderation.blocks_output and not self._is_judged

    @property
    def _is_judged(self) -> bool:
        judged = self._moderation.judged.get("output", ())
        return len(judged) == len(self._choices) and not self._moderation.is_blocked

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
        if self._must_wait:
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
        if self._must_wait:
            self._discard()
        return super().fail(error)

    def _discard(self) -> None:
        """Forget the answers; nothing of them was sent."""
        self._unjudged.clear()
        self.reset()

    def last_chunks(self) -> list[bytes]:
        """Return the chunk with what was said, before the others after the last choice."""
        body = orjson.dumps(self._judged().model_dump())
        return [self.chunk_without_choices(b',"moderation":' + body), *super().last_chunks()]

    def completion(self) -> dict[str, Any]:
        """Return the whole object, with what was said."""
        return {**super().completion(), "moderation": self._judged().model_dump()}

    def _judged(self) -> ChatModeration:
        return ChatModeration(input=self._results("input"), output=self._results("output"))

    def _results(self, name: str) -> ModerationResults | ModerationErrorBody:
        """Return what was said of the input or of the answers; the first error if there is one."""
        shown = self._moderation.shown(name)
        results = [one for one in shown if not isinstance(one, ModerationErrorBody)]
        if len(results) == len(shown):
            return ModerationResults(model=results[0].model, results=results)
        return next(one for one in shown if isinstance(one, ModerationErrorBody))


class ModeratedSearchingAssembler(ModeratedAssembler, SearchingAssembler):
    """Assembles a chat completion that searches the web and is judged."""
