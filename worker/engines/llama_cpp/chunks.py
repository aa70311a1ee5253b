"""From llama.cpp's chunks to deltas."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import orjson

from inference_site.domain.deltas import (
    Finish,
    FinishReason,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from inference_site.domain.errors import (
    ContextLengthExceeded,
    EngineError,
    GenerationFailed,
    InvalidRequest,
)
from inference_site.domain.request import GenerationRequest
from worker.engines.base import Sink
from worker.engines.chat.forced_call import forced_reader, new_call_id
from worker.engines.llama_cpp.stop_tokens import cut_at


class ChunkReader:
    """The callback of one call: feeds the sink, and says when to stop."""

    def __init__(self, request: GenerationRequest, sink: Sink) -> None:
        self._sink = sink
        self._request = request
        self._top_logprobs = request.top_logprobs
        self._forced = (
            [forced_reader(request, index) for index in range(request.answers)]
            if request.must_call
            else None
        )
        self._usage = UsageReader(request.choices)
        self._stop_ids = frozenset(request.stop_token_ids)
        self._stopped: set[int] = set()
        self._failure: BaseException | None = None

    @property
    def begun(self) -> bool:
        """Whether llama.cpp took the request: what it raises before is about the request."""
        return self._usage.begun

    def on_chunk(self, chunk: bytes) -> bool:
        """Feed one chunk; return True to stop. llama.cpp swallows exceptions, so they are kept."""
        if self._sink.cancelled:
            return True
        try:
            self._feed(orjson.loads(chunk))
        except BaseException as exc:  # noqa: BLE001  # Raised again by close().
            self._failure = exc
            return True
        return len(self._stopped) == self._request.answers

    def close(self) -> None:
        """Account for what ran, then raise what stopped it."""
        if self._usage.begun and not isinstance(self._failure, EngineError):
            self._sink.feed(self._usage.total())
        if self._failure is not None:
            raise self._failure

    def _feed(self, chunk: dict[str, Any] | None) -> None:
        if chunk is None:  # What a completion of several prompts begins with.
            return
        if "error" in chunk:
            raise engine_error(chunk["error"], self._request)
        self._usage.take(chunk, self._stopped)
        if self._request.running_usage and self._usage.begun:
            self._sink.feed(self._usage.total())
        if self._request.return_progress and (progress := chunk.get("prompt_progress")):
            self._sink.feed(_progress(progress))
        for choice in chunk["choices"]:
            # A completion's choice has its text in place of a delta.
            delta = choice["delta"] if "delta" in choice else {"content": choice["text"]}
            stop = self._stopping_word(chunk) if choice["finish_reason"] else None
            self._feed_choice(choice, choice["index"], delta, stop)

    def _stopping_word(self, chunk: dict[str, Any]) -> str | None:
        """Return the stop text that ended a choice; only verbose chunks name it.

        Those of the chat template are not the request's.
        """
        word = chunk.get("__verbose", {}).get("stopping_word")
        return word if word in self._request.stop else None

    def _feed_choice(
        self, choice: dict[str, Any], index: int, delta: dict[str, Any], stop: str | int | None
    ) -> None:
        if self._stop_ids:
            if index in self._stopped:
                return
            if cut := cut_at(self._stop_ids, choice):
                delta, stop = cut.shorten(delta), cut.token
                choice = {**choice, "logprobs": {"content": cut.before}, "finish_reason": "stop"}
                self._stopped.add(index)
        if text := delta.get("content"):
            self._feed_text(text, index, choice)
        if reasoning := delta.get("reasoning_content"):
            self._usage.reasoned(index)
            self._sink.feed(ReasoningDelta(reasoning, index))
        for call in delta.get("tool_calls") or ():
            self._sink.feed(_tool_call(call, index))
        if reason := choice["finish_reason"]:
            self._sink.feed(Finish(self._finish_reason(reason, index), index, stop))

    def _feed_text(self, text: str, index: int, choice: dict[str, Any]) -> None:
        if self._forced is None:
            self._sink.feed(TextDelta(text, index, _logprobs(choice, self._top_logprobs)))
            return
        for piece in self._forced[index].feed(text):
            self._sink.feed(piece)

    def _finish_reason(self, reason: str, index: int) -> FinishReason:
        if reason == "length":
            return "length"
        if self._forced is not None:
            return "tool_calls" if self._forced[index].is_complete else "length"
        return "tool_calls" if reason == "tool_calls" else "stop"


class UsageReader:
    """Token counts from llama.cpp's timings, also of a run that is stopped early.

    Each choice has timings of its own. Those that come after its last chunk, with an empty list of
    choices, also count the token that ended it.
    """

    def __init__(self, choices: int) -> None:
        self._choices = choices
        self._timings: dict[int, dict[str, Any]] = {}
        self._reasoning: dict[int, int] = {}
        self._index = 0

    @property
    def begun(self) -> bool:
        """Whether any timings have come."""
        return bool(self._timings)

    def take(self, chunk: dict[str, Any], stopped: Collection[int]) -> None:
        """Note the timings of a chunk, unless its choice has ended for whoever asked."""
        if chunk["choices"]:
            self._index = chunk["choices"][0]["index"]
        if self._index not in stopped and (timings := chunk.get("timings")):
            self._timings[self._index] = timings

    def reasoned(self, index: int) -> None:
        """Note that all tokens of this choice so far are reasoning."""
        self._reasoning[index] = self._timings.get(index, {}).get("predicted_n", 0)

    def total(self) -> Usage:
        """Return the sum; a prompt, which its choices share, counts once."""
        prompts: dict[int, dict[str, Any]] = {}
        for index, timings in sorted(self._timings.items()):
            prompts.setdefault(index // self._choices, timings)
        return Usage(
            input_tokens=sum(t["cache_n"] + t["prompt_n"] for t in prompts.values()),
            cached_tokens=sum(t["cache_n"] for t in prompts.values()),
            output_tokens=sum(timings["predicted_n"] for timings in self._timings.values()),
            reasoning_tokens=sum(self._reasoning.values()),
            prefill_ms=sum(timings["prompt_ms"] for timings in prompts.values()),
            decode_ms=max((t["predicted_ms"] for t in self._timings.values()), default=0.0),
        )


def _logprobs(choice: dict[str, Any], top: int | None) -> tuple[TokenLogprob, ...]:
    """Return the log probabilities of a chunk's tokens; none when they were not asked for."""
    if top is None or not choice.get("logprobs"):
        return ()
    return tuple(
        TokenLogprob(
            entry["token"],
            entry["logprob"],
            bytes(entry["bytes"]),
            tuple(
                TokenLogprob(other["token"], other["logprob"], bytes(other["bytes"]))
                for other in entry["top_logprobs"][:top]
            ),
        )
        for entry in choice["logprobs"]["content"]
    )


def _progress(wire: dict[str, Any]) -> PromptProgress:
    return PromptProgress(wire["total"], wire["cache"], wire["processed"], wire["time_ms"])


def engine_error(error: dict[str, Any], request: GenerationRequest) -> EngineError:
    """Map llama.cpp's error object to ours."""
    if error.get("type") == "exceed_context_size_error":
        return ContextLengthExceeded(error["n_ctx"], error["n_prompt_tokens"], request.subject)
    message = str(error.get("message", "unknown error"))
    if 400 <= int(error.get("code", 500)) < 500:
        return InvalidRequest(message, _culprit(message, request))
    return GenerationFailed(f"llama.cpp: {message}")


def _culprit(message: str, request: GenerationRequest) -> str | None:
    """Return the field that llama.cpp's message is about, if it shows."""
    if "invalid tokens" in message:
        return request.subject
    # llama.cpp reports a grammar that cannot be compiled as samplers that cannot be made.
    if "sampler" in message.lower() and request.constraint is not None:
        return request.constraint.param
    return None


def _tool_call(call: dict[str, Any], index: int) -> ToolCallDelta:
    function = call.get("function", {})
    name = function.get("name") or None
    return ToolCallDelta(
        call=call["index"],
        arguments=function.get("arguments") or "",
        id=new_call_id() if name else None,  # The library's has no prefix.
        name=name,
        index=index,
    )
