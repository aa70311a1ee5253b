"""Deltas → the answer of llama-server's ``/infill``, or the events of its stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from completions.assemblers.chat import wire_timings
from completions.wire.infill import Infill
from inference_site.domain.deltas import Delta, Finish, TextDelta, Usage
from inference_site.domain.errors import Cancelled
from inference_site.generations.kinds import Assembler, cancelled, failure
from inference_site.streams.ending import Ending
from inference_site.streams.request_documents import Assembly

INFILL = "infill"
"""Name of this kind of generation."""


@dataclass(frozen=True)
class InfillAssembly(Assembly):
    """How an answer is written."""

    model: str
    stream: bool = False


class InfillAssembler(Assembler):
    """Assembles one answer (see ``generations.kinds.Assembler``)."""

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

    def _event(self, said: Infill) -> Sequence[bytes]:
        encoded = said.model_dump_json(exclude_none=True).encode()
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
