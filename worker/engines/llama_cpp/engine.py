"""llama.cpp, the default engine: a server process for each model, with one continuous batch.

The server is that of the wheel ``xllamacpp``, or a build of ``llama-server`` that the operator
names. It is spoken to as other servers are (``openai_upstream``); what is here is what the platform
adds to it, because the model's file and entry are known.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from inference_site.catalogue.engines.llama_cpp import LlamaCppOptions
from inference_site.catalogue.engines.openai_upstream import FLAVORS
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import GenerationRequest
from worker.engines.base import Engine, Sink, run_to_end
from worker.engines.chat.adapter import ChatAdapter
from worker.engines.chat.configuration import Vocabulary
from worker.engines.chat.template import stop_texts_of, takes_tools
from worker.engines.chat.tools import with_tools_in_text
from worker.engines.llama_cpp.constraints import TRIAL
from worker.engines.llama_cpp.errors import LlamaCppErrors
from worker.engines.llama_cpp.grammar_meter import measured
from worker.engines.llama_cpp.launch import checked, order
from worker.engines.llama_cpp.own_chat import needs_own_chat, own_chat, reads_its_own_way
from worker.engines.llama_cpp.payload import BANNED, LlamaCppPayloads
from worker.engines.llama_cpp.prompt_echo import Fresh, PromptEcho
from worker.engines.llama_cpp.template_trial import TemplateTrial
from worker.engines.llama_cpp.tokens import (
    Ask,
    detokenize,
    embed,
    fits,
    is_long,
    render,
    tokenize,
    tokens_of_words,
    with_short_prompts,
)
from worker.engines.openai_upstream.chunks import ChunkReader
from worker.engines.openai_upstream.client import Upstream
from worker.engines.openai_upstream.event_loop import Cancelled, event_loop
from worker.engines.openai_upstream.server import Endpoint, Server, own_server
from worker.engines.own_server import METRICS, Launch, OwnServer

_ASK_S = 30.0
_THOUGHTS = ("think", "reasoning", "channel")
"""What chat templates of models that reason have in them."""


def load(spec: ModelSpec) -> Engine:
    """Load a GGUF file. Raise EngineLoadError naming the file and the reason."""
    options = LlamaCppOptions.of(spec)
    arguments = checked(spec)
    trial = TemplateTrial(spec, options)
    extras = [str(path) for path in (options.mmproj, options.draft_model) if path]
    with_ = f" with {' and '.join(extras)}" if extras else ""
    template = ", or a chat template that is not valid" if options.chat_template else ""
    return OwnServer(
        spec,
        Launch(
            order=partial(order, spec, arguments),
            connect=partial(_connected, spec, trial),
            ready=FLAVORS["llama_cpp"].ready,
            pulse=METRICS,  # Which its loop answers.
            has_metrics=True,
            why_not_loaded=lambda process: (
                f"llama.cpp could not load {spec.file}{with_} (unsupported architecture, damaged "
                f"file, or not enough memory{template}); {process.reason}."
            ),
        ),
    ).loaded()


def _connected(spec: ModelSpec, trial: TemplateTrial, at: Endpoint) -> LlamaCppEngine:
    """Return the engine of a server that is ready."""
    with at.client(_ASK_S) as http:
        props: dict[str, Any] = http.get("/props").raise_for_status().json()
        empty = http.post("/tokenize", json={"content": "", "add_special": True})
        adds_bos = bool(empty.raise_for_status().json().get("tokens"))
        [listed] = http.get("/v1/models").raise_for_status().json()["data"]
        asked = {"prompt": "a", "max_tokens": 1, "grammar": TRIAL}
        is_bound = (
            "embedding" in spec.options or http.post("/v1/completions", json=asked).is_success
        )
    vocabulary = int((listed.get("meta") or {}).get("n_vocab") or 0)
    facts = BuildFacts(props, vocabulary, adds_bos=adds_bos, has_llguidance=is_bound)
    return LlamaCppEngine(spec, server_at(spec, at), trial, facts)


def server_at(spec: ModelSpec, at: Endpoint) -> Server:
    """Return how the server of a model is spoken to that this worker has started."""
    variables = spec.options.get("chat_template_kwargs", {})
    return own_server(spec, FLAVORS["llama_cpp"], at, variables)


@dataclass(frozen=True, slots=True)
class BuildFacts:
    """What was asked of a server when it was ready.

    ``props`` is what it says of its model, which has ``vocabulary`` tokens. ``adds_bos``:
    the tokenizer puts that token before every prompt. ``has_llguidance``: the build knows its
    grammars.
    """

    props: Mapping[str, Any]
    vocabulary: int
    adds_bos: bool
    has_llguidance: bool


class LlamaCppEngine(Engine):
    """A model in a server of llama.cpp (see ``worker.engines.base.Engine``)."""

    blocks = False

    def __init__(
        self, spec: ModelSpec, server: Server, trial: TemplateTrial, facts: BuildFacts
    ) -> None:
        self._spec, self._server, self._trial = spec, server, trial
        self._upstream = Upstream(spec, server, LlamaCppErrors)
        props = facts.props
        template = str(props.get("chat_template", ""))
        may_think = any(mark in template for mark in _THOUGHTS)
        self._payloads = LlamaCppPayloads(
            spec,
            server,
            may_think=may_think,
            stop_texts=stop_texts_of(template),
            has_llguidance=facts.has_llguidance,
            vocabulary=facts.vocabulary,
        )
        vocabulary = Vocabulary(
            chat_template=props.get("chat_template_tool_use") or template or None,
            bos=str(props.get("bos_token", "")),
            eos=str(props.get("eos_token", "")),
            adds_bos=facts.adds_bos,
        )
        self._own_chat: Callable[[str], ChatAdapter] = cache(
            partial(own_chat, spec, vocabulary, self._complete, self.tokenize)
        )
        self._takes_tools = takes_tools(vocabulary.chat_template or "")
        self._threads = ThreadPoolExecutor(spec.slots, thread_name_prefix=f"model-{spec.id}")

    def start(
        self,
        request: GenerationRequest,
        sink: Sink,
        ended: Callable[[Exception | None], None],
    ) -> bool:
        """Begin the request (see ``Engine.start``).

        What is one call of the server goes on on the event loop, anything else on a thread.
        """
        if sink.cancelled:
            return False
        if BANNED in request.extensions:
            self._threads.submit(run_to_end, self, request, sink, ended)
            return True
        told = self._told(request)
        if told.operation == "chat" and not needs_own_chat(told, self._spec):
            prompt = self._trial.check(told)
            if not is_long((prompt,)):
                event_loop().start(self._chat(told, sink), ended)
                return True
        elif request.operation == "complete" and not (request.echo or request.names_prompt_tokens):
            request = self._payloads.with_whole_prompts(request)
            if not is_long(request.prompts):
                event_loop().start(self._completion(request, sink), ended)
                return True
        self._threads.submit(run_to_end, self, request, sink, ended)
        return True

    def _told(self, request: GenerationRequest) -> GenerationRequest:
        """Return a request whose tools the template shows, or the text of its messages does."""
        is_told = self._takes_tools or request.operation not in ("chat", "render")
        return request if is_told or request.prompt_template else with_tools_in_text(request)

    def chat(self, request: GenerationRequest, sink: Sink) -> None:
        """Generate the answers into the sink (see ``Engine.chat``)."""
        request = self._without_words(request, sink)
        told = self._told(request)
        if needs_own_chat(told, self._spec):  # It tells the model of tools itself.
            self._own_chat(request.prompt_template).chat(request, sink)
            return
        request = told
        if sink.cancelled:
            return
        prompt = self._trial.check(request)
        if self._fits(request, prompt, sink):
            event_loop().run(self._chat(request, sink))

    def complete(self, request: GenerationRequest, sink: Sink) -> None:
        """Continue the prompts into the sink (see ``Engine.complete``)."""
        request = self._without_words(request, sink)
        if not request.echo:
            self._complete(request, sink)
            return
        echo = PromptEcho(self._spec, self._payloads, self._ask(request, sink), request)
        with suppress(Cancelled):
            prompts = echo.feed(sink)
            if sink.cancelled:
                return
            if request.max_output_tokens == 0:
                if request.names_prompt_tokens:
                    echo.feed_tokens(sink)
                echo.end(prompts, sink)
                return
            is_fresh = request.scores_prompts
            told = replace(request, prompts=prompts)
            self._complete(told, Fresh(sink) if is_fresh else sink)

    def _complete(
        self, request: GenerationRequest, sink: Sink, shown: tuple[str, ...] = ()
    ) -> None:
        given = self._payloads.with_whole_prompts(request)
        with suppress(Cancelled):
            ask = self._ask(request, sink)
            ready = with_short_prompts(ask, self._spec, given, sink)
            if ready is not None and ready.names_prompt_tokens:
                prompts = PromptEcho(self._spec, self._payloads, ask, ready).feed_tokens(sink)
                ready, sink = replace(ready, prompts=prompts), Fresh(sink)
            if ready is not None and not sink.cancelled:
                event_loop().run(self._completion(ready, sink, shown))

    def _chat(self, request: GenerationRequest, sink: Sink) -> Coroutine[Any, Any, None]:
        """Return the run of a chat; its payload is made here, on the calling thread."""
        payload = self._payloads.chat(request)
        return self._stream("/chat/completions", payload, request, sink)

    def _completion(
        self, request: GenerationRequest, sink: Sink, shown: tuple[str, ...] = ()
    ) -> Coroutine[Any, Any, None]:
        """Return the run of a completion, whose text shows the special tokens of these texts."""
        payload = self._payloads.complete(request, shown)
        return self._stream("/completions", payload, request, sink, is_plain=not shown)

    async def _stream(
        self,
        path: str,
        payload: dict[str, Any],
        request: GenerationRequest,
        sink: Sink,
        *,
        is_plain: bool = True,
    ) -> None:
        """Generate; without ``is_plain``, the text also shows tokens that no constraint has."""
        constraint = request.constraint or request.forced_grammar
        measuring = measured(constraint, sink, is_plain=is_plain)
        reader = ChunkReader(request, measuring, self._upstream.errors, self._server)
        await self._upstream.stream(path, payload, reader)

    def _without_words(self, request: GenerationRequest, sink: Sink) -> GenerationRequest:
        """Return a request whose forbidden words are tokens; none of them once it is cancelled."""
        if not (words := request.extensions.get(BANNED)):
            return request
        banned: tuple[int, ...] = ()
        with suppress(Cancelled):
            banned = tokens_of_words(self._ask(request, sink), words)
        return replace(request, extensions={**request.extensions, BANNED: banned})

    def _ask(self, request: GenerationRequest, sink: Sink) -> Ask:
        """Return what asks the server for this request; it raises Cancelled when that is."""

        def ask(path: str, payload: dict[str, Any]) -> dict[str, Any]:
            asked = self._upstream.post(
                lambda address: f"{address.root_url}{path}", payload, request, sink
            )
            return event_loop().run(asked)

        return ask

    def _fits(self, request: GenerationRequest, prompt: str, sink: Sink) -> bool:
        with suppress(Cancelled):
            return fits(self._ask(request, sink), self._spec, request, prompt, sink)
        return False

    def embed(self, request: GenerationRequest, sink: Sink) -> None:
        """Embed the prompts (see ``Engine.embed``)."""
        with suppress(Cancelled):
            embed(self._ask(request, sink), self._spec, request, sink)

    def tokenize(self, request: GenerationRequest, sink: Sink) -> None:
        """Turn texts into tokens (see ``Engine.tokenize``)."""
        with suppress(Cancelled):
            tokenize(self._ask(request, sink), self._spec, request, sink)

    def detokenize(self, request: GenerationRequest, sink: Sink) -> None:
        """Turn tokens into texts (see ``Engine.detokenize``)."""
        with suppress(Cancelled):
            detokenize(self._ask(request, sink), request, sink)

    def render(self, request: GenerationRequest, sink: Sink) -> None:
        """Apply the chat template (see ``Engine.render``)."""
        if request.prompt_template or reads_its_own_way(self._spec):
            self._own_chat(request.prompt_template).render(request, sink)
            return
        request = self._told(request)
        if sink.cancelled:
            return
        self._trial.check(request)
        payload = self._payloads.chat(request)
        with suppress(Cancelled):
            render(self._ask(request, sink), self._spec, request, payload, sink)

    @property
    def fault(self) -> str:
        """Why the server cannot be used (see ``Engine.fault``)."""
        return self._upstream.addresses.fault

    @property
    def shows_tools(self) -> bool:
        """Whether the template does (see ``Engine.shows_tools``)."""
        return self._takes_tools

    def watch(self, on_change: Callable[[], None]) -> None:
        """Have it called when ``fault`` begins or ends (see ``Engine.watch``)."""
        self._upstream.health.on_change = on_change

    def close(self) -> None:
        """Close the connections; the server is closed by who has started it."""
        self._upstream.close()
        self._threads.shutdown(wait=False)
