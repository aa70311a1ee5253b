"""Deltas → the chunks and the final object of a completion (see ``completions.assembler``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import orjson

from completions.assembler import DONE, SYSTEM_FINGERPRINT, failure, wire_usage
from completions.wire.completion import Completion, CompletionChoice, CompletionLogprobs
from worker.assembly import Ending
from worker.generation import Delta, Finish, TextDelta, TokenLogprob, Usage

COMPLETION = "text_completion"
"""Name of this kind of generation."""


class _ChoiceFold:
    """What one choice has come to so far; ``echo`` is the prompt, when it is to be repeated."""

    def __init__(self, index: int, echo: str) -> None:
        self.index, self.echo = index, echo
        self.text = ""
        self.logprobs: list[TokenLogprob] = []
        self.offset = len(echo)
        self.finish: Literal["stop", "length"] = "stop"
        self.is_begun = False

    def take(self, delta: TextDelta) -> CompletionChoice:
        """Add a piece; return the choice of its chunk."""
        self.text += delta.text
        self.logprobs += delta.logprobs
        told = self._told(delta.logprobs) if delta.logprobs else None
        text = delta.text if self.is_begun else self.echo + delta.text
        self.is_begun = True
        return CompletionChoice(text=text, index=self.index, logprobs=told)

    def end(self) -> CompletionChoice:
        """Return the choice of the last chunk."""
        text = "" if self.is_begun else self.echo
        return CompletionChoice(text=text, index=self.index, finish_reason=self.finish)

    def whole(self, with_logprobs: bool) -> CompletionChoice:
        """Return the choice of an answer."""
        self.offset = len(self.echo)
        return CompletionChoice(
            text=self.echo + self.text,
            index=self.index,
            logprobs=self._told(self.logprobs) if with_logprobs else None,
            finish_reason=self.finish,
        )

    def _told(self, logprobs: Sequence[TokenLogprob]) -> CompletionLogprobs:
        offsets = []
        for entry in logprobs:
            offsets.append(self.offset)
            self.offset += len(entry.token)
        return CompletionLogprobs(
            tokens=[entry.token for entry in logprobs],
            token_logprobs=[entry.logprob for entry in logprobs],
            top_logprobs=[{o.token: o.logprob for o in entry.top} for entry in logprobs],
            text_offset=offsets,
        )


class CompletionAssembler:
    """Assembles one completion (see ``worker.assembly.Assembler``).

    ``echoes`` has a text for each choice, empty when the prompt is not repeated.
    """

    def __init__(
        self,
        completion_id: str,
        created: int,
        model: str,
        stream: bool,
        include_usage: bool,
        echoes: list[str],
        logprobs: bool,
    ) -> None:
        self._id, self._created, self._model = completion_id, created, model
        self._stream, self._include_usage, self._logprobs = stream, include_usage, logprobs
        self._choices = [_ChoiceFold(index, echo) for index, echo in enumerate(echoes)]
        self._usage = Usage()
        self._begun = False

    @classmethod
    def from_assembly(cls, assembly: dict[str, Any]) -> CompletionAssembler:
        """Make it from the ``assembly`` of a request document, which has the arguments' names."""
        return cls(**assembly)

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta; return the chunks it makes."""
        match delta:
            case TextDelta():
                return self._chunk([self._choices[delta.index].take(delta)])
            case Finish(reason, index):
                choice = self._choices[index]
                choice.finish = "length" if reason == "length" else "stop"
                return self._chunk([choice.end()])
            case Usage():
                self._usage = delta
        return ()

    def complete(self) -> Ending:
        """End with usage, if it was asked for, and ``[DONE]``."""
        usage = self._chunk([], with_usage=True) if self._include_usage else ()
        return Ending([*usage, DONE], 200, self._body(), finish_reason=self._choices[0].finish)

    def cancel(self) -> Ending:
        """End because it was stopped."""
        return Ending([DONE], 200, self._body())

    def fail(self, error: Exception) -> Ending:
        """End with the error."""
        return replace(failure(error), is_early=not self._begun)

    def _chunk(self, choices: list[CompletionChoice], with_usage: bool = False) -> Sequence[bytes]:
        if not self._stream:
            return ()
        self._begun = True
        chunk = self._wire(choices, with_usage).model_dump()
        if not self._include_usage:
            del chunk["usage"]
        return (b"data: " + orjson.dumps(chunk) + b"\n\n",)

    def _body(self) -> bytes:
        if self._stream:
            return b""
        choices = [choice.whole(self._logprobs) for choice in self._choices]
        return orjson.dumps(self._wire(choices, with_usage=True).model_dump())

    def _wire(self, choices: list[CompletionChoice], with_usage: bool) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            system_fingerprint=SYSTEM_FINGERPRINT,
            usage=wire_usage(self._usage) if with_usage else None,
        )
