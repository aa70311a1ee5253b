"""Chats on an engine that can only complete texts.

The adapter renders the messages with the model's chat template, lets the engine complete that
prompt, and parses the output. The engine needs ``complete`` for a text, with the tags of reasoning
and calls in its output even if they are special tokens; ``request.constraint`` for the capability
``grammar``, which forced calls need; and ``tokenize`` for ``render``.

An engine's ``load`` returns ``ChatAdapter(engine, configure_chat(spec, options, vocabulary), …)``.
Its options are a subclass of ``ChatOptions``, and its capabilities ``chat_capabilities(its own)``
(``inference_site.catalogue.engines.options``).
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    FinishReason,
    PromptDelta,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from inference_site.core.domain.errors import ContextLengthExceeded, InvalidRequest
from inference_site.core.domain.request import GenerationRequest
from worker.engines.base import Collector, Engine, Sink
from worker.engines.chat.configuration import ChatConfiguration
from worker.engines.chat.parser.formats import ends_in_reasoning
from worker.engines.chat.parser.parser import OutputParser
from worker.engines.chat.template import without_bos
from worker.engines.chat.tools import forced_constraint, forced_reader, with_tools_in_text


class ChatAdapter(Engine):
    """Adds chats to an engine; all other operations are the engine's (see ``Engine``).

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

    def run(self, request: GenerationRequest, sink: Sink) -> None:
        """Run the request; all but chats on the engine (see ``Engine.run``)."""
        if request.operation in ("chat", "render"):
            super().run(request, sink)
        else:
            self._engine.run(request, sink)

    def chat(self, request: GenerationRequest, sink: Sink) -> None:
        """Generate answers to the messages (see ``Engine.chat``)."""
        if chat := self._chosen(request):
            chat.chat(replace(request, prompt_template=""), sink)
            return
        if sink.cancelled:
            return
        request = self._with_tools_in_text(request)
        prompt = self._prompt(request)
        if request.reasoning_budget is None:
            parsers = self._parsers(request, prompt)
            self._complete(
                self._completion(request, prompt), self._sink(request, sink, parsers, ChatUsage())
            )
            return
        if request.token_ids:  # They come in one piece: nothing ends the thoughts at the budget.
            raise InvalidRequest(
                "The tokens of an answer with a budget of reasoning cannot be returned.",
                "return_token_ids",
            )
        # Each choice reaches its budget at another token, so they run one after another.
        usage = ChatUsage()
        seed = request.sampling.seed
        for index in range(request.choices):
            if sink.cancelled:
                return
            sampling = replace(request.sampling, seed=None if seed is None else seed + index)
            choice = replace(request, choices=1, sampling=sampling)
            self._think_and_answer(choice, prompt, _Choice(sink, index), usage)
            usage.next_completion()

    def render(self, request: GenerationRequest, sink: Sink) -> None:
        """Feed the prompt that ``chat`` would begin with (see ``Engine.render``)."""
        if chat := self._chosen(request):
            chat.render(replace(request, prompt_template=""), sink)
            return
        if sink.cancelled:
            return
        prompt = self._prompt(self._with_tools_in_text(request))
        tokens = Collector(sink)
        text = GenerationRequest(request.model, operation="tokenize", prompts=(prompt,))
        try:
            self._engine.run(text, tokens)
        except ContextLengthExceeded as exc:
            raise exc.of("messages") from exc
        if sink.cancelled:
            return
        sink.feed(PromptDelta(prompt, tokens.tokens))
        sink.feed(Finish("stop"))

    def _chosen(self, request: GenerationRequest) -> ChatAdapter | None:
        """Return the adapter for the template that a request names, if it names one."""
        name = request.prompt_template
        return self._with_template(name) if name and self._with_template else None

    @property
    def fault(self) -> str:
        """The engine's fault (see ``Engine.fault``)."""
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

    def _with_tools_in_text(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request; if the template has no tools, with them in its messages."""
        return request if self._chat.template.takes_tools else with_tools_in_text(request)

    def _prompt(self, request: GenerationRequest) -> str:
        if request.must_call and "grammar" not in self._capabilities:
            raise InvalidRequest("This model's engine cannot force a call.", "tool_choice")
        prompt = self._chat.template.render(replace(request, response_prefix=""))
        prompt = without_bos(prompt, self._chat.bos)
        # A constraint would apply to the reasoning, which could not end then.
        is_bound = request.must_call or request.constraint is not None
        ends_reasoning = is_bound or request.reasoning_budget == 0
        if ends_reasoning and ends_in_reasoning(prompt, self._chat.syntax):
            prompt += self._chat.syntax.closing
        return prompt + request.response_prefix

    def begins_in_reasoning(self, prompt: str) -> bool:
        """Whether the text after this prompt is reasoning."""
        return ends_in_reasoning(prompt, self._chat.syntax)

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
                only_tools=request.only_tools,
            )
            for index in range(request.choices)
        ]

    def _completion(self, request: GenerationRequest, prompt: str) -> GenerationRequest:
        """Return the completion of a chat's prompt.

        Only a forced call constrains calls: an answer with optional calls stays unconstrained.
        """
        constraint = forced_constraint(request) if request.must_call else request.constraint
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
            constraint=constraint,
            top_logprobs=0 if _hides_logprobs(request) else request.top_logprobs,
        )

    def _sink(
        self,
        request: GenerationRequest,
        sink: Sink,
        parsers: Sequence[ChoiceParser],
        usage: ChatUsage,
        budget: int | None = None,
    ) -> ChatSink:
        hides = _hides_logprobs(request)
        return ChatSink(sink, parsers, usage, self._own_stop(request), budget, hides)

    def _own_stop(self, request: GenerationRequest) -> tuple[str, ...]:
        return tuple(text for text in self._chat.stop if text not in request.stop)

    def _complete(self, request: GenerationRequest, sink: Sink) -> None:
        """Run the completion; errors about its prompt name the messages instead."""
        try:
            self._engine.run(request, sink)
        except ContextLengthExceeded as exc:
            raise exc.of("messages") from exc
        except InvalidRequest as exc:
            param = "messages" if exc.param == "prompt" else exc.param
            raise InvalidRequest(str(exc), param) from exc

    def _think_and_answer(
        self, request: GenerationRequest, prompt: str, sink: Sink, usage: ChatUsage
    ) -> None:
        """Run one choice; end its reasoning at the budget, and continue with the answer."""
        parser = self._parsers(request, prompt)
        completion, before = self._completion(request, prompt), usage.total()
        budget = (request.reasoning_budget or 0) + usage.reasoning
        thinking = self._sink(request, sink, parser, usage, budget)
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
        usage.next_completion()
        rest = replace(
            completion,
            prompts=(prompt + thinking.text + closing,),
            max_output_tokens=request.max_output_tokens and request.max_output_tokens - used,
        )
        self._complete(rest, self._sink(request, sink, parser, usage))


def _hides_logprobs(request: GenerationRequest) -> bool:
    """Whether log probabilities are needed to tell thoughts from text, and not for the client.

    An answer with the ids of its tokens comes in one piece, which only they divide into tokens.
    """
    return request.token_ids and request.top_logprobs is None


class _Choice:
    """A sink that passes the deltas of a single choice on with this index."""

    def __init__(self, sink: Sink, index: int) -> None:
        self._sink, self._index = sink, index

    @property
    def cancelled(self) -> bool:
        return self._sink.cancelled

    def feed(self, delta: Delta) -> None:
        if isinstance(delta, TextDelta | ReasoningDelta | ToolCallDelta | Finish):
            delta = replace(delta, index=self._index)
        self._sink.feed(delta)


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
    """Parses a choice that is constrained to one call."""

    in_reasoning = is_holding = False

    def __init__(self, request: GenerationRequest, index: int) -> None:
        self._call = forced_reader(request, index)
        self.calls = 1

    @property
    def call_is_open(self) -> bool:
        """Whether the call is not complete."""
        return not self._call.is_complete

    def feed(self, text: str, logprobs: tuple[TokenLogprob, ...] = ()) -> list[ToolCallDelta]:
        """Take the next piece of text; return the deltas of the call that it completes."""
        return self._call.feed(text)

    def finish(self) -> list[ToolCallDelta]:
        """Return nothing: the reader holds no text back."""
        return []


class ChatUsage:
    """Adds up the usage of the completions of one chat.

    Only the first completion's prompt counts: later ones repeat it with the text so far.
    """

    def __init__(self) -> None:
        self.reasoning = 0
        self._done = Usage()
        self._running: Usage | None = None

    def take(self, usage: Usage) -> Usage:
        """Set the usage of the running completion; return the usage of the chat."""
        self._running = usage
        return self.total()

    def next_completion(self) -> None:
        """Begin the next completion."""
        self._done, self._running = self.total(), None

    def total(self) -> Usage:
        """Return the usage of the chat so far."""
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
    """Parses the choices of a completion, and sets their finish reasons.

    A piece of text counts as one token; one with log probabilities is divided into its tokens.
    ``own_stop`` are the template's stop texts, which answers do not report. After ``budget`` tokens
    of reasoning the completion is cancelled, ``is_over_budget`` is set, and ``text`` is the output
    until then. ``hides_logprobs``: the text is passed on without them.
    """

    def __init__(
        self,
        sink: Sink,
        parsers: Sequence[ChoiceParser],
        usage: ChatUsage,
        own_stop: Collection[str] = (),
        budget: int | None = None,
        hides_logprobs: bool = False,
    ) -> None:
        self._sink, self._parsers, self._usage = sink, parsers, usage
        self._hides_logprobs = hides_logprobs
        self._own_stop, self._budget = own_stop, budget
        self._pieces: list[str] = []
        self.is_over_budget = budget == 0 and parsers[0].in_reasoning

    @property
    def cancelled(self) -> bool:
        """Whether the completion must stop now."""
        return self.is_over_budget or self._sink.cancelled

    @property
    def text(self) -> str:
        """The output so far, tags included; only kept with a budget."""
        return "".join(self._pieces)

    def feed(self, delta: Delta) -> None:
        """Take the completion's next delta."""
        match delta:
            case TextDelta() | Finish() if self.is_over_budget:
                pass
            case TextDelta(text, index, logprobs):
                parser = self._parsers[index]
                for part, entries in _by_token(text, logprobs):
                    if self.is_over_budget:
                        break
                    if parser.in_reasoning:
                        self._usage.reasoning += len(entries) or 1
                    for piece in parser.feed(part, () if self._hides_logprobs else entries):
                        self._sink.feed(piece)
                    if self._budget is not None:
                        self._pieces.append(part)
                        # The held text may be the end tag.
                        is_thinking = parser.in_reasoning and not parser.is_holding
                        self.is_over_budget = is_thinking and self._usage.reasoning >= self._budget
            case Finish(index=index):
                parser = self._parsers[index]
                for piece in parser.finish():
                    self._sink.feed(piece)
                reason: FinishReason = "tool_calls" if parser.calls else "stop"
                if delta.reason == "length" or parser.call_is_open:
                    reason = "length"  # An incomplete call is no call.
                stop = None if delta.stop in self._own_stop else delta.stop
                self._sink.feed(replace(delta, reason=reason, stop=stop))
            case Usage():
                self._sink.feed(self._usage.take(delta))
            case _:
                self._sink.feed(delta)


def _by_token(
    text: str, logprobs: tuple[TokenLogprob, ...]
) -> Iterator[tuple[str, tuple[TokenLogprob, ...]]]:
    """Divide a text into those of its tokens, if their log probabilities have all of its bytes.

    The text of a token that ends inside a character comes with the next one.
    """
    if len(logprobs) < 2 or b"".join(entry.text_bytes for entry in logprobs) != text.encode():
        yield text, logprobs
        return
    decoder = getincrementaldecoder("utf-8")()
    for entry in logprobs:
        yield decoder.decode(entry.text_bytes), (entry,)
