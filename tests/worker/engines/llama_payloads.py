"""What llama.cpp's server is sent."""

from __future__ import annotations

from typing import Any

from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest
from worker.engines.llama_cpp.engine import server_at
from worker.engines.llama_cpp.payload import LlamaCppPayloads
from worker.engines.openai_upstream.server import Endpoint


def payloads(spec: ModelSpec, *, has_llguidance: bool = True) -> LlamaCppPayloads:
    """Return what writes the requests for a model that may think."""
    server = server_at(spec, Endpoint("http://127.0.0.1:1", 1, "key"))
    return LlamaCppPayloads(
        spec, server, may_think=True, stop_texts=(), has_llguidance=has_llguidance, vocabulary=2560
    )


def chat_payload(request: GenerationRequest, spec: ModelSpec) -> dict[str, Any]:
    """Return the payload of a chat."""
    return payloads(spec).chat(request)
