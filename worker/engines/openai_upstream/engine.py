"""A model that any OpenAI-compatible server runs: vLLM, SGLang, llama-server, Ollama, TGI.

The server is always asked for a stream. A run holds one connection, and closes it when it is
cancelled, which stops the server. Options: see docs/engines.md.
"""

from __future__ import annotations

from contextlib import suppress

from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import GenerationRequest
from worker.engines.base import Engine, Sink
from worker.engines.openai_upstream.chunks import ChunkReader
from worker.engines.openai_upstream.client import Upstream
from worker.engines.openai_upstream.payload import Payloads
from worker.engines.openai_upstream.server import server_of
from worker.engines.openai_upstream.tokens import TokenService
from worker.engines.openai_upstream.transport import Cancelled


def load(spec: ModelSpec) -> UpstreamEngine:
    """Find the model on its server. Raise EngineLoadError naming the address and the reason."""
    server = server_of(spec)
    upstream = Upstream(spec, server)
    try:
        payloads = Payloads(spec, server, upstream.find_model())
    except BaseException:
        upstream.close()
        raise
    return UpstreamEngine(
        upstream,
        payloads,
        TokenService(upstream, server, payloads),
        server.flavor.forces_by_schema,
    )


class UpstreamEngine(Engine):
    """A model of a server (see ``worker.engines.base.Engine``)."""

    def __init__(
        self, upstream: Upstream, payloads: Payloads, tokens: TokenService, by_schema: bool
    ) -> None:
        self._upstream, self._payloads, self._tokens = upstream, payloads, tokens
        self._by_schema = by_schema

    def chat(self, request: GenerationRequest, sink: Sink) -> None:
        """Generate the answers into the sink (see ``Engine.chat``)."""
        self._run("/chat/completions", self._payloads.chat(request), request, sink)

    def complete(self, request: GenerationRequest, sink: Sink) -> None:
        """Continue the prompts into the sink (see ``Engine.complete``)."""
        self._run("/completions", self._payloads.complete(request), request, sink)

    def embed(self, request: GenerationRequest, sink: Sink) -> None:
        """Embed the prompts (see ``Engine.embed``)."""
        with suppress(Cancelled):
            self._tokens.embed(request, sink)

    def tokenize(self, request: GenerationRequest, sink: Sink) -> None:
        """Turn texts into tokens (see ``Engine.tokenize``)."""
        with suppress(Cancelled):
            self._tokens.tokenize(request, sink)

    def detokenize(self, request: GenerationRequest, sink: Sink) -> None:
        """Turn tokens into texts (see ``Engine.detokenize``)."""
        with suppress(Cancelled):
            self._tokens.detokenize(request, sink)

    def render(self, request: GenerationRequest, sink: Sink) -> None:
        """Feed the prompt of a chat (see ``Engine.render``)."""
        with suppress(Cancelled):
            self._tokens.render(request, sink)

    def close(self) -> None:
        """Close the connections."""
        self._upstream.close()

    def _run(self, path: str, payload: bytes, request: GenerationRequest, sink: Sink) -> None:
        if not sink.cancelled:
            reader = ChunkReader(request, sink, self._upstream.errors, self._by_schema)
            self._upstream.stream(path, payload, reader)
