"""A model that any OpenAI-compatible server runs: vLLM, SGLang, llama-server, Ollama, TGI.

The server is always asked for a stream. A run holds one connection, and closes it when it is
cancelled, which stops the server. All runs are read by one thread. Options: see docs/engines.md.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import GenerationRequest, Operation
from worker.engines.base import ForwardingEngine, Sink
from worker.engines.openai_upstream.chunks import ChunkReader
from worker.engines.openai_upstream.client import Upstream
from worker.engines.openai_upstream.event_loop import Cancelled, event_loop
from worker.engines.openai_upstream.payload import Payloads
from worker.engines.openai_upstream.prompt_logprobs import feed_prompt_logprobs
from worker.engines.openai_upstream.repeating import RepeatingSink
from worker.engines.openai_upstream.server import Server, server_of
from worker.engines.openai_upstream.tokens import TokenService


def load(spec: ModelSpec) -> UpstreamEngine:
    """Look for the model on its servers; one that is not there now is looked for again.

    Raise EngineLoadError for a key that cannot be read.
    """
    return engine_of(spec, server_of(spec))


def engine_of(spec: ModelSpec, server: Server) -> UpstreamEngine:
    """Return the engine of a model of these servers."""
    upstream, payloads = Upstream(spec, server), Payloads(spec, server)
    tokens = TokenService(upstream, server, payloads)
    return UpstreamEngine(upstream, payloads, tokens, server)


class UpstreamEngine(ForwardingEngine):
    """A model of a server (see ``worker.engines.base.Engine``)."""

    blocks = False

    def __init__(
        self, upstream: Upstream, payloads: Payloads, tokens: TokenService, server: Server
    ) -> None:
        self._upstream, self._payloads, self._tokens = upstream, payloads, tokens
        self._server = server

    def start(
        self,
        request: GenerationRequest,
        sink: Sink,
        ended: Callable[[Exception | None], None],
    ) -> bool:
        """Begin the request; it goes on on the event loop (see ``Engine.start``)."""
        event_loop().start(self._work(request.operation, request, sink), ended)
        return True

    @property
    def fault(self) -> str:
        """Why none of its servers can be used; empty while one can."""
        return self._upstream.addresses.fault

    @property
    def context_length(self) -> int | None:
        """The shortest that one of its servers says (see ``Engine.context_length``)."""
        told = (one.contexts.get(one.model or "") for one in self._upstream.addresses.all)
        return min(filter(None, told), default=None)

    def watch(self, on_change: Callable[[], None]) -> None:
        """Have it called when ``fault`` begins or ends (see ``Engine.watch``)."""
        self._upstream.health.on_change = on_change

    def close(self) -> None:
        """Close the connections."""
        self._upstream.close()

    def _wait(self, request: GenerationRequest, sink: Sink, operation: Operation) -> None:
        event_loop().run(self._work(operation, request, sink))

    def _work(
        self, operation: Operation, request: GenerationRequest, sink: Sink
    ) -> Coroutine[Any, Any, None]:
        """Return the run; its payload is made here, on the calling thread."""
        is_greedy = request.sampling.temperature == 0 and self._server.flavor.greedy_once
        if request.choices > 1 and is_greedy:
            sink = RepeatingSink(sink, request.choices)
            request = replace(request, choices=1)
        match operation:
            case "chat":
                payload = self._payloads.chat(request)
                return self._stream("/chat/completions", payload, request, sink)
            case "complete":
                payload = self._payloads.complete(request)
                return self._stream("/completions", payload, request, sink)
            case _:
                return self._ask(getattr(self._tokens, operation)(request, sink))

    async def _stream(
        self, path: str, payload: dict[str, Any], request: GenerationRequest, sink: Sink
    ) -> None:
        if request.prompt_logprobs is not None:
            await self._ask(feed_prompt_logprobs(self._upstream, path, payload, request, sink))
        if not sink.cancelled:
            reader = ChunkReader(request, sink, self._upstream.errors, self._server)
            await self._upstream.stream(path, payload, reader)

    async def _ask(self, work: Coroutine[Any, Any, None]) -> None:
        with suppress(Cancelled):
            await work
