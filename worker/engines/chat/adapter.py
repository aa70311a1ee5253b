"""Chats on an engine that can only continue texts.

The messages become a prompt by the model's chat template, the prompt is continued, and what comes
is parsed. What the engine must offer is ``complete`` for a text, whose output shows the tags of the
model's reasoning and calls even where these are special tokens; with the capability ``grammar``,
which is needed to force a call, ``request.constraint`` too; and ``tokenize`` for ``render``.

An engine's ``load`` returns ``ChatAdapter(engine, configure_chat(spec, options, vocabulary), …)``.
Its options are a subclass of ``ChatOptions``, and its capabilities ``chat_capabilities(its own)``
(``inference_site.catalogue.engines.options``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

from inference_site.domain.deltas import (
    Delta,
    Finish,
    FinishReason,
    PromptDelta,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    TokensDelta,
    ToolCallDelta,
    Usage,
)
from inference_site.domain.errors import ContextLengthExceeded, InvalidRequest
from inference_site.domain.request import Constraint, GenerationRequest
from worker.engines.base import Engine, Sink
from worker.engines.chat.configuration import ChatConfiguration
from worker.engines.chat.parser import OutputParser, ends_in_reasoning
from worker.engines.chat.template import without_bos
from worker.engines.chat.tools import forced_constraint, forced_reader, with_tools_in_text


class ChatAdapter(Engine):
    """An engine whose completions are chats too (see ``Engine``); the rest is the engine's own.

    ``with_template`` returns the adapter for a template that a request names.
    """

    def __init__(
        self,
        engine: Engine,
        configuration: ChatConfiguration,
        capabilities: frozenset[str],
        with_template: Callable[[str], ChatAdapter] | None = None,
    ) -> None:
        self._engine, self._chat, self._capabilities = engine, configuration, capabilities
        self._with_template = with_template

    def chat(self, request: GenerationRequest, sink: Sink) -> None:
        """Generate answers to the messages (see ``Engine.chat``)."""
        if chat := self._chosen(request):
            chat.chat(replace(request, prompt_template=""), sink)
            return
        if sink.cancelled:
            return
        request = self._told(request)
        prompt = self._prompt(request)
        if request.reasoning_budget is None:
            sink_ = ChatSink(
                sink, self._parsers(request, prompt), ChatUsage(), self._own_stop(request)
            )
            self._complete(self._completion(request, prompt), sink_)
            return
        # Each choice comes to its budget at a place of its own, so they run one after another.
        usage = ChatUsage()
        for index in range(request.choices):
            if sink.cancelled:
                return
            self._think_and_answer(_one(request, index), prompt, _Choice(sink, index), usage)
            usage.go_on()

    def complete(self, request: GenerationRequest, sink: Sink) -> None:
        """Continue the prompts as they are (see ``Engine.complete``)."""
        self._engine.complete(request, sink)

    def embed(self, request: GenerationRequest, sink: Sink) -> None:
        """Embed the prompts (see ``Engine.embed``)."""
        self._engine.embed(request, sink)

    def tokenize(self, request: GenerationRequest, sink: Sink) -> None:
        """Turn texts into tokens (see ``Engine.tokenize``)."""
        self._engine.tokenize(request, sink)

    def detokenize(self, request: GenerationRequest, sink: Sink) -> None:
        """Turn tokens into texts (see ``Engine.detokenize``)."""
        self._engine.detokenize(request, sink)

    def render(self, request: GenerationRequest, sink: Sink) -> None:
        """Feed the prompt that ``chat`` would begin with (see ``Engine.render``)."""
        if chat := self._chosen(request):
            chat.render(replace(request, prompt_template=""), sink)
            return
        if sink.cancelled:
            return
        prompt = self._prompt(self._told(request))
        tokens = _Tokens(sink)
        text = GenerationRequest(request.model, operation="tokenize", prompts=(prompt,))
        try:
            self._engine.tokenize(text, tokens)
        except ContextLengthExceeded as exc:
            raise exc.of("messages") from exc
        if sink.cancelled:
            return
        sink.feed(PromptDelta(prompt, tokens.ids))
        sink.feed(Finish("stop"))

    def _chosen(self, request: GenerationRequest) -> ChatAdapter | None:
        """Return the adapter for the template that a request names, if it names one."""
        name = request.prompt_template
        return self._with_template(name) if name and self._with_template else None

    @property
    def fault(self) -> str:
        """That of the engine (see ``Engine.fault``)."""
        return self._engine.fault

    def watch(self, on_change: Callable[[], None]) -> None:
        """Watch the engine (see ``Engine.watch``)."""
        self._engine.watch(on_change)

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    @property
    def shows_tools(self) -> bool:
        """Whether the template does (see ``Engine.shows_tools``)."""
        return self._chat.template.takes_tools

    def _told(self, request: GenerationRequest) -> GenerationRequest:
        """Return a request whose tools the template shows, or the text of its messages does."""
        return request if self._chat.template.takes_tools else with_tools_in_text(request)

    def _prompt(self, request: GenerationRequest) -> str:
        if request.must_call and "grammar" not in self._capabilities:
            raise InvalidRequest("This model's engine cannot force a call.", "tool_choice")
        prompt = without_bos(self._chat.template.render(request), self._chat.bos)
        is_bound = request.must_call or request.constraint is not None
        if is_bound and ends_in_reasoning(prompt, self._chat.syntax):
            # What binds the answer would bind its reasoning, which could never end.
            prompt += self._chat.syntax.closing
        return prompt

    def _parsers(self, request: GenerationRequest, prompt: str) -> Sequence[ChoiceParser]:
        if request.must_call:
            return [ForcedCallParser(request, index) for index in range(request.choices)]
        in_reasoning = ends_in_reasoning(prompt, self._chat.syntax)
        return [
            OutputParser(
                self._chat.syntax,
                request.tools,
                index=index,
                in_reasoning=in_reasoning,
                parallel=request.parallel_tool_calls,
            )
            for index in range(request.choices)
        ]

    def _completion(self, request: GenerationRequest, prompt: str) -> GenerationRequest:
        """Return the completion that a chat comes to."""
        return replace(
            request,
            operation="complete",
            prompts=(prompt,),
            messages=(),
            tools=(),
            must_call=False,
            template_vars={},
            reasoning_budget=None,
            response_prefix="",
            stop=(*request.stop, *self._own_stop(request)),
            constraint=_constraint(request),
        )

    def _own_stop(self, request: GenerationRequest) -> tuple[str, ...]:
        return tuple(text for text in self._chat.stop if text not in request.stop)

    def _complete(self, request: GenerationRequest, sink: Sink) -> None:
        """Run the completion; what is wrong with its prompt is wrong with the messages."""
        try:
            self._engine.complete(request, sink)
        except ContextLengthExceeded as exc:
            raise exc.of("messages") from exc
        except InvalidRequest as exc:
            param = "messages" if exc.param == "prompt" else exc.param
            raise InvalidRequest(str(exc), param) from exc

    def _think_and_answer(
        self, request: GenerationRequest, prompt: str, sink: Sink, usage: ChatUsage
    ) -> None:
        """Run one choice; end its reasoning at the budget, and go on from there."""
        parser = self._parsers(request, prompt)
        completion, before = self._completion(request, prompt), usage.total()
        budget = (request.reasoning_budget or 0) + usage.reasoning
        thinking = ChatSink(sink, parser, usage, self._own_stop(request), budget)
        if not thinking.is_over_budget:
            self._complete(completion, thinking)
        if not thinking.is_over_budget or sink.cancelled:
            return
        closing = self._chat.syntax.closing
        used = usage.total().output_tokens - before.output_tokens
        for piece in parser[0].feed(closing):
            sink.feed(piece)
        if request.max_output_tokens is not None and used >= request.max_output_tokens:
            sink.feed(Finish("length"))
            return
        usage.go_on()
        rest = replace(
            completion,
            prompts=(prompt + thinking.text + closing,),
            max_output_tokens=request.max_output_tokens and request.max_output_tokens - used,
        )
        self._complete(rest, ChatSink(sink, parser, usage, self._own_stop(request)))


def _constraint(request: GenerationRequest) -> Constraint | None:
    """Return what the answer must match: that of the request, or that of a forced call.

    Where the model chooses whether to call, nothing binds its answer. An engine with a grammar that
    begins at a tag would get it here.
    """
    if not request.must_call:
        return request.constraint
    return forced_constraint(request)


def _one(request: GenerationRequest, index: int) -> GenerationRequest:
    """Return a request for one of the choices, with a seed of its own."""
    seed = request.sampling.seed
    own_seed = None if seed is None else seed + index
    return replace(request, choices=1, sampling=replace(request.sampling, seed=own_seed))


class _Choice:
    """A sink of one choice by itself, as the one with this index of a request."""

    def __init__(self, sink: Sink, index: int) -> None:
        self._sink, self._index = sink, index

    @property
    def cancelled(self) -> bool:
        return self._sink.cancelled

    def feed(self, delta: Delta) -> None:
        if isinstance(delta, TextDelta | ReasoningDelta | ToolCallDelta | Finish):
            delta = replace(delta, index=self._index)
        self._sink.feed(delta)


class _Tokens:
    """Keeps the tokens of one text."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.ids: tuple[int, ...] = ()

    @property
    def cancelled(self) -> bool:
        return self._sink.cancelled

    def feed(self, delta: Delta) -> None:
        if isinstance(delta, TokensDelta):
            self.ids = delta.ids


class ChoiceParser(Protocol):
    """Parses one choice (see ``worker.engines.chat.parser.OutputParser``)."""

    @property
    def in_reasoning(self) -> bool: ...

    @property
    def calls(self) -> int: ...

    @property
    def call_is_open(self) -> bool: ...

    @property
    def is_holding(self) -> bool: ...

    def feed(
        self, text: str, logprobs: tuple[TokenLogprob, ...] = ()
    ) -> Sequence[TextDelta | ReasoningDelta | ToolCallDelta]: ...

    def finish(self) -> Sequence[TextDelta | ReasoningDelta | ToolCallDelta]: ...


class ForcedCallParser:
    """Parses a choice that is bound to be one call."""

    in_reasoning = is_holding = False

    def __init__(self, request: GenerationRequest, index: int) -> None:
        self._call = forced_reader(request, index)
        self.calls = 1

    @property
    def call_is_open(self) -> bool:
        """Whether the call is not complete, as it is from the beginning."""
        return not self._call.is_complete

    def feed(self, text: str, logprobs: tuple[TokenLogprob, ...] = ()) -> list[ToolCallDelta]:
        """Take the next piece of text; return the pieces of the call it completes."""
        return self._call.feed(text)

    def finish(self) -> list[ToolCallDelta]:
        """Nothing is held back that would be a piece of a call."""
        return []


class ChatUsage:
    """Tokens over the completions that make up one chat.

    A later completion goes on from the text of the one before, so its prompt is none of the chat.
    """

    def __init__(self) -> None:
        self.reasoning = 0
        self._done = Usage()
        self._running: Usage | None = None

    def take(self, usage: Usage) -> Usage:
        """Take what the completion that runs has used so far; return what the chat has."""
        self._running = usage
        return self.total()

    def go_on(self) -> None:
        """Begin the next completion."""
        self._done, self._running = self.total(), None

    def total(self) -> Usage:
        """Return what the chat has used so far."""
        done, running = self._done, self._running or Usage()
        is_first = done.input_tokens == 0
        output = done.output_tokens + running.output_tokens
        return Usage(
            running.input_tokens if is_first else done.input_tokens,
            running.cached_tokens if is_first else done.cached_tokens,
            output,
            min(self.reasoning, output),
            done.prefill_ms + running.prefill_ms,
            done.decode_ms + running.decode_ms,
        )


class ChatSink:
    """Parses the choices of a completion, and says how they end.

    A piece of text counts as one token, or as many as it has log probabilities. ``own_stop`` are
    stop texts that the request does not know of. When ``budget`` tokens of reasoning have come, the
    completion is stopped, and ``is_over_budget``; ``text`` is then what has come of it.
    """

    def __init__(
        self,
        sink: Sink,
        parsers: Sequence[ChoiceParser],
        usage: ChatUsage,
        own_stop: Collection[str] = (),
        budget: int | None = None,
    ) -> None:
        self._sink, self._parsers, self._usage = sink, parsers, usage
        self._own_stop, self._budget = own_stop, budget
        self._pieces: list[str] = []
        self.is_over_budget = budget == 0 and parsers[0].in_reasoning

    @property
    def cancelled(self) -> bool:
        """Whether the completion must stop now."""
        return self.is_over_budget or self._sink.cancelled

    @property
    def text(self) -> str:
        """What has come, tags included; only kept with a budget."""
        return "".join(self._pieces)

    def feed(self, delta: Delta) -> None:
        """Take the completion's next delta."""
        match delta:
            case TextDelta(text, index, logprobs):
                if not self.is_over_budget:
                    self._text(self._parsers[index], text, logprobs)
            case Finish():
                if not self.is_over_budget:
                    self._finish(delta)
            case Usage():
                self._sink.feed(self._usage.take(delta))
            case _:
                self._sink.feed(delta)

    def _text(self, parser: ChoiceParser, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        if parser.in_reasoning:
            self._usage.reasoning += len(logprobs) or 1
        for piece in parser.feed(text, logprobs):
            self._sink.feed(piece)
        if self._budget is not None:
            self._pieces.append(text)
            # What may be the end tag is waited for.
            is_thinking = parser.in_reasoning and not parser.is_holding
            self.is_over_budget = is_thinking and self._usage.reasoning >= self._budget

    def _finish(self, finish: Finish) -> None:
        parser = self._parsers[finish.index]
        for piece in parser.finish():
            self._sink.feed(piece)
        stop = None if finish.stop in self._own_stop else finish.stop
        self._sink.feed(replace(finish, reason=_reason(finish.reason, parser), stop=stop))


def _reason(reason: FinishReason, parser: ChoiceParser) -> FinishReason:
    """Return why a choice ended. A call that is cut off was not made, whatever cut it."""
    if reason == "length" or parser.call_is_open:
        return "length"
    return "tool_calls" if parser.calls else "stop"
