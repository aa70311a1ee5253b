"""Deltas → the chunks and the final object of a completion (see ``chat``)."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import orjson

from completions.assemblers.chat import (
    SYSTEM_FINGERPRINT,
    choices_of,
    drop_none,
    wire_prompt_logprobs,
    wire_timings,
    wire_usage,
)
from completions.wire.completion import Completion, CompletionChoice, CompletionLogprobs, Infill
from inference_site.core.domain.deltas import (
    AnswerTokens,
    Delta,
    Finish,
    PromptTokens,
    TextDelta,
    TokenLogprob,
    Usage,
)
from inference_site.core.domain.errors import Cancelled
from inference_site.runs.kinds import DONE, Assembler, cancelled, failure
from inference_site.runs.streams.batches import Ending, Sent
from inference_site.runs.streams.request_documents import Assembly

COMPLETION = "text_completion"
"""Name of this kind of generation."""


class _ChoiceFold:
    """The state of one choice; ``echo`` is the prompt if the answer repeats it."""

    def __init__(self, index: int, echo: str) -> None:
        self.index, self.echo = index, echo
        self.text = ""
        self.logprobs: list[TokenLogprob] = []
        self._offsets = _TextOffsets(len(echo))
        self.finish: Literal["stop", "length", "content_filter"] | None = None
        self.stop: str | int | None = None
        self.is_begun = False
        self.prompt = PromptTokens(())
        self.token_ids: list[int] = []
        self._sent_ids = 0

    def take(self, delta: TextDelta) -> CompletionChoice:
        """Add a piece; return the choice of its chunk."""
        self.text += delta.text
        self.logprobs += delta.logprobs
        shown = self._shown(delta.logprobs) if delta.logprobs else None
        text = delta.text if self.is_begun else self.echo + delta.text
        self.is_begun = True
        return CompletionChoice(text=text, index=self.index, logprobs=shown)

    def end(self) -> CompletionChoice:
        """Return the choice of the last chunk."""
        text = "" if self.is_begun else self.echo
        return CompletionChoice(
            text=text, index=self.index, finish_reason=self.finish, stop_str=self.stop
        )

    def with_tokens(self, choice: CompletionChoice) -> CompletionChoice:
        """Return the choice of a chunk with the token ids that no earlier chunk had."""
        new, is_first = self.token_ids[self._sent_ids :], self._sent_ids == 0
        self._sent_ids += len(new)
        prompt = list(self.prompt.ids) if is_first else None
        return choice.model_copy(update={"token_ids": new, "prompt_token_ids": prompt})

    def whole(self, index: int, assembly: CompletionAssembly) -> CompletionChoice:
        """Return the choice of an answer, under this index."""
        self._offsets = _TextOffsets(len(self.echo))
        return CompletionChoice(
            text=self.echo + self.text,
            index=index,
            logprobs=self._shown(self.logprobs) if assembly.logprobs else None,
            finish_reason=self.finish,
            stop_str=self.stop,
            token_ids=self.token_ids if assembly.token_ids else None,
            prompt_token_ids=list(self.prompt.ids) if assembly.token_ids else None,
            prompt_logprobs=wire_prompt_logprobs(self.prompt) if assembly.prompt_logprobs else None,
        )

    @property
    def likelihood(self) -> float:
        """The mean log probability of its tokens, by which ``best_of`` ranks choices."""
        if not self.logprobs:
            return -math.inf
        return sum(entry.logprob for entry in self.logprobs) / len(self.logprobs)

    def _shown(self, logprobs: Sequence[TokenLogprob]) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[entry.token for entry in logprobs],
            token_logprobs=[None if math.isnan(e.logprob) else e.logprob for e in logprobs],
            # The likeliest tokens and the sampled one; null for the first token of a prompt.
            top_logprobs=[
                None
                if math.isnan(e.logprob)
                else {other.token: other.logprob for other in e.top} | {e.token: e.logprob}
                for e in logprobs
            ],
            text_offset=[self._offsets.before(entry.text_bytes) for entry in logprobs],
        )


class _TextOffsets:
    """Counts the characters of a text whose pieces may end inside a character."""

    def __init__(self, offset: int) -> None:
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def before(self, piece: bytes) -> int:
        """Take the next piece; return the offset of its first character."""
        offset = self._offset
        self._offset += len(self._decoder.decode(piece))
        return offset


@dataclass(frozen=True)
class CompletionAssembly(Assembly):
    """The client's choices for the format of a completion.

    ``echoes`` has a text for each choice, empty when the prompt is not repeated. Of the ``best_of``
    choices of each prompt the answer has the ``n`` likeliest; None: all of them.
    """

    completion_id: str
    created: int
    model: str
    stream: bool = False
    include_usage: bool = False
    echoes: list[str] = field(default_factory=lambda: [""])
    logprobs: bool = False
    n: int | None = None
    best_of: int = 1
    timings: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    prompt_logprobs: bool = False


class CompletionAssembler(Assembler):
    """Assembles one completion (see ``runs.kinds.Assembler``)."""

    def __init__(self, assembly: CompletionAssembly) -> None:
        self._assembly = assembly
        self._choices = [_ChoiceFold(index, echo) for index, echo in enumerate(assembly.echoes)]
        self._usage = Usage()
        self._begun = False

    def recover(self, sent: Sent) -> None:
        """Restore the state from the sent frames (see ``Assembler``)."""
        for sent_choice in choices_of(sent.frames):
            index, text, reason = (sent_choice[k] for k in ("index", "text", "finish_reason"))
            choice = self._choices[index]
            if not choice.is_begun:
                text = text.removeprefix(choice.echo)
            if text or not reason:
                self.feed(TextDelta(text, index))
                self.pieces += 1
            if reason:
                self.feed(Finish(reason, index, sent_choice.get("stop_str")))

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta; return the chunks it makes."""
        match delta:
            case TextDelta(index=index):
                return self._piece(index, self._choices[index].take(delta))
            case Finish(reason, index, stop):
                choice = self._choices[index]
                choice.finish = "stop" if reason == "tool_calls" else reason
                choice.stop = stop
                return self._piece(index, choice.end())
            case Usage():
                self._usage = delta
            case PromptTokens(index=index):
                self._choices[index].prompt = delta
            case AnswerTokens(ids, index):
                self._choices[index].token_ids += ids
        return ()

    def complete(self) -> Ending:
        """End with usage, if it was asked for, and ``[DONE]``."""
        is_asked = self._assembly.include_usage or self._assembly.timings
        last = self._chunk([], is_last=True) if is_asked else ()
        finish = self._choices[0].finish or ""
        body = b"" if self._assembly.stream else orjson.dumps(self._whole())
        return Ending([*last, DONE], 200, body, finish_reason=finish)

    def cancel(self) -> Ending:
        """End because it was stopped."""
        return cancelled(failure(Cancelled()), [DONE])

    def fail(self, error: Exception) -> Ending:
        """End with the error and the partial answer."""
        has_output = any(choice.text for choice in self._choices)
        return replace(
            failure(error, self._whole() if has_output else None), is_early=not self._begun
        )

    def _piece(self, index: int, choice: CompletionChoice) -> Sequence[bytes]:
        """Return the chunk of one choice."""
        if self._assembly.token_ids:
            choice = self._choices[index].with_tokens(choice)
        return self._chunk([choice])

    def _chunk(self, choices: list[CompletionChoice], is_last: bool = False) -> Sequence[bytes]:
        if not self._assembly.stream:
            return ()
        self._begun = True
        chunk = self._wire(choices, is_last)
        if not self._assembly.include_usage:
            del chunk["usage"]
        return (b"data: " + orjson.dumps(chunk) + b"\n\n",)

    def _whole(self) -> dict[str, Any]:
        """Return the object as a client that does not stream gets it."""
        chosen, count = self._choices, self._assembly.best_of
        if self._assembly.n is not None:  # The likeliest choices of each prompt.
            chosen = []
            for first in range(0, len(self._choices), count):
                prompt_choices = self._choices[first : first + count]
                prompt_choices.sort(key=lambda choice: choice.likelihood, reverse=True)
                chosen += prompt_choices[: self._assembly.n]
        choices = [choice.whole(index, self._assembly) for index, choice in enumerate(chosen)]
        return self._wire(choices, is_last=True)

    def _wire(self, choices: list[CompletionChoice], is_last: bool) -> dict[str, Any]:
        has_usage = is_last or self._assembly.continuous_usage
        completion = Completion(
            id=self._assembly.completion_id,
            created=self._assembly.created,
            model=self._assembly.model,
            choices=choices,
            system_fingerprint=SYSTEM_FINGERPRINT,
            usage=wire_usage(self._usage) if has_usage else None,
            timings=wire_timings(self._usage) if is_last and self._assembly.timings else None,
        ).model_dump()
        drop_none(completion, "timings")
        for choice in completion["choices"]:
            drop_none(choice, "stop_str", "token_ids", "prompt_token_ids", "prompt_logprobs")
        return completion


INFILL = "infill"
"""Name of this kind of generation."""


@dataclass(frozen=True)
class InfillAssembly(Assembly):
    """The model's name, and whether the answer is streamed."""

    model: str
    stream: bool = False


class InfillAssembler(Assembler):
    """Assembles one answer (see ``runs.kinds.Assembler``)."""

    def __init__(self, assembly: InfillAssembly) -> None:
        self._assembly = assembly
        self._text = ""
        self._usage = Usage()
        self._end = Finish("stop")

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta; return the events it makes."""
        match delta:
            case TextDelta(text):
                self._text += text
                return self._event(Infill(content=text, stop=False))
            case Finish():
                self._end = delta
            case Usage():
                self._usage = delta
        return ()

    def complete(self) -> Ending:
        """End with the counts."""
        finish = "length" if self._end.reason == "length" else "stop"
        if self._assembly.stream:
            return Ending([*self._event(self._whole(""))], 200, b"", finish_reason=finish)
        body = self._whole(self._text).model_dump_json().encode()
        return Ending([], 200, body, finish_reason=finish)

    def cancel(self) -> Ending:
        """End because it was stopped."""
        return cancelled(failure(Cancelled()))

    def fail(self, error: Exception) -> Ending:
        """End with the error."""
        return replace(failure(error), is_early=not self._text)

    def _event(self, infill: Infill) -> Sequence[bytes]:
        encoded = infill.model_dump_json(exclude_none=True).encode()
        return (b"data: " + encoded + b"\n\n",) if self._assembly.stream else ()

    def _whole(self, text: str) -> Infill:
        stop, usage = self._end.stop, self._usage
        by_text: Literal["word", "eos"] = "word" if isinstance(stop, str) else "eos"
        return Infill(
            content=text,
            stop=True,
            model=self._assembly.model,
            tokens_predicted=usage.output_tokens,
            tokens_evaluated=usage.input_tokens,
            tokens_cached=usage.input_tokens + usage.output_tokens,
            truncated=False,
            stop_type="limit" if self._end.reason == "length" else by_text,
            stopping_word=stop if isinstance(stop, str) else "",
            timings=wire_timings(usage),
        )
