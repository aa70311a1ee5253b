"""From deltas to lines of JSON, as Ollama streams them, or to one object."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

from completions.assemblers.chat import arguments_object, wire_logprobs
from completions.assemblers.tokens import EmbeddingAssembler, EmbeddingAssembly
from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from inference_site.core.domain.errors import Cancelled
from inference_site.core.errors.exceptions import api_error
from inference_site.runs.kinds import Assembler, cancelled, error_ending
from inference_site.runs.streams.batches import Ending, Sent
from inference_site.runs.streams.request_documents import Assembly

OLLAMA, OLLAMA_EMBEDDING = "ollama", "ollama.embedding"
"""Names of these kinds of generations."""

_NS_OF_MS = 1_000_000


@dataclass(frozen=True)
class OllamaAssembly(Assembly):
    """The format of an answer; ``started_at`` is in Unix seconds."""

    model: str
    shape: Literal["chat", "generate"]
    stream: bool
    started_at: float


class OllamaAssembler(Assembler):
    """Assembles one answer (see ``runs.kinds.Assembler``). Calls come whole, in one line."""

    def __init__(self, assembly: OllamaAssembly) -> None:
        self._assembly = assembly
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []
        self._logprobs: list[TokenLogprob] = []
        self._usage = Usage()
        self._reason = ""
        self._begun = False

    def recover(self, sent: Sent) -> None:
        """Restore the state from the sent frames (see ``Assembler``): one line for each piece."""
        self._begun, self.pieces = bool(sent.frames), len(sent.frames)

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta; return the lines it makes."""
        match delta:
            case TextDelta(text, _, logprobs):
                self._text.append(text)
                self._logprobs += logprobs
                return self._line(text=text, logprobs=logprobs)
            case RefusalDelta(text):  # This API has no field for it.
                self._text.append(text)
                return self._line(text=text)
            case ReasoningDelta(text):
                self._thinking.append(text)
                return self._line(thinking=text)
            case ToolCallDelta(call, arguments, id=call_id, name=name):
                if name is not None:
                    self._calls.append((call_id or "", name, []))
                self._calls[call][2].append(arguments)
            case Finish(reason):
                self._reason = "length" if reason == "length" else "stop"
                return self._line(calls=self._wire_calls()) if self._calls else ()
            case Usage():
                self._usage = delta
        return ()

    def complete(self) -> Ending:
        """End with the counts."""
        if self._assembly.stream:
            last = {**self._head(), **self._content(), **self._end()}
            return Ending([self._encoded(last)], 200, b"", finish_reason=self._reason)
        content = self._content(
            "".join(self._text), "".join(self._thinking), self._wire_calls(), self._logprobs
        )
        body = orjson.dumps({**self._head(), **content, **self._end()})
        return Ending([], 200, body, finish_reason=self._reason)

    def cancel(self) -> Ending:
        """End because it was stopped."""
        return cancelled(failure(Cancelled()))

    def fail(self, error: Exception) -> Ending:
        """End with the error."""
        return replace(failure(error), is_early=not self._begun)

    def _line(self, **content: Any) -> Sequence[bytes]:
        if not self._assembly.stream:
            return ()
        self._begun = True
        return (self._encoded({**self._head(), **self._content(**content), "done": False}),)

    def _content(
        self,
        text: str = "",
        thinking: str = "",
        calls: list[dict[str, Any]] | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> dict[str, Any]:
        thoughts = {"thinking": thinking} if thinking else {}
        entries = {"logprobs": wire_logprobs(logprobs).model_dump()["content"]} if logprobs else {}
        if self._assembly.shape == "generate":
            return {"response": text, **thoughts, **entries}
        tool_calls = {"tool_calls": calls} if calls else {}
        message = {"role": "assistant", "content": text, **thoughts, **tool_calls}
        return {"message": message, **entries}

    def _wire_calls(self) -> list[dict[str, Any]]:
        return [
            {
                "id": call_id,
                "function": {
                    "index": index,
                    "name": name,
                    "arguments": arguments_object("".join(pieces)),
                },
            }
            for index, (call_id, name, pieces) in enumerate(self._calls)
        ]

    def _head(self) -> dict[str, Any]:
        return {"model": self._assembly.model, "created_at": now()}

    def _end(self) -> dict[str, Any]:
        elapsed = time.time() - self._assembly.started_at
        return {
            "done": True,
            "done_reason": self._reason or "stop",
            "total_duration": int(elapsed * 1e9),
            "load_duration": 0,
            "prompt_eval_count": self._usage.input_tokens,
            "prompt_eval_duration": int(self._usage.prefill_ms * _NS_OF_MS),
            "eval_count": self._usage.output_tokens,
            "eval_duration": int(self._usage.decode_ms * _NS_OF_MS),
        }

    @staticmethod
    def _encoded(line: dict[str, Any]) -> bytes:
        return orjson.dumps(line) + b"\n"


def failure(error: Exception, *, first: int = 0) -> Ending:
    """End with ``{"error": "…"}``; these lines have no numbers, so ``first`` has no meaning."""
    answer = api_error(error)
    body = orjson.dumps(answer.shown_at("/api/"))
    return error_ending(answer, body, [body + b"\n"])


def now() -> str:
    """Return the time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True)
class OllamaEmbeddingAssembly(EmbeddingAssembly):
    """How embeddings are written; ``is_single``: for ``/api/embeddings``, which takes one text."""

    is_single: bool = False
    started_at: float = 0.0


class OllamaEmbeddingAssembler(EmbeddingAssembler):
    """Assembles the embeddings of one request (see ``runs.kinds.Assembler``)."""

    def __init__(self, assembly: OllamaEmbeddingAssembly) -> None:
        super().__init__(assembly)
        self._is_single, self._started_at = assembly.is_single, assembly.started_at

    def answer(self) -> dict[str, Any]:
        """Return the list, or the only one."""
        answer = super().answer()
        vectors = [entry["embedding"] for entry in answer["data"]]
        if self._is_single:
            return {"embedding": vectors[0]}
        return {
            "model": answer["model"],
            "embeddings": vectors,
            "total_duration": int((time.time() - self._started_at) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": answer["usage"]["prompt_tokens"],
        }

    def fail(self, error: Exception) -> Ending:
        """End with the error."""
        return failure(error)
