"""From deltas to the chunks and the final object of a chat completion.

A pure fold: the same deltas give the same bytes. Chunks are formatted from prebuilt parts, which is
faster than encoding whole wire models; a test proves that both give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import orjson

from completions.wire.chat import (
    ChatCompletion,
    Choice,
    ChoiceLogprobs,
    CompletionTokensDetails,
    CompletionUsage,
    ContentLogprob,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    ResponseMessage,
    Timings,
    TopLogprob,
)
from completions.wire.chat import FinishReason as WireFinishReason
from completions.wire.messages import (
    CustomCall,
    FunctionCall,
    MessageCustomToolCall,
    MessageFunctionToolCall,
    MessageToolCall,
)
from inference_site.core.domain.deltas import (
    AnswerTokens,
    Delta,
    Finish,
    PromptProgress,
    PromptTokens,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
    is_output,
)
from inference_site.core.domain.errors import Cancelled
from inference_site.runs.kinds import DONE, Assembler, cancelled, failure
from inference_site.runs.streams.batches import Ending, Sent
from inference_site.runs.streams.request_documents import Assembly

_DATA = b"data: {"


def chat_deltas(frames: Sequence[bytes]) -> Iterator[Delta]:
    """Yield the deltas of the chunks of a chat completion."""
    for choice in choices_of(frames):
        delta, index = choice["delta"], choice["index"]
        if text := delta.get("content"):
            yield TextDelta(text, index)
        if text := delta.get("reasoning_content"):
            yield ReasoningDelta(text, index)
        if text := delta.get("refusal"):
            yield RefusalDelta(text, index)
        for call in delta.get("tool_calls") or ():
            is_custom = "custom" in call
            function = call["custom" if is_custom else "function"]
            text = function["input" if is_custom else "arguments"]
            yield ToolCallDelta(
                call["index"], text, call.get("id"), function.get("name"), index, is_custom
            )
        if function := delta.get("function_call"):
            call_id = "call" if "name" in function else None
            yield ToolCallDelta(0, function["arguments"], call_id, function.get("name"), index)
        if reason := choice["finish_reason"]:
            domain_reason: Any = "tool_calls" if reason == "function_call" else reason
            yield Finish(domain_reason, index, choice.get("stop_str"))


def choices_of(frames: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the choices of the chunks of a chat completion or a completion."""
    for frame in frames:
        if frame.startswith(_DATA):
            yield from orjson.loads(frame[len(_DATA) - 1 :]).get("choices", ())


CHAT = "chat.completion"
"""Name of this kind of generation."""

SYSTEM_FINGERPRINT = "fp_inference_site"


class Recording:
    """The sizes of an answer's deltas, from which a stored answer can be streamed again.

    A run of deltas of one sort is ``[sort, choice, sizes]``, with the characters of each delta. The
    sorts are ``text``, ``reasoning``, ``refusal``, ``finish``, ``progress``, ``call N`` (the first
    delta of a call) and ``arguments N`` (the later ones). A run of text with log probabilities has
    one more list: the number of entries of each delta.
    """

    def __init__(self) -> None:
        self.runs: list[list[Any]] = []

    def take(self, delta: Delta) -> None:
        """Add a delta."""
        match delta:
            case TextDelta(text, index, logprobs):
                self._add("text", index, len(text), len(logprobs))
            case ReasoningDelta(text, index):
                self._add("reasoning", index, len(text))
            case RefusalDelta(text, index):
                self._add("refusal", index, len(text))
            case ToolCallDelta():
                is_first = delta.id is not None and delta.name is not None
                sort = f"call {delta.call}" if is_first else f"arguments {delta.call}"
                self._add(sort, delta.index, len(delta.arguments))
            case Finish(index=index):
                self._add("finish", index, 0)
            case PromptProgress():
                self._add("progress", 0, 0)

    def _add(self, sort: str, index: int, size: int, logprobs: int = 0) -> None:
        last = self.runs[-1] if self.runs else None
        if last is None or last[:2] != [sort, index] or (len(last) > 3) != bool(logprobs):
            last = [sort, index, [], []] if logprobs else [sort, index, []]
            self.runs.append(last)
        last[2].append(size)
        if logprobs:
            last[3].append(logprobs)


class _CallFold:
    """The state of one tool call."""

    def __init__(self, call_id: str, name: str, is_custom: bool) -> None:
        self.id, self.name, self._is_custom = call_id, name, is_custom
        self.arguments: list[str] = []

    def wire(self) -> MessageToolCall:
        if self._is_custom:
            custom = CustomCall(name=self.name, input="".join(self.arguments))
            return MessageCustomToolCall(id=self.id, custom=custom)
        return MessageFunctionToolCall(id=self.id, function=self.function())

    def function(self) -> FunctionCall:
        return FunctionCall(name=self.name, arguments="".join(self.arguments))


class _ChoiceFold:
    """The state of one choice."""

    def __init__(self, index: int, is_legacy: bool) -> None:
        self.index, self._is_legacy = index, is_legacy
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.refusal: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.calls: list[_CallFold] = []
        self.token_ids: list[int] = []
        self.finish: WireFinishReason | None = None
        self.stop: str | int | None = None

    @property
    def said(self) -> str:
        """The text, and the arguments of calls, one a line."""
        texts = ["".join(self.text), "".join(self.refusal)]
        texts += ["".join(call.arguments) for call in self.calls]
        return "\n".join(filter(None, texts))

    def take_call(self, delta: ToolCallDelta) -> None:
        """Add a piece of a tool call."""
        if delta.id is not None and delta.name is not None:
            self.calls.append(_CallFold(delta.id, delta.name, delta.is_custom))
        self.calls[delta.call].arguments.append(delta.arguments)

    def take_finish(self, finish: Finish) -> WireFinishReason:
        """Set the finish reason; return it as the API names it."""
        is_call = finish.reason == "tool_calls"
        self.finish = "function_call" if is_call and self._is_legacy else finish.reason
        self.stop = finish.stop
        return self.finish

    def wire(self, assembly: ChatAssembly) -> dict[str, Any]:
        """Return the choice of an answer; reasoning and calls are there only when there are any."""
        text, reasoning = "".join(self.text), "".join(self.reasoning)
        is_legacy_call = self._is_legacy and bool(self.calls)
        tool_calls = [] if is_legacy_call else [call.wire() for call in self.calls]
        choice = Choice(
            index=self.index,
            message=ResponseMessage(
                content=None if (self.calls or self.refusal) and not text else text,
                reasoning_content=reasoning or None,
                tool_calls=tool_calls or None,
                function_call=self.calls[0].function() if is_legacy_call else None,
                refusal="".join(self.refusal) or None,
            ),
            logprobs=wire_logprobs(self.logprobs) if assembly.logprobs else None,
            finish_reason=self.finish,
            stop_str=self.stop,
            tool_calls=tool_calls or None if assembly.repeats_calls else None,
            token_ids=self.token_ids if assembly.token_ids else None,
        ).model_dump()
        drop_none(choice["message"], "reasoning_content", "tool_calls", "function_call")
        drop_none(choice, "stop_str", "tool_calls", "token_ids")
        return choice


@dataclass(frozen=True)
class ChatAssembly(Assembly):
    """The client's choices for the format of a chat completion.

    ``records``: the completion will be stored, together with the sizes of its deltas.
    """

    completion_id: str
    created: int
    model: str
    stream: bool = False
    include_usage: bool = False
    choices: int = 1
    logprobs: bool = False
    is_legacy: bool = False
    service_tier: Literal["default", "flex", "priority"] = "default"
    timings: bool = False
    continuous_usage: bool = False
    repeats_calls: bool = False
    records: bool = False
    token_ids: bool = False
    prompt_logprobs: bool = False

    @property
    def is_replayable(self) -> bool:
        """Whether its stream can be rebuilt from the stored completion (see ``replay``)."""
        return self.records and not (self.continuous_usage or self.token_ids or self.site_tools)


class ChatAssembler(Assembler):
    """Assembles one chat completion (see ``runs.kinds.Assembler``)."""

    def __init__(self, assembly: ChatAssembly) -> None:
        self._assembly = assembly
        self._stream, self._is_legacy = assembly.stream, assembly.is_legacy
        self._usage = Usage()
        self._prompt = PromptTokens(())
        self.reset()
        self.recording = Recording() if assembly.stream and assembly.is_replayable else None
        """The sizes of the deltas, if the stream can be replayed."""
        start = self._chunk_start()
        self._heads = [
            b'data: %b,"choices":[{"index":%d,"delta":' % (start, index)
            for index in range(assembly.choices)
        ]
        self._tail = b',"usage":null}\n\n' if assembly.include_usage else b"}\n\n"

    def reset(self) -> None:
        """Begin with empty choices."""
        assembly = self._assembly
        self._choices = [_ChoiceFold(n, assembly.is_legacy) for n in range(assembly.choices)]
        self._unsent_ids: dict[int, tuple[int, ...]] = {}
        self._begun = self._begun_reading = False

    def recover(self, sent: Sent) -> None:
        """Restore the state from the sent frames (see ``Assembler``)."""
        for delta in chat_deltas(sent.frames):
            self.feed(delta)
            self.pieces += is_output(delta)

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta; return the chunks it makes."""
        if self.recording is not None:
            self.recording.take(delta)
        match delta:
            case TextDelta(text, index, logprobs):
                self._choices[index].text.append(text)
                self._choices[index].logprobs += logprobs
                content = b'{"content":' + orjson.dumps(text) + b"}"
                return self._chunks(index, content, b"null", logprobs)
            case ReasoningDelta(text, index):
                self._choices[index].reasoning.append(text)
                content = b'{"reasoning_content":' + orjson.dumps(text) + b"}"
                return self._chunks(index, content, b"null")
            case RefusalDelta(text, index):
                self._choices[index].refusal.append(text)
                return self._chunks(index, b'{"refusal":' + orjson.dumps(text) + b"}", b"null")
            case ToolCallDelta():
                self._choices[delta.index].take_call(delta)
                piece = _call_piece(delta, is_legacy=self._is_legacy)
                return self._chunks(delta.index, piece, b"null")
            case Finish(index=index, stop=stop):
                reason = orjson.dumps(self._choices[index].take_finish(delta))
                if stop is not None:
                    reason += b',"stop_str":' + orjson.dumps(stop)
                return self._chunks(index, b"{}", reason)
            case Usage():
                self._usage = delta
            case PromptProgress() if self._stream:
                self._begun_reading = True
                progress = {  # In llama-server's format.
                    "total": delta.total,
                    "cache": delta.cached,
                    "processed": delta.processed,
                    "time_ms": delta.elapsed_ms,
                }
                field = b',"prompt_progress":' + orjson.dumps(progress)
                return (self.chunk_without_choices(field),)
            case PromptTokens():
                self._prompt = delta
            case AnswerTokens(ids, index):
                self._choices[index].token_ids += ids
                self._unsent_ids[index] = self._unsent_ids.get(index, ()) + ids
        return ()

    def complete(self) -> Ending:
        """End with usage and timings, if they were asked for, and ``[DONE]``."""
        finish = self._choices[0].finish or ""
        body = b"" if self._stream else orjson.dumps(self.completion())
        return Ending([*self.last_chunks(), DONE], 200, body, finish_reason=finish)

    def last_chunks(self) -> list[bytes]:
        """Return the chunks after the last choice."""
        if not (self._assembly.include_usage or self._assembly.timings):
            return []
        chunk = b"data: " + self._chunk_start() + b',"choices":[]'
        if self._assembly.include_usage:
            chunk += b',"usage":' + orjson.dumps(wire_usage(self._usage).model_dump())
        if self._assembly.timings:
            chunk += b',"timings":' + orjson.dumps(wire_timings(self._usage).model_dump())
        return [chunk + b"}\n\n"]

    def cancel(self) -> Ending:
        """End without a finish reason: the client has disconnected or cancelled."""
        return cancelled(failure(Cancelled()), [DONE])

    def fail(self, error: Exception) -> Ending:
        """End with the error and the partial answer."""
        has_output = any(c.text or c.reasoning or c.refusal or c.calls for c in self._choices)
        partial = self.completion() if has_output else None
        is_early = not self._begun and not self._begun_reading
        return replace(failure(error, partial), is_early=is_early)

    def as_streamed(self) -> dict[str, Any] | None:
        """Return the stored description of the stream; None if it cannot be replayed."""
        if self.recording is None:
            return None
        return {
            "usage": self._assembly.include_usage,
            "legacy": self._is_legacy,
            "deltas": self.recording.runs,
        }

    def _chunks(
        self,
        index: int,
        delta: bytes,
        finish_reason: bytes,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> Sequence[bytes]:
        if not self._stream:
            return ()
        entries = orjson.dumps(wire_logprobs(logprobs).model_dump()) if logprobs else b"null"
        if ids := self._unsent_ids.pop(index, ()):
            finish_reason += b',"token_ids":' + orjson.dumps(ids)
        chunk = self._chunk(index, delta, finish_reason, entries)
        if self._begun:
            return (chunk,)
        self._begun = True
        # The role of choice 0 comes first, whichever choice has text first: the SDKs rely on it.
        role = b'{"role":"assistant","content":"","refusal":null}'
        roles = [self._chunk(n, role, b"null", b"null") for n in range(len(self._choices))]
        if self._assembly.token_ids:
            prompt = b',"prompt_token_ids":' + orjson.dumps(self._prompt.ids)
            roles[0] = roles[0].removesuffix(b"}\n\n") + prompt + b"}\n\n"
        return (*roles, chunk)

    def _chunk(self, index: int, delta: bytes, finish_reason: bytes, logprobs: bytes) -> bytes:
        tail = self._tail
        if self._assembly.continuous_usage:
            tail = b',"usage":' + orjson.dumps(wire_usage(self._usage).model_dump()) + b"}\n\n"
        return b'%b%b,"logprobs":%b,"finish_reason":%b}]%b' % (
            self._heads[index],
            delta,
            logprobs,
            finish_reason,
            tail,
        )

    def _chunk_start(self) -> bytes:
        fields = {
            "id": self._assembly.completion_id,
            "object": "chat.completion.chunk",
            "created": self._assembly.created,
            "model": self._assembly.model,
            "service_tier": self._assembly.service_tier,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }
        return orjson.dumps(fields)[:-1]

    def chunk_without_choices(self, fields: bytes) -> bytes:
        """Return a chunk with these fields, which are JSON after a comma."""
        return b"data: " + self._chunk_start() + b',"choices":[]' + fields + self._tail

    def completion(self) -> dict[str, Any]:
        """Return the whole object, as a client that does not stream gets it."""
        completion = ChatCompletion(
            id=self._assembly.completion_id,
            created=self._assembly.created,
            model=self._assembly.model,
            choices=[],
            usage=wire_usage(self._usage),
            service_tier=self._assembly.service_tier,
            system_fingerprint=SYSTEM_FINGERPRINT,
            timings=wire_timings(self._usage) if self._assembly.timings else None,
            prompt_token_ids=list(self._prompt.ids) if self._assembly.token_ids else None,
            prompt_logprobs=(
                wire_prompt_logprobs(self._prompt) if self._assembly.prompt_logprobs else None
            ),
        ).model_dump()
        drop_none(completion, "timings", "prompt_token_ids", "prompt_logprobs")
        completion["choices"] = [choice.wire(self._assembly) for choice in self._choices]
        return completion


def _call_piece(delta: ToolCallDelta, *, is_legacy: bool) -> bytes:
    """Return the delta of a chunk: id, type and name once, or the SDKs would add them up."""
    if is_legacy:  # The answer to ``functions``, from before there were tools.
        named = {} if delta.name is None else {"name": delta.name}
        return orjson.dumps({"function_call": {**named, "arguments": delta.arguments}})
    kind, value = ("custom", "input") if delta.is_custom else ("function", "arguments")
    piece: dict[str, Any] = {"index": delta.call}
    called: dict[str, Any] = {value: delta.arguments}
    if delta.id is not None:
        piece |= {"id": delta.id, "type": kind}
        called = {"name": delta.name, **called}
    return orjson.dumps({"tool_calls": [{**piece, kind: called}]})


def arguments_object(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object, for APIs whose clients expect no text."""
    try:
        arguments = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return {"input": text}
    return arguments if isinstance(arguments, dict) else {"input": arguments}


def drop_none(fields: dict[str, Any], *names: str) -> None:
    """Leave out those of these fields that are null."""
    for name in names:
        if fields[name] is None:
            del fields[name]


def wire_usage(usage: Usage) -> CompletionUsage:
    """Return the counts as chat completions and completions show them."""
    return CompletionUsage(
        prompt_tokens=usage.input_tokens,
        completion_tokens=usage.output_tokens,
        total_tokens=usage.input_tokens + usage.output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=usage.reasoning_tokens),
    )


def wire_timings(usage: Usage) -> Timings:
    """Return how long the prompt and the answer took, as llama.cpp reports it."""
    computed = usage.input_tokens - usage.cached_tokens
    return Timings(
        cache_n=usage.cached_tokens,
        prompt_n=computed,
        prompt_ms=usage.prefill_ms,
        prompt_per_second=_per_second(computed, usage.prefill_ms),
        predicted_n=usage.output_tokens,
        predicted_ms=usage.decode_ms,
        predicted_per_second=_per_second(usage.output_tokens, usage.decode_ms),
    )


def _per_second(tokens: int, elapsed_ms: float) -> float:
    return tokens / elapsed_ms * 1000 if elapsed_ms else 0.0


def wire_prompt_logprobs(prompt: PromptTokens) -> PromptLogprobs:
    """Return the log probabilities of a prompt's tokens in vLLM's form."""
    return [
        None
        if entry is None
        else {
            str(token): PromptLogprob(
                logprob=one.logprob, rank=one.rank, decoded_token=one.decoded_token
            )
            for token, one in entry.items()
        }
        for entry in prompt.logprobs
    ]


def wire_logprobs(logprobs: Sequence[TokenLogprob]) -> ChoiceLogprobs:
    """Return log probabilities as choices have them."""
    return ChoiceLogprobs(
        content=[
            ContentLogprob(
                token=entry.token,
                logprob=entry.logprob,
                bytes=list(entry.text_bytes),
                top_logprobs=[
                    TopLogprob(token=o.token, logprob=o.logprob, bytes=list(o.text_bytes))
                    for o in entry.top
                ],
            )
            for entry in logprobs
        ]
    )
