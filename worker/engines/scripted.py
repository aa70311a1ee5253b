"""An engine without weights: plays back a script of deltas, delays and failures.

For tests of what weights cannot produce on demand, and for people who write clients.

The script is a list of steps, from the model's option ``script`` or, when that is absent, from the
last user message if it is a JSON list; any other message is echoed back word by word.

    {"text": "Hello"}        text delta            {"reasoning": "Hm"}   reasoning delta
    {"sleep_ms": 50}         delay                 {"fail": "boom"}      raise GenerationFailed
    {"finish": "length"}     end the choice        {"repeat": 3, "steps": […]}   nested steps
    {"tool_call": {"name": "f", "arguments": ["{", "}"]}}   a call, its arguments in pieces
    {"recall": "You said: "}                                what the user said before, after this

A word counts as one token, in the prompt as in the answer; so does a piece of a call's arguments.
The tools of a request, and whether one must be called, are ignored: the script is played as it is.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from inference_site.catalogue.engines.scripted import ScriptedOptions
from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from inference_site.core.domain.errors import (
    ContextLengthExceeded,
    EngineLoadError,
    GenerationFailed,
    InvalidRequest,
)
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest, Message
from worker.engines.base import Engine, Sink
from worker.engines.texts import StopTexts

_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.01, 0.1
"""Bounds of the interval in which a sleeping script checks for cancellation, a tenth of its sleep.
A thousand sleeping scripts with shorter intervals would keep a core busy."""

Step = dict[str, Any]


def load(spec: ModelSpec) -> ScriptedEngine:
    """Return the engine. The options may simulate a slow or a failing load."""
    options = ScriptedOptions.of(spec)
    time.sleep(options.load_ms / 1000)
    if options.load_fails:
        raise EngineLoadError(f"Model '{spec.id}': {options.load_fails}")
    return ScriptedEngine(spec)


class ScriptedEngine(Engine):
    """Plays one script for each request; any number of requests at once."""

    def __init__(self, spec: ModelSpec) -> None:
        self._context_length = spec.context_length
        self._script: list[Step] | None = ScriptedOptions.of(spec).script

    def chat(self, request: GenerationRequest, sink: Sink) -> None:
        """Play the script into the sink (see ``Engine.chat``)."""
        prompt = sum(len((message.text or "").split()) for message in request.messages)
        if prompt >= self._context_length:
            raise ContextLengthExceeded(self._context_length, prompt)
        limit = min(
            request.max_output_tokens or prompt + self._context_length,
            self._context_length - prompt,
        )
        _Playback(request, sink, prompt, limit).play(self._steps(request))

    def complete(self, request: GenerationRequest, sink: Sink) -> None:
        """Play the one prompt as if it were the user's message (see ``Engine.complete``)."""
        [prompt] = request.prompts
        if not isinstance(prompt, str):
            raise InvalidRequest("The scripted engine has no tokens.", "prompt")
        self.chat(replace(request, messages=(Message("user", prompt),)), sink)

    def close(self) -> None:
        """Do nothing."""

    def _steps(self, request: GenerationRequest) -> Iterator[Step]:
        *before, text = [m.text or "" for m in request.messages if m.role == "user"] or [""]
        if self._script is not None:
            return _recalling(_flatten(self._script), before)
        if text.lstrip().startswith("["):
            try:
                return _recalling(_flatten(json.loads(text)), before)
            except (ValueError, RecursionError) as exc:
                raise InvalidRequest(f"The script is not valid JSON: {exc}", "messages") from exc
        words = text.split(" ")
        return iter([{"text": word if i == 0 else f" {word}"} for i, word in enumerate(words)])


class _Playback:
    """One run of a script: counts tokens, watches for stop texts, the limit and cancellation."""

    def __init__(self, request: GenerationRequest, sink: Sink, prompt: int, limit: int) -> None:
        self._sink, self._limit, self._prompt = sink, limit, prompt
        self._stops = StopTexts(request.stop)
        self._output = self._reasoning = self._calls = 0
        self._finish: FinishReason | None = None
        self._running_usage = request.running_usage

    def play(self, steps: Iterator[Step]) -> None:
        self._feed(self._usage())
        for step in steps:
            if self._sink.cancelled or self._finish is not None:
                break
            self._run(step)
            if self._running_usage:
                self._feed(self._usage())
        if self._sink.cancelled:
            self._feed(self._usage())
            return
        if held := self._stops.end():
            self._feed(TextDelta(held))
        reason = self._finish or ("tool_calls" if self._calls else "stop")
        self._feed(Finish(reason, stop=self._stops.found))
        self._feed(self._usage())

    def _run(self, step: Step) -> None:
        match step:
            case {"text": str(text)}:
                self._output += 1
                if text := self._stops.feed(text):
                    self._feed(TextDelta(text))
                if self._stops.found is not None:
                    self._finish = "stop"
            case {"reasoning": str(text)}:
                self._output += 1
                self._reasoning += 1
                self._feed(ReasoningDelta(text))
            case {"tool_call": {"name": str(name), "arguments": list(pieces)}}:
                call, self._calls = self._calls, self._calls + 1
                self._feed(ToolCallDelta(call, "", id=f"call_{secrets.token_hex(12)}", name=name))
                for piece in pieces:
                    if self._output >= self._limit:
                        break
                    self._output += 1
                    self._feed(ToolCallDelta(call, str(piece)))
            case {"sleep_ms": int() | float() as delay_ms}:
                poll_s = min(max(delay_ms / 10_000, _SHORTEST_POLL_S), _LONGEST_POLL_S)
                until = time.monotonic() + delay_ms / 1000
                while (rest_s := until - time.monotonic()) > 0 and not self._sink.cancelled:
                    time.sleep(min(rest_s, poll_s))
            case {"fail": str(reason)}:
                raise GenerationFailed(reason)
            case {"finish": "stop" | "length" as reason}:
                self._finish = reason
            case _:
                raise InvalidRequest(f"Unknown script step: {step!r}", "messages")
        if self._finish is None and self._output >= self._limit:
            self._finish = "length"

    def _usage(self) -> Usage:
        return Usage(self._prompt, 0, self._output, self._reasoning)

    def _feed(self, delta: Delta) -> None:
        self._sink.feed(delta)


def _recalling(steps: Iterator[Step], said: list[str]) -> Iterator[Step]:
    """Yield the steps; a ``recall`` step becomes the text of the user's earlier messages."""
    for step in steps:
        match step:
            case {"recall": str(beginning)}:
                yield {"text": beginning + (" ".join(said) or "nothing.")}
            case _:
                yield step


def _flatten(steps: list[Step]) -> Iterator[Step]:
    """Yield the steps with repetitions unrolled."""
    for step in steps:
        match step:
            case {"repeat": int(times), "steps": list(nested)}:
                for _ in range(times):
                    yield from _flatten(nested)
            case _:
                yield step
